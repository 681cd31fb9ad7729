"""Building blocks of the run's model: the base class and bounded types that many fields share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


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


def conflict(field: str, value: object, message: str) -> PydanticCustomError:
    """Build the error of a rule between fields, blamed on `field` (its name in the file)."""
    return PydanticCustomError("conflict", "{message}", _context(field, value, message))


def _context(field: str, value: object, message: str) -> dict[str, Any]:
    return {"field": field, "value": value, "message": message}


DnsLabel = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
"""A name that Kubernetes accepts in labels and host names."""

Steps = Annotated[int, Field(ge=1, le=10_000_000)]
"""A positive number of optimizer steps."""

Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""A duration in seconds, at most one year."""

Ratio = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share in (0, 1]."""
