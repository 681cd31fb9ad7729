"""Section of a run that copies its numbers to tracking services."""

import re
from enum import StrEnum
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from vcpo.api.cluster import ObjectName
from vcpo.api.fields import FINITE, IMPORT_PATH, Section, Text, conflict, refuse


class SinkName(StrEnum):
    """A tracking service whose sink is shipped."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


class WandbMode(StrEnum):
    """Whether Weights & Biases sends what it gets."""

    ONLINE = "online"
    OFFLINE = "offline"


SINKS_BY_FIELD: Final = {
    "directory": (SinkName.TENSORBOARD,),
    "project": (SinkName.WANDB,),
    "entity": (SinkName.WANDB,),
    "url": (SinkName.WANDB,),
    "mode": (SinkName.WANDB,),
}
"""Shipped sinks that use a field; no other one does."""


class Sink(Section):
    """One tracking service that gets the run's numbers."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """Tracking service: `tensorboard` (files that TensorBoard reads), `wandb` (Weights & Biases),
    or `package.module:Class` for your own, such as one for MLflow. The learner's environment or
    image must have the extra `tracking` of this package, or your class."""
    directory: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    """Folder for TensorBoard's files. If unset, `tensorboard` in the run directory. In a cluster
    give a path of a volume that your TensorBoard mounts too. Only for `tensorboard`."""
    project: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    """Project of Weights & Biases. If unset, `vcpo`. Only for `wandb`."""
    entity: Annotated[Text, Field(min_length=1, max_length=128)] | None = None
    """Team or user of Weights & Biases. If unset, the default of the API key. Only for `wandb`."""
    url: Annotated[str, Field(max_length=1024, pattern=r"^https?://.+$")] | None = None
    """Address of Weights & Biases. If unset, the variable `WANDB_BASE_URL`, or its public server.
    Only for `wandb`."""
    mode: WandbMode | None = None
    """Mode of Weights & Biases: `online` sends the numbers; `offline` writes them to `wandb` in the
    run directory, and `wandb sync` sends them later. If unset, `online`. Only for `wandb`."""
    samples: bool = False
    """If true, the service also gets texts: at each evaluation a table of held-out prompts, answers
    and rewards. Set it only if prompts and answers may leave the machine. Not for a class of your
    own, which finds them in the run directory."""
    parameters: Annotated[dict[str, Any], Field(max_length=64), FINITE] = Field(default={})
    """Settings of your own class. Only for `package.module:Class`."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if not self.is_shipped and re.fullmatch(IMPORT_PATH, self.name) is None:
            known = ", ".join(SinkName)
            message = f"is unknown; use one of {known}, or package.module:Class for your own"
            refuse([conflict("name", value=self.name, message=message)])
        return self

    @model_validator(mode="after")
    def _fields_suit_service(self) -> Self:
        unused = [
            field
            for field, users in SINKS_BY_FIELD.items()
            if getattr(self, field) is not None and self.name not in users
        ]
        if self.parameters and self.is_shipped:
            unused.append("parameters")
        if self.samples and not self.is_shipped:
            unused.append("samples")
        refuse(
            conflict(
                to_camel(field),
                value=str(getattr(self, field)),
                message=f"sink '{self.name}' does not use it; remove it",
            )
            for field in unused
        )
        return self

    @property
    def is_shipped(self) -> bool:
        return self.name in frozenset(SinkName)


class Tracking(Section):
    """Tracking services that get a copy of the run's numbers."""

    sinks: Annotated[
        tuple[Sink, ...], Field(max_length=8, json_schema_extra={"x-kubernetes-list-type": "map"})
    ] = ()
    """Services, each at most once. A service that is slow, absent or full never delays or fails a
    step: a process of its own sends it what it lacks of the run's records. `vcpo export RUN --to`
    copies them at any time."""
    secret_name: ObjectName | None = None
    """Secret whose keys become environment variables of the learner in a cluster, such as
    `WANDB_API_KEY`. If unset, none. A local run takes them from the
    environment of `vcpo run`."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [sink.name for sink in self.sinks]
        refuse(
            conflict("sinks", index, "name", value=str(name), message="is there twice; remove one")
            for index, name in enumerate(names)
            if name in names[:index]
        )
        return self
