"""The log of a service's process: lines of text for people, or of JSON for a cluster's log store.

`configure` is called once, at the start. In JSON, everything that the process says becomes one line
each: records, warnings, uncaught exceptions, and what code prints. A line holds the fields of its
process (`identify_process`), of its context (`log_fields`) and of its call (`extra`).

The hosts set `VCPO_LOG_FORMAT`. Processes that a service starts inherit the form and the fields, so
vLLM's own processes write the same lines: `vcpo_rollout/engines/vllm/logging.json`.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TextIO

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

FORM_VARIABLE: Final = "VCPO_LOG_FORMAT"
"""Environment variable with the form of log lines, a `LogForm`; text if it is unset."""
NAMESPACE_VARIABLE: Final = "POD_NAMESPACE"
POD_VARIABLE: Final = "POD_NAME"
_FIELDS_VARIABLE: Final = "VCPO_LOG_FIELDS"
"""Environment variable with the process's fields, for the processes that it starts."""
END_VARIABLE: Final = "VCPO_TERMINATION_LOG"
"""Environment variable with the file that gets the cause of this process's end; the hosts set it,
and children of the process must not have it. Unset or empty: nothing is kept."""

_TEXT = "%(asctime)s %(levelname)s %(message)s"
_LOGGER = logging.getLogger(__name__)


class LogForm(StrEnum):
    """Form of log lines."""

    TEXT = "text"
    JSON = "json"


_context_fields: ContextVar[Mapping[str, object]] = ContextVar(
    "log_fields", default=MappingProxyType({})
)


def configure(part: str, *, form: LogForm | None = None, level: int = logging.INFO) -> None:
    """Configure the logging of this process; call it before the first line.

    part: `learner`, `rollout` or `operator`.
    form: None takes `VCPO_LOG_FORMAT`.
    """
    os.environ[FORM_VARIABLE] = _form_of_environment() if form is None else form
    os.environ.pop(_FIELDS_VARIABLE, None)
    identify_process(
        part=part,
        run="",
        namespace=os.environ.get(NAMESPACE_VARIABLE, ""),
        pod=os.environ.get(POD_VARIABLE, ""),
    )
    root = logging.getLogger()
    root.handlers[:] = [line_handler()]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    sys.excepthook = _end_uncaught
    if _form_of_environment() is LogForm.JSON:
        sys.stdout = _PrintedLines(sys.stdout, logging.getLogger("stdout"), logging.INFO)
        sys.stderr = _PrintedLines(sys.stderr, logging.getLogger("stderr"), logging.WARNING)
        sys.unraisablehook = _log_ignored
        threading.excepthook = _log_end_of_thread


def identify_process(**fields: str) -> None:
    """Add fields to every later line of this process, and of those that it starts."""
    os.environ[_FIELDS_VARIABLE] = json.dumps({**_process_fields(), **fields})


@contextlib.contextmanager
def log_fields(**fields: object) -> Iterator[None]:
    """Add fields to every line of the enclosed code, and of the tasks that it starts."""
    token = _context_fields.set({**_context_fields.get(), **fields})
    try:
        yield
    finally:
        _context_fields.reset(token)


def line_handler() -> logging.Handler:
    """Return the handler that writes every line to the process's own standard error."""
    is_json = _form_of_environment() is LogForm.JSON
    handler = _LineHandler(sys.__stderr__)
    handler.setFormatter(JsonLine(_fields) if is_json else logging.Formatter(_TEXT))
    return handler


def report_end(cause: str) -> None:
    """Log why this process ends, and keep it for whoever started it."""
    record_end(cause)
    _LOGGER.critical("%s", cause)


def record_end(cause: str) -> None:
    """Write why this process ends to the file of `END_VARIABLE`, unless another was first."""
    path = os.environ.get(END_VARIABLE)
    if not path:
        return
    with contextlib.suppress(OSError), Path(path).open("a+", encoding="utf-8") as file:
        file.seek(0)
        if not file.read(1):
            file.write(cause)


class _LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines. A record that cannot be formatted becomes a line that says so."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        path, number = record.pathname, record.lineno
        text = f"a line of {path}:{number} cannot be formatted: {record.msg!r}"
        unformatted = logging.LogRecord(
            record.name, logging.ERROR, path, number, text, None, sys.exc_info()
        )
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(self.format(unformatted) + self.terminator)
            self.flush()


class _PrintedLines(io.TextIOBase):
    """A stream of this process whose text becomes log lines, one for each finished piece."""

    def __init__(self, original: TextIO, logger: logging.Logger, level: int) -> None:
        self._original = original
        self._logger = logger
        self._level = level
        self._unfinished = ""
        atexit.register(self._log)

    def write(self, text: str) -> int:
        self._unfinished += text
        if self._unfinished.endswith("\n"):
            self._log()
        return len(text)

    def fileno(self) -> int:
        return self._original.fileno()

    def _log(self) -> None:
        piece, self._unfinished = self._unfinished.strip("\n"), ""
        if shown := "\n".join(shown_lines(piece)):
            self._logger.log(self._level, "%s", shown)


def _end_uncaught(
    kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    text = "".join(traceback.format_exception_only(cause)).strip()
    record_end(text)
    if _form_of_environment() is LogForm.JSON:
        _LOGGER.critical("%s", text, exc_info=(kind, error, frames))
    else:
        sys.__excepthook__(kind, error, frames)


def _log_ignored(ignored: sys.UnraisableHookArgs) -> None:
    text = f"{ignored.err_msg or 'Exception ignored in'}: {ignored.object!r}"
    error = ignored.exc_value or ignored.exc_type()
    _LOGGER.warning("%s", text, exc_info=(ignored.exc_type, error, ignored.exc_traceback))


def _log_end_of_thread(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread else "unknown"
    error = ended.exc_value or ended.exc_type()
    exc_info = (ended.exc_type, error, ended.exc_traceback)
    _LOGGER.error("exception in thread %s", name, exc_info=exc_info)


def _fields() -> Mapping[str, object]:
    return {**_process_fields(), **_context_fields.get()}


def _process_fields() -> dict[str, str]:
    fields: dict[str, str] = json.loads(os.environ.get(_FIELDS_VARIABLE, "{}"))
    return fields


def _form_of_environment() -> LogForm:
    given = os.environ.get(FORM_VARIABLE, LogForm.TEXT)
    try:
        return LogForm(given)
    except ValueError:
        known = " or ".join(LogForm)
        raise ValueError(f"{FORM_VARIABLE}: must be {known}, got {given!r}") from None


_HEAD: Final = {"asctime": "time", "levelname": "level", "name": "logger", "message": "message"}
"""First fields of a line, by the name of the record's attribute."""
_KUBERNETES_OBJECT: Final = "k8s_ref"
"""Attribute with which kopf says what a record is about."""
_NO_FIELDS: Final = (_KUBERNETES_OBJECT, "k8s_skip", "settings", "taskName", "vllm_process_name")
"""Attributes that kopf, Python and vLLM add to records for themselves."""


class JsonLine(JsonFormatter):
    """Formats a record as one line of JSON.

    fields: returns what every line of the process holds at present; `extra` of a call and the
        Kubernetes object that a record is about have priority.
    """

    def __init__(self, fields: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(
            list(_HEAD), rename_fields=_HEAD, reserved_attrs=[*RESERVED_ATTRS, *_NO_FIELDS]
        )
        self._fields = fields

    def formatTime(  # noqa: N802 - the library's name
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        super().add_fields(log_data, record, {})
        about = getattr(record, _KUBERNETES_OBJECT, None)
        if about is not None:
            log_data["namespace"] = about.get("namespace") or ""
            log_data["run"] = about.get("name") or ""
        for name, value in self._fields().items():
            log_data.setdefault(name, value)
        log_data.update(message_dict)


def shown_lines(text: str) -> list[str]:
    """Return the lines as a terminal finally shows them.

    A progress bar returns to the start of its line and overwrites itself.
    """
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
