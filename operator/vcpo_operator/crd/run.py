"""The definition of VCPORun: schema, rules, printer columns, status subresource.

It has no `scale` subresource. A resource can have only one, whose path cannot point into a list,
and a run has a list of rollout groups. A user's autoscaler scales a group's VCPORolloutScaler
instead (`scaling: External`; docs/design/012-scaling-ownership.md).
"""

from __future__ import annotations

from typing import Any

from vcpo.spec import KIND, json_schema
from vcpo_operator.crd import rules
from vcpo_operator.crd.frame import column, custom_resource_definition, object_schema
from vcpo_operator.crd.status_schema import status_schema
from vcpo_operator.crd.structural import Schema, structural
from vcpo_operator.names import PLURAL

_MAX_PARAMETERS = 64


def run_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    ready = '.status.conditions[?(@.type=="Ready")]'
    return custom_resource_definition(
        KIND,
        PLURAL,
        "vrun",
        subresources={"status": {}},
        columns=[
            column("Ready", "string", f"{ready}.status", "Whether the run trains or is complete."),
            column("Reason", "string", f"{ready}.reason", "Reason of Ready, one word."),
            column("Step", "integer", ".status.step", "Optimizer steps taken."),
            column("ESS", "number", ".status.essRatio", "Effective sample size over batch size."),
            column(
                "LR scale", "number", ".status.learningRateScale", "Factor on the learning rate."
            ),
            column("Warning", "string", ".status.warning.level", "Early warning of a collapse."),
            column("Lag", "integer", ".status.lag.p50", "Median token lag, in policy versions."),
            column("Rollouts", "string", ".status.workers", "Rollout workers, ready/desired."),
            column("Age", "date", ".metadata.creationTimestamp", "Time since creation."),
            column("Reward", "number", ".status.rewardMean", "Mean recent reward.", wide=True),
            column(
                "Tokens/s",
                "number",
                ".status.tokensPerSecond",
                "Response tokens that the learner accepts per second.",
                wide=True,
            ),
            column("Max lag", "integer", ".status.lag.max", "Largest token lag.", wide=True),
            column(
                "Learner",
                "string",
                ".status.learner.pods",
                "Pods of the learner, ready/desired.",
                wide=True,
            ),
            column(
                "Restarts",
                "integer",
                ".status.learner.restarts",
                "Learner restarts.",
                wide=True,
            ),
            column(
                "Message", "string", f"{ready}.message", "Message of Ready, a sentence.", wide=True
            ),
        ],
        schema=_schema(),
    )


def _schema() -> Schema:
    document = structural(json_schema())
    spec = document["properties"]["spec"]
    fields = spec["properties"]
    spec["x-kubernetes-validations"] = [*rules.SPEC]
    fields["algorithm"]["x-kubernetes-validations"] = [*rules.ALGORITHM]
    fields["batch"]["x-kubernetes-validations"] = [*rules.BATCH]
    fields["control"]["x-kubernetes-validations"] = [*rules.CONTROL]
    fields["environment"]["x-kubernetes-validations"] = [*rules.ENVIRONMENT]
    fields["learner"]["x-kubernetes-validations"] = [*rules.LEARNER]
    fields["model"]["x-kubernetes-validations"] = [*rules.MODEL]
    fields["rollouts"]["items"]["x-kubernetes-validations"] = [*rules.ROLLOUT_GROUP]
    sinks = fields["tracking"]["properties"]["sinks"]
    sinks["items"]["x-kubernetes-validations"] = [*rules.TRACKING_SINK]
    destinations = fields["pods"]["properties"]["extraEgress"]
    destinations["items"]["x-kubernetes-validations"] = [*rules.EGRESS]
    fields["environment"]["properties"]["parameters"]["maxProperties"] = _MAX_PARAMETERS
    schema = object_schema("One training run.", spec, status_schema())
    return {**schema, "x-kubernetes-validations": [*rules.ROOT]}
