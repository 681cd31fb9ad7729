"""Printer columns: what `kubectl get` shows of an object."""

from __future__ import annotations

from typing import Any


def column(
    name: str, kind: str, path: str, description: str, *, wide: bool = False
) -> dict[str, Any]:
    """One column. path: JSONPath into the object. wide: shown with `-o wide` only."""
    shown = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**shown, "priority": 1} if wide else shown
