"""Who calls: each worker's name is bound to the key that its process shows.

```
first call under a name        binds the name to the key of that call
call with the bound key        goes on
call with another key          refused while the worker is registered or holds a lease
call for another's lease       refused
call after it was set aside    refused with the cause; another key begins anew
```
The role's key says that a caller is a worker; this says which. A worker keeps its key for itself,
so no other worker can lease, submit, release or offer weights in its name.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from vcpo.wire.access.roles import IDENTITY
from vcpo.wire.checks import check_id
from vcpo.wire.errors import PermissionDeniedError, SetAsideError
from vcpo_learner.ledger.dispatcher import Dispatcher

_FIRST_SWEEP = 1024


class Callers:
    """The names of workers and the keys that they are bound to. Owner: the learner's event loop.

    Names that are free again are forgotten when their number has doubled.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._identities: dict[str, str] = {}
        self._sweep_at = _FIRST_SWEEP

    def admit(self, worker_id: str, context: Any, *, lease_ids: Iterable[str] = ()) -> None:
        """Check that a call comes from the worker that it names, and that the leases are its own.

        context: the call's context; its metadata holds the worker's key. A worker that shows none
            can be impersonated by whoever shows none.
        lease_ids: leases that the call is about. One that has ended belongs to nobody.

        Raises:
            InvalidMessageError: if the name is empty or too long.
            PermissionDeniedError: if the name or a lease belongs to another worker.
            SetAsideError: if the learner has taken the worker out of the run.
        """
        check_id("worker_id", worker_id)
        shown = str(dict(context.invocation_metadata() or ()).get(IDENTITY, ""))
        bound = self._identities.get(worker_id, shown)
        is_same = hmac.compare_digest(shown.encode(), bound.encode())
        if not is_same and self._dispatcher.is_known(worker_id):
            raise PermissionDeniedError(
                f"worker_id: {worker_id!r:.80} is the name of a worker with another key, until it"
                " has been silent for a minute and its leases have ended; use another name"
            )
        self._check_set_aside(worker_id, is_same=is_same)
        for lease_id in lease_ids:
            holder = self._dispatcher.holder_of(lease_id)
            if holder not in {None, worker_id}:
                raise PermissionDeniedError(f"lease_id: {lease_id!r:.80} is another worker's")
        self._bind(worker_id, shown)

    def _check_set_aside(self, worker_id: str, *, is_same: bool) -> None:
        """Refuse the process that was set aside; let another one work under its name."""
        workers = self._dispatcher.set_aside_workers
        if not is_same:
            workers.readmit(worker_id)
        elif (worker := workers.get(worker_id)) is not None:
            raise SetAsideError(worker.cause, worker.message)

    def _bind(self, worker_id: str, identity: str) -> None:
        if len(self._identities) >= self._sweep_at:
            kept = {name for name in self._identities if self._is_bound(name)}
            self._identities = {name: self._identities[name] for name in kept}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(kept))
        self._identities[worker_id] = identity

    def _is_bound(self, worker_id: str) -> bool:
        is_set_aside = worker_id in self._dispatcher.set_aside_workers
        return is_set_aside or self._dispatcher.is_known(worker_id)
