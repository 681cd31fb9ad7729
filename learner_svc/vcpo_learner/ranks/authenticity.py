"""What ranks believe of each other: only what the secret of the run has signed.

```
value    set   name(secret)/key  <-  sum(secret, key, value) + value     get: the sum must hold
object   pickle                  ->  sum(secret, pickle) + pickle        unpickled if the sum holds
```

The store of the ranks lets everybody in who reaches its port: it can list, change and remove keys,
and knows no keys of callers. So a name says nothing without its sum. `torch.distributed` and its
checkpoints exchange objects as pickles, which run any code when they are read; the sum comes first.
"""

from __future__ import annotations

import hmac
import io
import pickle
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch.distributed.distributed_c10d as collectives

# `torch.distributed` exports them without types.
from torch._C._distributed_c10d import PrefixStore, Store

_HASH: Final = "sha256"
_SUM_BYTES: Final = 32
_OBJECT: Final = "object"
"""Place of every signed pickle; keys of values are longer."""


class ForgedMessageError(RuntimeError):
    """Somebody without the run's secret wrote what a rank has read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSecret:
    """A secret that the ranks of one run share and nobody else has."""

    key: bytes = field(repr=False)

    def name(self, of: str) -> str:
        """Return a name that nobody can guess without the secret, and that does not give it."""
        return hmac.digest(self.key, f"name {of}".encode(), _HASH).hex()

    def sign(self, data: bytes, place: str) -> bytes:
        """Return data behind its sum; it holds at this place only."""
        return self._sum(data, place) + data

    def verify(self, signed: bytes, place: str) -> bytes:
        """Return the data that `sign` was given.

        Raises:
            ForgedMessageError: naming the place, if the sum is not that of the secret.
        """
        found, data = signed[:_SUM_BYTES], signed[_SUM_BYTES:]
        if not hmac.compare_digest(found, self._sum(data, place)):
            raise ForgedMessageError(
                f"{place}: {len(signed)} bytes that are not signed with the secret of the run;"
                " another process writes to the connections of the ranks, or"
                " VCPO_STEERING_KEY is another one on some rank"
            )
        return data

    def _sum(self, data: bytes, place: str) -> bytes:
        return hmac.digest(self.key, f"value {place}\0".encode() + data, _HASH)


class SignedStore:
    """Keys and values that only ranks of the run can write.

    A connection of a store serves one thread: one that waits for a key blocks its other users.
    """

    def __init__(self, store: Store, secret: RanksSecret, name: str) -> None:
        self._name = name
        self._secret = secret
        self._store = PrefixStore(secret.name(name), store)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        data = value.encode() if isinstance(value, str) else value
        # The stubs know text only; the store keeps bytes as they are.
        self._store.set(key, self._secret.sign(data, self._place(key)))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value.

        Raises:
            ForgedMessageError: if no rank of the run wrote it.
        """
        return self._secret.verify(self._store.get(key), self._place(key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait for keys, as a store does."""
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def _place(self, key: str) -> str:
        return f"{self._name}/{key}"


def sign_objects(secret: RanksSecret) -> None:
    """Let `torch.distributed` send and read signed objects only, in this process.

    All of its functions for objects, which DCP uses too, pickle by these two names of one module.

    Raises:
        RuntimeError: if this torch has no such names.
    """
    if not (hasattr(collectives, "_pickler") and hasattr(collectives, "_unpickler")):
        raise RuntimeError(
            "torch.distributed: this version pickles objects in another way, so they cannot be"
            " signed; install a version that pyproject.toml allows"
        )

    class SigningPickler:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def dump(self, each: Any) -> None:
            self._file.write(secret.sign(pickle.dumps(each), _OBJECT))

    class VerifyingUnpickler:
        def __init__(self, file: io.BytesIO) -> None:
            self._file = file

        def load(self) -> Any:
            return pickle.loads(secret.verify(self._file.read(), _OBJECT))  # noqa: S301 - of a rank

    collectives._pickler = SigningPickler  # type: ignore[assignment] # called in no other way
    collectives._unpickler = VerifyingUnpickler  # type: ignore[assignment] # as above
