"""The last error that vLLM's processes logged, in memory that the rollout worker reads.

A process that dies of an exception tells its parent only that it has died. It logs the exception
before: a handler of its log writes the exception's last line where the parent finds it.
"""

import logging
import os
import weakref
from collections.abc import Mapping
from typing import Final

_VARIABLE: Final = "VCPO_VLLM_LAST_ERROR"
"""Environment variable with the path that vLLM's processes write to."""
_MAX_BYTES: Final = 1 << 12


class LastError:
    """Room for one line; the kernel takes it back with this object or this process."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("vcpo-last-error")
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def environment(self) -> Mapping[str, str]:
        return {_VARIABLE: f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def read(self) -> str:
        return os.pread(self._descriptor, _MAX_BYTES, 0).decode(errors="replace")


def record_errors(logger: logging.Logger) -> None:
    """Write what a logger reports of exceptions from now on to the parent's `LastError`, if any."""
    path = os.environ.get(_VARIABLE)
    if path is not None:
        logger.addHandler(_Recorder(path))


class _Recorder(logging.Handler):
    """Replaces the recorded line by that of each exception.

    It opens the place at once: later the parent may have given its descriptor to another file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = os.open(path, os.O_WRONLY)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the exception of a record; a record without one says nothing of a cause."""
        error = None if record.exc_info is None else record.exc_info[1]
        if error is not None:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, line.encode()[:_MAX_BYTES], 0)
