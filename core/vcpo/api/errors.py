"""Errors of a run file: all problems at once, each with field path, value and fix.

```
SpecError(ValueError)      the user must change the file; holds one FieldProblem per field
```
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

from pydantic import ValidationError

FILE: Final = "(file)"
"""Path of a problem of the whole file."""
_MAX_SHOWN_VALUE = 80
FIXES = {
    "extra_forbidden": "unknown field; remove it or correct its spelling",
    "missing": "required field is missing",
    "string_type": "must be text",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "must be a section"),
}
"""What is wrong and how to fix it, by the type of pydantic's error."""
_PATTERN_FIXES = {
    "^[a-z0-9](": "must be lower-case letters, digits and '-', with a letter or digit at both ends",
    "^(/|[a-z][": "must be an absolute path, or a URL such as s3://bucket/folder",
    "^https?://": "must be a URL, such as https://tracker.example.com",
}
"""What a text must be, by the first characters of its field's pattern."""
_TRUNCATED = (
    "is not supported: it draws tokens from a part of the vocabulary that depends on the weights,"
    " so a token may have no probability at all under the learner's; remove it, or lower"
    " `temperature`"
)
_FIXES_OF_FIELDS = {
    f"spec.sampling.{name}": _TRUNCATED for name in ("topP", "topK", "minP", "top_p", "top_k")
}
"""Fixes for fields that other systems have, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """What is wrong with one field."""

    path: str
    """Path as in the YAML file, e.g. `spec.rollouts[0].maxReplicas`."""
    value: str
    """The value in the file, shortened; empty if the field is missing."""
    message: str
    """The fault, and the fix."""

    def __str__(self) -> str:
        shown = f" (got {self.value})" if self.value else ""
        return f"{self.path}: {self.message}{shown}"


class SpecError(ValueError):
    """A run file that is invalid; `problems` has all that is wrong with it."""

    def __init__(self, source: str, problems: Sequence[FieldProblem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem{'s' if len(self.problems) != 1 else ''}"
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"{source}: {count}\n{lines}")


def field_path(location: Sequence[int | str]) -> str:
    """Return a location as YAML users read it: `("spec", "rollouts", 0)` -> `spec.rollouts[0]`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path or FILE


def problems_of(error: ValidationError) -> list[FieldProblem]:
    """Convert pydantic's report to field problems, in the model's order."""
    report: list[dict[str, Any]] = [dict(each) for each in error.errors(include_url=False)]
    # pydantic calls a list too short also because it left out items with problems of their own.
    return [
        _problem(details)
        for details in report
        if details["type"] != "too_short" or len(details["input"]) < details["ctx"]["min_length"]
    ]


def _problem(details: dict[str, Any]) -> FieldProblem:
    value = "" if details["type"] == "missing" else repr(details["input"])
    if len(value) > _MAX_SHOWN_VALUE:
        value = value[: _MAX_SHOWN_VALUE - 3] + "..."
    path = field_path(details["loc"])
    message = _FIXES_OF_FIELDS.get(path) or FIXES.get(details["type"], details["msg"])
    if details["type"] == "string_pattern_mismatch":
        message = _PATTERN_FIXES.get(details["ctx"]["pattern"][:10], message)
    if details["type"] == "too_short":
        message = f"must have at least {details['ctx']['min_length']} item(s)"
    if details["type"] in {"enum", "literal_error"}:
        choices = re.findall("'([^']*)'", details["ctx"]["expected"])
        message = f"must be one of {', '.join(choices)}"
        if close := get_close_matches(str(details["input"]), choices, n=2):
            message = f"did you mean {' or '.join(close)}? It {message}"
    return FieldProblem(path=path, value=value, message=message)
