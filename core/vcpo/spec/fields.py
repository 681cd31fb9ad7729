"""Building blocks of the run's model: the base class and bounded types that many fields share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails, PydanticCustomError


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
    """Describe a broken rule between fields; `location` is the one to blame, as the file names it.

    It starts at the section whose validator reports it: `("rollouts", 0, "maxReplicas")`.
    """
    kind = PydanticCustomError("conflict", "{message}", {"message": message})
    return InitErrorDetails(type=kind, loc=location, input=value)


def refuse(conflicts: Iterable[InitErrorDetails]) -> None:
    """Report all broken rules of one section together.

    Raises:
        ValidationError: when there is one at all.
    """
    details = list(conflicts)
    if details:
        raise ValidationError.from_exception_data("conflict", details)


def _without_nul(text: str) -> str:
    if "\0" in text:
        message = "holds a NUL character, which no path or name may; delete it"
        raise PydanticCustomError("nul", "{message}", {"message": message})
    return text


Text = Annotated[str, AfterValidator(_without_nul)]
"""A string that may become a path or a process's argument."""

DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A name that Kubernetes accepts in labels and host names."""

DnsSubdomain = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
        max_length=253,
    ),
]
"""A name that most objects may have: lower-case letters, digits and '-', in parts between dots."""

Steps = Annotated[int, Field(ge=1, le=10_000_000)]
"""A positive number of optimizer steps."""

Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A duration in seconds, at most one year."""

Ratio = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share in (0, 1]."""
