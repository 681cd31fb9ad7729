"""Runs, parents and a small world on which actions take effect, for the operator's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vcpo.control import RunSignals
from vcpo.spec import VCPORun
from vcpo_operator.children import Child, Kind, OperatorDefaults
from vcpo_operator.children.config import make_parent
from vcpo_operator.children.manifest import Owner, Parent
from vcpo_operator.decisions.actions import (
    Action,
    Apply,
    DeleteChild,
    DeletePod,
    Drain,
    IssueToken,
    ReportScale,
    Scale,
    SeedScaler,
    SetDeletionCost,
)
from vcpo_operator.names import TEMPLATE_HASH_ANNOTATION, Role, RunKey, rollout_name
from vcpo_operator.observed.records import (
    Observed,
    ObservedChild,
    ObservedGroup,
    ObservedLearner,
    ObservedPod,
    ObservedScaler,
)
from vcpo_operator.observed.report import LearnerReport

KEY = RunKey("ml", "demo")
UID = "11111111-2222-3333-4444-555555555555"
DEFAULTS = OperatorDefaults(learner_image="learner:1", rollout_image="rollout:1")


def document(**spec: Any) -> dict[str, Any]:
    """A run as a user writes it."""
    least = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 10}
    return {"metadata": {"name": KEY.name, "namespace": KEY.namespace}, "spec": {**least, **spec}}


def make_run(**spec: Any) -> VCPORun:
    """A checked run."""
    return VCPORun.model_validate(document(**spec))


def parent(**spec: Any) -> Parent:
    """What builders are given for a run."""
    return make_parent(make_run(**spec), Owner(key=KEY, uid=UID))


def report(**changes: Any) -> LearnerReport:
    """A healthy learner's report of this moment."""
    signals = {
        "step": 5,
        "policy_version": 5,
        "ess_ratio_mean": 0.7,
        "on_policy_ess_ratio": 0.8,
        "lag_p50": 1,
        "lag_max": 3,
        "buffered": 10,
        "in_flight": 10,
        "batch_trajectories": 128,
        "admission_lag_steps": 8,
        "learner_idle_ratio": 0.1,
        "ready_workers": {},
    }
    of_signals = {name: changes.pop(name) for name in list(changes) if name in signals}
    return LearnerReport(signals=RunSignals(**{**signals, **of_signals}), **changes)


def pod(name: str, role: Role = Role.ROLLOUT, **changes: Any) -> ObservedPod:
    """A ready pod of the group `main`, or of the learner."""
    chosen = {
        "name": name,
        "uid": f"uid-{name}",
        "role": role,
        "group": "main" if role is Role.ROLLOUT else None,
        "template_digest": None,
        "ready": True,
        "leaving": False,
        "deletion_cost": None,
        "restarts": 0,
        "cause": None,
        **changes,
    }
    return ObservedPod(**chosen)


def names(actions: Iterable[Action]) -> list[str]:
    """Actions in short: `Apply Service demo-learner`, `Scale demo-rollout-main 2`."""
    return [_short(action) for action in actions]


def _short(action: Action) -> str:
    match action:
        case Apply(child=child):
            paused = " paused" if child.manifest.get("spec", {}).get("paused") else ""
            return f"Apply {child.kind.kind} {child.name}{paused}"
        case IssueToken(child=child):
            return f"Issue {child.name}"
        case SeedScaler(child=child, replicas=replicas):
            return f"Seed {child.name} {replicas}"
        case Scale(name=name, replicas=replicas):
            return f"Scale {name} {replicas}"
        case DeleteChild(kind=kind, name=name):
            return f"Delete {kind.kind} {name}"
        case DeletePod(name=name):
            return f"Delete Pod {name}"
        case SetDeletionCost(pod=name, cost=cost):
            return f"Cost {name} {cost}"
        case ReportScale(name=name, replicas=replicas):
            return f"Report {name} {replicas}"
        case Drain(reason=reason):
            return f"Drain: {reason}"
        case _:
            return str(action)


@dataclass
class World:
    """Objects of one run, as an API server with obedient controllers would keep them."""

    observed: Observed = field(default_factory=Observed)
    applied: dict[str, int] = field(default_factory=dict)

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Let actions take effect."""
        for action in actions:
            match action:
                case Apply(child=child):
                    self._apply(child)
                case IssueToken(child=child):
                    self._apply(child)
                case SeedScaler():
                    self._seed(action)
                case Scale(name=name, replicas=replicas):
                    self._scale(name, replicas)
                case DeleteChild(kind=kind, name=name):
                    self._delete(kind, name)
                case ReportScale():
                    self._report(action)
                case _:
                    pass

    def ask(self, group: str, replicas: int) -> None:
        """Let an autoscaler ask for workers."""
        there = self.observed.scalers[rollout_name(KEY.name, group)]
        self._set_scaler(dataclasses.replace(there, replicas=replicas))

    def touch(self, kind: Kind, name: str) -> None:
        """Let somebody else change what was applied."""
        there = self.observed.child(kind, name)
        assert there is not None
        self._put(dataclasses.replace(there, version=there.version + 1), None)

    def _apply(self, child: Child) -> None:
        there = self.observed.child(child.kind, child.name)
        owners = child.manifest["metadata"].get("ownerReferences", [])
        record = ObservedChild(
            kind=child.kind,
            name=child.name,
            uid=f"uid-{child.kind.kind}-{child.name}",
            owner_uid=owners[0]["uid"] if owners else None,
            digest=child.digest,
            version=there.version + 1 if there else 1,
        )
        self.applied[record.uid] = record.version
        self._put(record, child)

    def _put(self, record: ObservedChild, child: Child | None) -> None:
        others = [
            each
            for each in self.observed.children
            if (each.kind, each.name) != (record.kind, record.name)
        ]
        self.observed = dataclasses.replace(self.observed, children=(*others, record))
        if record.kind is Kind.DEPLOYMENT:
            self._put_group(record, child)
        if record.kind is Kind.SCALER and child is not None:
            self._put_scaler(record, child)
        if record.kind is Kind.STATEFUL_SET and child is not None:
            replicas = child.manifest["spec"]["replicas"]
            learner = ObservedLearner(child=record, replicas=replicas, settled=True)
            self.observed = dataclasses.replace(self.observed, learner=learner)

    def _report(self, action: ReportScale) -> None:
        for there in self.observed.scalers.values():
            if there.child.name == action.name:
                told = {
                    "reported_replicas": action.replicas,
                    "reported_selector": action.selector,
                }
                self._set_scaler(dataclasses.replace(there, **told))

    def _set_scaler(self, scaler: ObservedScaler) -> None:
        scalers = {**self.observed.scalers, scaler.child.name: scaler}
        self.observed = dataclasses.replace(self.observed, scalers=scalers)

    def _seed(self, action: SeedScaler) -> None:
        child = action.child
        record = ObservedChild(
            kind=child.kind,
            name=child.name,
            uid=f"uid-{child.kind.kind}-{child.name}",
            owner_uid=UID,
            digest=None,
            version=1,
        )
        self._put(record, child)
        self.ask(child.manifest["spec"]["group"], action.replicas)

    def _put_scaler(self, record: ObservedChild, child: Child) -> None:
        group = child.manifest["spec"]["group"]
        there = self.observed.scalers.get(record.name)
        new = ObservedScaler(
            child=record, group=group, replicas=1, reported_replicas=None, reported_selector=""
        )
        self._set_scaler(dataclasses.replace(there or new, child=record))

    def _put_group(self, record: ObservedChild, child: Child | None) -> None:
        found = {each.child.name: each for each in self.observed.groups.values()}
        there = found.get(record.name)
        paused = there.paused if there and child is None else False
        name = there.group if there else record.name.removeprefix(f"{KEY.name}-rollout-")
        replicas = there.replicas if there else 1
        if child is not None:
            paused = child.manifest["spec"].get("paused", False)
        group = ObservedGroup(
            child=record, group=name, replicas=replicas, current=replicas, ready=0, paused=paused
        )
        self._set_group(group)

    def _set_group(self, group: ObservedGroup) -> None:
        groups = {**self.observed.groups, group.group: group}
        self.observed = dataclasses.replace(self.observed, groups=groups)

    def _scale(self, name: str, replicas: int) -> None:
        (there,) = (each for each in self.observed.groups.values() if each.child.name == name)
        changed = replicas != there.replicas
        record = dataclasses.replace(there.child, version=there.child.version + changed)
        self._put(record, None)
        self._set_group(
            dataclasses.replace(there, child=record, replicas=replicas, current=replicas)
        )

    def _delete(self, kind: Kind, name: str) -> None:
        left = [each for each in self.observed.children if (each.kind, each.name) != (kind, name)]
        groups = {
            group: each for group, each in self.observed.groups.items() if each.child.name != name
        }
        scalers = {key: each for key, each in self.observed.scalers.items() if key != name}
        gone = kind is Kind.STATEFUL_SET
        self.observed = dataclasses.replace(
            self.observed,
            children=tuple(left),
            groups=self.observed.groups if kind is not Kind.DEPLOYMENT else groups,
            scalers=self.observed.scalers if kind is not Kind.SCALER else scalers,
            learner=None if gone else self.observed.learner,
        )


def template_digest(child: Child) -> str:
    """Digest of a workload's pod template."""
    annotations = child.manifest["spec"]["template"]["metadata"]["annotations"]
    return str(annotations[TEMPLATE_HASH_ANNOTATION])
