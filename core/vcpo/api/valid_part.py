"""The valid part of a run file that has problems, so that the rest of it can be checked as well."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from vcpo.api.run import VCPORun

_STAND_INS: Final[Mapping[tuple[str, ...], object]] = MappingProxyType(
    {
        ("metadata",): {"name": "run"},
        ("metadata", "name"): "run",
        ("spec", "model"): {"name": "stand-in"},
        ("spec", "model", "name"): "stand-in",
        ("spec", "environment"): {"name": "countdown"},
        ("spec", "environment", "name"): "countdown",
        ("spec", "steps"): 1_000,
    }
)
"""Values that stand for a required field that is missing or invalid, by the field's path."""
_DEEPEST: Final = 3
"""Parts of the path of what is left out: a field of a section."""
_MOST_ROUNDS: Final = 16
"""Rules between fields are checked after the fields, so one round of removals is not enough."""


def valid_part(document: Mapping[Any, Any]) -> VCPORun | None:
    """Return a run without the fields that are invalid, each with its default or a stand-in.

    document: a run file as it was parsed.
    Returns: None if there is no such run.
    """
    kept = copy.deepcopy(dict(document))
    for _ in range(_MOST_ROUNDS):
        try:
            return VCPORun.model_validate_json(json.dumps(kept), strict=True)
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                _leave_out(kept, problem["loc"])
        except (TypeError, ValueError):  # a value that JSON does not have
            return None
    return None


def _leave_out(document: dict[Any, Any], location: Sequence[int | str]) -> None:
    """Remove the field of a problem, or the section's field that holds it, from a document."""
    path: list[str] = []
    for part in location[:_DEEPEST]:
        if isinstance(part, int):
            break
        path.append(part)
    section: Any = document
    for part in path[:-1]:
        if not isinstance(section.get(part), dict):
            section[part] = {}
        section = section[part]
    section.pop(path[-1], None)
    if (stand_in := _STAND_INS.get(tuple(path))) is not None:
        section[path[-1]] = copy.deepcopy(stand_in)
