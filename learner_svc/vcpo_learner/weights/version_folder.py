"""The folder into which a rank writes the files of its versions: in memory, on a volume, or a URL.

```
/dev/shm/vcpo-weights-<user>-<run>/<incarnation>/<shard>/     by default; of this user alone
<spec.weights.storeUrl>/<run>/<incarnation>/<shard>/          otherwise
```

Files in memory outlive a process that is killed. Their server removes them when its parent is gone,
and the run's next learner on the machine those that no server could.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Final, Self

import fsspec
from fsspec.implementations.local import LocalFileSystem

from vcpo.api.workloads import Weights

_LOGGER = logging.getLogger(__name__)
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - what is below belongs to this user alone


class VersionFolder:
    """The files of one rank in one incarnation. It is not thread-safe: make one call at a time.

    root: folder of the run, in fsspec's notation, that nothing else writes to.
    is_temporary: whether the files are in this machine's memory, for this run alone.

    Raises:
        OSError, ValueError, ImportError: from fsspec, if it cannot use the URL.
    """

    def __init__(self, root: str, incarnation: str, shard: int, *, is_temporary: bool) -> None:
        self.url = f"{root.rstrip('/')}/{incarnation}/{shard}"
        """The folder of the files."""
        self.is_temporary = is_temporary
        self._files, self._path = fsspec.core.url_to_fs(self.url)
        is_local = isinstance(self._files, LocalFileSystem)
        self.served_root = Path(self._path).parents[1] if is_local else None
        """Folder that the server sends to workers that do not see it; None if it is in a storage
        that all reach."""
        self.kept_full_sets = 1 if is_local else 2
        """Full sets to keep: where an open file can be read to its end, only the newest."""
        self._written: set[str] = set()
        self._files.makedirs(self._path, exist_ok=True)

    @classmethod
    def open(
        cls, settings: Weights, run: str, run_dir: Path, *, incarnation: str, shard: int
    ) -> Self:
        """Return the folder of a rank as the spec says.

        Raises:
            ValueError: naming the field, if it cannot be used.
        """
        url = settings.store_url
        try:
            if url is None:
                root = _folder_in_memory(run_dir)
                _remove_others(root, incarnation)
                return cls(str(root), incarnation, shard, is_temporary=True)
            return cls(f"{url.rstrip('/')}/{run}", incarnation, shard, is_temporary=False)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"spec.weights.storeUrl: cannot write to '{url or _memory()}' ({error}); give a"
                " folder that the learner mounts, or a URL whose fsspec package is installed"
            ) from error

    def write(self, name: str, content: bytes | bytearray) -> None:
        """Write a file that nobody knows of yet.

        Raises:
            OSError: naming the field, if the store refuses it.
        """
        self._written.add(name)
        path = f"{self._path}/{name}"
        try:
            with self._files.open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise OSError(
                f"spec.weights.storeUrl: cannot write {len(content):,} bytes to {self.url}/{name}"
                f" ({error}); make room there, or name another store"
            ) from error

    def keep(self, names: Collection[str]) -> None:
        """Remove all files but these.

        Raises:
            OSError: if the store refuses it.
        """
        for name in sorted(self._written.difference(names)):
            self._files.rm_file(f"{self._path}/{name}")
            self._written.discard(name)

    def empty(self) -> None:
        """Remove all files, at the learner's end; in memory the server may have been killed."""
        try:
            if self.is_temporary:
                shutil.rmtree(self._path, ignore_errors=True)
                return
            self.keep(())
        except OSError as error:
            _LOGGER.warning("files of versions stay in %s: %s", self.url, error)


def _memory() -> Path:
    return _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _folder_in_memory(run_dir: Path) -> Path:
    """Return a folder for the run directory, which exists and is this user's alone.

    Raises:
        ValueError: if somebody else has made it.
    """
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:16]
    folder = _memory() / f"vcpo-weights-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ValueError(f"{folder} is another user's")
    folder.chmod(0o700)
    return folder


def _remove_others(root: Path, incarnation: str) -> None:
    """Remove what incarnations left that were killed with their servers; none of them runs now."""
    for folder in root.iterdir():
        if folder.name != incarnation:
            shutil.rmtree(folder, ignore_errors=True)
