"""The base class of all sections, and bounded types that many fields share."""

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails, PydanticCustomError


def is_import_path(name: str) -> bool:
    """Return whether a name may be that of a user's own class or function."""
    return re.fullmatch(IMPORT_PATH, name) is not None


class Section(BaseModel):
    """Part of a run: frozen, closed to unknown fields, camelCase outside and snake_case inside."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        strict=False,
        ser_json_inf_nan="null",
    )


def conflict(*location: str | int, value: object, message: str) -> InitErrorDetails:
    """Return the error of a rule between fields.

    location: the field to change, by its names in the file, from the section whose validator
        reports it: `("rollouts", 0, "maxReplicas")`.
    """
    kind = PydanticCustomError("conflict", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=value)


def refuse(conflicts: Iterable[InitErrorDetails]) -> None:
    """Raise one error for all broken rules of a section."""
    details = list(conflicts)
    if details:
        raise ValidationError.from_exception_data("conflict", details)


def _without_nul(text: str) -> str:
    if "\0" in text:
        message = "contains a NUL character, which paths and names may not; delete it"
        raise PydanticCustomError("nul", "{message}", {"message": message})
    return text


def _without_broken_characters(text: str) -> str:
    if "\N{REPLACEMENT CHARACTER}" in text:
        message = "has U+FFFD, which stands for a part of a character, not for text; remove it"
        raise PydanticCustomError("broken", "{message}", {"message": message})
    return text


def _without_infinity(document: dict[str, Any]) -> dict[str, Any]:
    if not _is_finite(document):
        message = "has a number that is infinite or NaN, which JSON cannot hold; write it as text"
        raise PydanticCustomError("finite", "{message}", {"message": message})
    return document


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict | list):
        below = value.values() if isinstance(value, dict) else value
        return all(_is_finite(each) for each in below)
    return not isinstance(value, float) or math.isfinite(value)


FINITE = AfterValidator(_without_infinity)
"""Checks a dictionary of any values: no number in it may be infinite or NaN."""

IMPORT_PATH: Final = r"[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of `package.module:Name`, by which a run names a class or function of the user."""

Text = Annotated[str, AfterValidator(_without_nul)]
"""A string that may be used as a path or as an argument of a process."""

StopString = Annotated[
    str, Field(min_length=1, max_length=256), AfterValidator(_without_broken_characters)
]
"""A string that ends a response; its size in characters."""

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A name that Kubernetes accepts in labels and host names."""

DnsSubdomain = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", max_length=253
    ),
]
"""A name of most Kubernetes objects: lower-case letters, digits and '-', in parts between dots."""

Steps = Annotated[int, Field(ge=1, le=10_000_000)]
"""A positive number of optimizer steps."""

Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A duration in seconds, at most one year."""

Ratio = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share in (0, 1]."""
