"""One line of a log in JSON: how a record becomes a line, and what a line says as text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

_HEAD: Final = {"asctime": "time", "levelname": "level", "name": "logger", "message": "message"}
"""First fields of a line, by the name of the record's attribute."""
_EXCEPTION: Final = "exc_info"
"""Field with a traceback. It is the last one, because the kubelet cuts the front of a termination
message, and a traceback ends with its cause."""
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
        """Return the time of a record as RFC 3339, in UTC."""
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def add_fields(
        self,
        log_data: dict[str, Any],
        record: logging.LogRecord,
        message_dict: dict[str, Any],
    ) -> None:
        """Fill the line: head, `extra`, process, and a traceback at the end."""
        super().add_fields(log_data, record, {})
        about = getattr(record, _KUBERNETES_OBJECT, None)
        if about is not None:
            log_data["namespace"] = about.get("namespace") or ""
            log_data["run"] = about.get("name") or ""
        for name, value in self._fields().items():
            log_data.setdefault(name, value)
        log_data.update(message_dict)


def plain_text(log: str) -> str:
    """Return a log with its JSON lines as text: message, then traceback; other lines stay.

    The log may begin within a JSON line: of that line the traceback is returned.
    """
    first, newline, rest = log.partition("\n")
    texts = (_text_of_line(line) or line for line in rest.split("\n"))
    return (_text_of_line(first) or _end_of_traceback(first) or first) + newline + "\n".join(texts)


def shown_lines(text: str) -> list[str]:
    """Return the lines as a terminal finally shows them.

    A progress bar returns to the start of its line and overwrites itself.
    """
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]


def _text_of_line(line: str) -> str | None:
    """Return message and traceback of a JSON line; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return None
    return "\n".join(str(entry[name]) for name in ("message", _EXCEPTION) if entry.get(name))


def _end_of_traceback(line: str) -> str | None:
    """Return the traceback at the end of a JSON line whose beginning is missing."""
    _, name, traceback = line.rpartition(f'"{_EXCEPTION}": "')
    if not name:  # the line begins within the traceback, perhaps within an escape sequence
        traceback = line.partition("\\n")[2]
    try:
        return str(json.loads(f'"{traceback.removesuffix("}")}')) or None
    except json.JSONDecodeError:
        return None
