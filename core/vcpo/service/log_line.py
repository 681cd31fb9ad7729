"""One line of a log in JSON."""

from __future__ import annotations

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
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def add_fields(
        self,
        log_data: dict[str, Any],
        record: logging.LogRecord,
        message_dict: dict[str, Any],
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
