"""Rules between fields, in CEL for the API server: those of `vcpo.api`, and immutable fields.

Messages follow the API conventions: fields in backquotes, values in single quotes, "must" and "may
not". The rules use only the core of CEL, so that tests can evaluate them without a cluster. Rules
of optional fields stand at the parent, because the API server does not evaluate a field's own rule
when the field is added or removed. The API server also checks a section's default, `{}`, before it
fills in the defaults inside. So the rules of sections pass where a field is absent.

Where a text is at fault, the rule's `messageExpression` adds it to the message. A number cannot be
added: the API server takes the cost of `string(...)` for infinite and refuses the whole definition
(https://github.com/kubernetes/kubernetes/issues/124234). The same holds for an item of a filtered
list, so there is a rule for each place of a group. The operator's own checks, which run after
these, say all values.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Final, NotRequired, TypedDict

from vcpo.algo.advantage import BATCH_BASELINES
from vcpo.algo.baseline import Baseline
from vcpo.algo.methods import LOSS_CONFIGS
from vcpo.api.algorithm import Algorithm
from vcpo.api.environments import BUILT_IN, BUILT_IN_REWARDS
from vcpo.api.fields import IMPORT_PATH
from vcpo.api.run import BASELINES_OF_PAIRS, MAX_GROUPS
from vcpo.api.tracking import SINKS_BY_FIELD, SinkName
from vcpo.api.workloads import EngineName


class Rule(TypedDict):
    """One entry of `x-kubernetes-validations`."""

    rule: str
    message: str
    messageExpression: NotRequired[str]
    fieldPath: NotRequired[str]
    """The field at fault, below the one that has the rule."""


def _rule(*, rule: str, message: str, got: str = "", at: str = "") -> Rule:
    """Return a rule.

    got: Clause with the values, in CEL, of type string; empty: the message has none.
    at: Path of the field at fault below the one that has the rule; empty: that one.
    """
    made = Rule(rule=rule, message=message)
    if got:
        made["messageExpression"] = f"{json.dumps(message + '; ')} + {got}"
    if at:
        made["fieldPath"] = f".{at}"
    return made


def _text(field: str) -> str:
    return f'"`{field}` is \'" + self.{field} + "\'"'


def _words(values: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


def _where_given(*fields: str, rule: str) -> str:
    absent = " || ".join(f"!has(self.{field})" for field in fields)
    return f"{absent} || {rule}"


def _shipped_or_own(field: str, names: type[StrEnum]) -> Rule:
    """Return the rule of a field that names something shipped, or a user's class."""
    return _rule(
        rule=f"!has(self.{field}) || self.{field} in {_words(names)}"
        f" || self.{field}.matches('^{IMPORT_PATH}$')",
        message=f"`{field}` must be one of "
        + ", ".join(f"'{name}'" for name in names)
        + ", or package.module:Class for your own",
        got=_text(field),
        at=field,
    )


def _name_rule(shipped: Mapping[str, object], own: str) -> Rule:
    return _rule(
        rule=f"self.name.contains(':') || self.name in {_words(sorted(shipped))}",
        message="`name` must be one of "
        + ", ".join(f"'{name}'" for name in sorted(shipped))
        + f", or package.module:{own} of your own",
        got=_text("name"),
        at="name",
    )


_IMMUTABLE: Final = "is immutable, since a checkpoint fits no other; create another run"


def _immutable_field_rule(field: str, *, is_text: bool = False) -> Rule:
    return _rule(
        rule=f"self.{field} == oldSelf.{field}",
        message=f"`{field}` {_IMMUTABLE}",
        got=f'"it is \'" + oldSelf.{field} + "\'"' if is_text else "",
        at=field,
    )


def _immutable_optional_field_rule(field: str, *, is_text: bool = True) -> Rule:
    rule = (
        f"has(self.{field}) == has(oldSelf.{field}) &&"
        f" (!has(self.{field}) || self.{field} == oldSelf.{field})"
    )
    message = f"`{field}` is immutable, and may not be added or removed; create another run"
    made = _rule(rule=rule, message=message, at=field)
    if is_text:  # no sum with a conditional: its length counts as infinite for some servers
        was, unset = json.dumps(message + "; it is '"), json.dumps(message + "; it is not set")
        value = f'{was} + oldSelf.{field} + "\'"'
        made["messageExpression"] = f"has(oldSelf.{field}) ? {value} : {unset}"
    return made


def _baseline_among(baselines: Collection[Baseline], section: str) -> str:
    methods = [method for method, config in LOSS_CONFIGS.items() if config.baseline in baselines]
    given = f"{section}.baseline in {_words(baselines)}"
    own = f"{section}.method in {_words(methods)}"
    return f"(has({section}.baseline) ? {given} : {own})"


def _group_rules(field: str, relation: str, sign: str, other: str) -> Iterator[Rule]:
    """Yield a rule for each place in the list of groups, so that its message names the group."""
    for place in range(MAX_GROUPS):
        group = f"self.rollouts[{place}]"
        yield _rule(
            rule=f"size(self.rollouts) <= {place} || !has({group}.{field})"
            f" || {group}.{field} {sign} self.{other}",
            message=f"`rollouts[{place}].{field}` must be {relation} `{other}`",
            at="rollouts",
        )


_OF_BATCH: Final = [one for one, each in LOSS_CONFIGS.items() if each.baseline_scope == "batch"]
_COMPARES_BATCH: Final = (
    "(self.batch.promptsPerStep >= 2 && (has(self.algorithm.baselineScope)"
    " ? self.algorithm.baselineScope == 'batch'"
    f" : self.algorithm.method in {_words(_OF_BATCH)}"
    f" && {_baseline_among(BATCH_BASELINES, 'self.algorithm')}))"
)
_ONE_PASS_METHODS: Final = [
    method for method in LOSS_CONFIGS if Algorithm(method=method).fits_one_pass
]
_IS_SHIPPED: Final = (
    "!has(self.algorithm.loss)"
    " && (!has(self.algorithm.baseline) || !self.algorithm.baseline.contains(':'))"
)
SPEC: Final = (
    _rule(
        rule=f"self.batch.trajectoriesPerPrompt >= 2 || {_COMPARES_BATCH}"
        f" || !{_baseline_among(BASELINES_OF_PAIRS, 'self.algorithm')}",
        message="`batch.trajectoriesPerPrompt` must be at least 2 unless the baseline is 'none' or"
        " that of a batch with several prompts",
        at="batch.trajectoriesPerPrompt",
    ),
    *_group_rules("maxConcurrentSequences", "at least", ">=", "batch.trajectoriesPerPrompt"),
    *_group_rules("maxModelLen", "more than", ">", "sampling.maxNewTokens"),
    _rule(
        rule="!has(self.algorithm.onPolicyProbability) || has(self.batch.promptPool)",
        message="`batch.promptPool` must be given where `algorithm.onPolicyProbability` is",
        at="batch.promptPool",
    ),
    _rule(
        rule="self.optimizer.schedule == 'constant' || self.optimizer.warmupSteps < self.steps",
        message="`optimizer.warmupSteps` must be less than `steps` unless the schedule is"
        " 'constant'",
        at="optimizer.warmupSteps",
    ),
    _rule(
        rule="self.optimizer.name == 'adamw' || (self.learner.replicas == 1"
        " && (!has(self.learner.processes) || self.learner.processes == 1)"
        " && (!has(self.learner.gpusPerReplica) || self.learner.gpusPerReplica == 1))",
        message="`optimizer.name` must be 'adamw' for several ranks",
        got=_text("optimizer.name"),
        at="optimizer.name",
    ),
    _rule(
        rule="self.learner.gradientMode != 'onePass'"
        f" || self.algorithm.method in {_words(_ONE_PASS_METHODS)}"
        f" && {_IS_SHIPPED}",
        message="`learner.gradientMode` may not be 'onePass' where the method or its baseline"
        " needs two passes; use 'auto'",
        got=_text("algorithm.method"),
        at="learner.gradientMode",
    ),
    # A checkpoint fits one model, task, batch and optimizer; the learner refuses others.
    _immutable_field_rule("model.name", is_text=True),
    _immutable_optional_field_rule("model.revision"),
    _immutable_optional_field_rule("model.lora", is_text=False),
    _immutable_field_rule("environment.name", is_text=True),
    _immutable_field_rule("seed"),
    _immutable_field_rule("batch.promptsPerStep"),
    _immutable_field_rule("batch.trajectoriesPerPrompt"),
    _immutable_field_rule("optimizer"),
    _immutable_optional_field_rule("pods.queueName"),
    _immutable_optional_field_rule("learner.checkpointStorageClassName"),
    # One pod has a volume of its own, several share one, and a claim's access mode cannot change.
    _rule(
        rule="(self.learner.replicas == 1) == (oldSelf.learner.replicas == 1)",
        message="`learner.replicas` may not change from 1 or to 1; create another run",
        at="learner.replicas",
    ),
)


ALGORITHM: Final = (
    _rule(
        rule=f"!has(self.loss) || self.loss.matches('^{IMPORT_PATH}$')",
        message="`loss` must be package.module:function",
        got=_text("loss"),
        at="loss",
    ),
    _rule(
        rule=f"!has(self.baseline) || self.baseline in {_words(Baseline)}"
        f" || self.baseline.matches('^{IMPORT_PATH}$')",
        message="`baseline` must be one of "
        + ", ".join(f"'{name}'" for name in Baseline)
        + ", or package.module:function for your own",
        got=_text("baseline"),
        at="baseline",
    ),
    _rule(
        rule=_where_given(
            "method",
            "baselineScope",
            rule=f"self.baselineScope != 'batch' || {_baseline_among(BATCH_BASELINES, 'self')}"
            " || (has(self.baseline) && self.baseline.contains(':'))",
        ),
        message="`baselineScope` may be 'batch' only when the baseline is one of "
        + ", ".join(f"'{name}'" for name in BATCH_BASELINES),
        got=_text("method"),
        at="baselineScope",
    ),
)

BATCH: Final = (
    _rule(
        rule=_where_given(
            "promptSelection", rule="self.promptSelection == 'sequential' || has(self.promptPool)"
        ),
        message="`promptPool` must be given where `promptSelection` is not 'sequential'",
        got=_text("promptSelection"),
        at="promptPool",
    ),
)

MODEL: Final = (
    # A run file on a laptop may name a directory beside it; a pod sees only mounted volumes.
    _rule(
        rule="self.name.startsWith('/') || self.name.matches('^[a-z][a-z0-9+]*://.')"
        " || (!self.name.startsWith('.')"
        " && self.name.matches('^[-A-Za-z0-9_.]+(/[-A-Za-z0-9_.]+)?$'))",
        message="`name` may not be a relative path: a pod has no folder of the run file; give"
        " the absolute path of a mounted volume, a model name on the Hugging Face hub, or a URL"
        " such as s3://bucket/folder",
        got=_text("name"),
        at="name",
    ),
)

ENVIRONMENT: Final = (
    _name_rule(BUILT_IN, "Class for a class"),
    _rule(
        rule="!has(self.systemPrompt) || !has(self.promptFormat) || self.promptFormat != 'plain'",
        message="`systemPrompt` may not be given where `promptFormat` is 'plain'",
        at="systemPrompt",
    ),
)

REWARD: Final = (_name_rule(BUILT_IN_REWARDS, "function for a function"),)

ROLLOUT_GROUP: Final = (
    _shipped_or_own("engine", EngineName),
    *(
        _rule(
            rule=f"{unused} || !has(self.engine) || self.engine != 'hf'",
            message=f"`{field}` may not be given where `engine` is 'hf'",
            at=field,
        )
        for field, unused in (
            ("kvCache", "!has(self.kvCache) || self.kvCache == 'recompute'"),
            ("kvCacheGibibytes", "!has(self.kvCacheGibibytes)"),
            ("tensorParallelSize", "!has(self.tensorParallelSize) || self.tensorParallelSize == 1"),
        )
    ),
    _rule(
        rule=_where_given(
            *("minReplicas", "maxReplicas"), rule="self.minReplicas <= self.maxReplicas"
        ),
        message="`minReplicas` must be less than or equal to `maxReplicas`",
        at="minReplicas",
    ),
    _rule(
        rule=_where_given(
            *("gpus", "tensorParallelSize"),
            rule="self.gpus == 0 || self.gpus >= self.tensorParallelSize",
        ),
        message="`gpus` must be 0, or at least `tensorParallelSize`",
        at="gpus",
    ),
)

_RANKS_PER_REPLICA = (
    "(has(self.processes) ? self.processes : has(self.gpusPerReplica) ? self.gpusPerReplica : 1)"
)
LEARNER: Final = (
    _rule(
        rule="!has(self.processes) || !has(self.gpusPerReplica)"
        " || self.processes == self.gpusPerReplica",
        message="`processes` must be equal to `gpusPerReplica`, one process for each GPU",
        at="processes",
    ),
    _rule(
        rule=_where_given(
            *("fsdpSize", "replicas"),
            rule=f"self.replicas * {_RANKS_PER_REPLICA} % self.fsdpSize == 0",
        ),
        message="`fsdpSize` must divide the number of ranks, `replicas` times `processes`",
        at="fsdpSize",
    ),
)

TRACKING_SINK: Final = (
    _shipped_or_own("name", SinkName),
    *(
        _rule(
            rule=f"!has(self.{field}) || self.name in {_words(names)}",
            message=f"`{field}` may be given only where `name` is "
            + " or ".join(f"'{name}'" for name in names),
            got=_text("name"),
            at=field,
        )
        for field, names in SINKS_BY_FIELD.items()
    ),
)

EGRESS: Final = (
    _rule(
        rule="!(has(self.cidr) && has(self.namespace))",
        message="`cidr` may not be given beside `namespace`",
        at="cidr",
    ),
)
