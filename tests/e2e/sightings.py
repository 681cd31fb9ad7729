"""What is seen of a run from outside: its object and its Deployment, as they change."""

from dataclasses import dataclass, field
from typing import Any

JsonObject = dict[str, Any]


@dataclass(slots=True)
class Sightings:
    """Accumulates what a run showed. Owner: whoever follows its objects."""

    ready_s: float | None = None
    """Time from applying the run to its Ready condition."""
    steps: int = 0
    conditions: dict[str, str] = field(default_factory=dict)
    """Newest reason by type, of the conditions that are True."""
    lags: set[int] = field(default_factory=set)
    """Values of the admission lag in force."""
    throttles: int = 0
    """Times that the admission lag was lowered."""
    throttled: JsonObject | None = None
    """`status.lastDecision` of the first throttle."""
    ess_health: str = ""
    """Reason of the condition EssHealthy when that decision was seen."""
    ready_workers: list[int] = field(default_factory=list)
    """Numbers of ready workers, each as it began to hold, from the first that was ready."""
    ups: int = 0
    """Times that more workers were asked for."""
    downs: int = 0
    """Times that fewer workers were asked for while the run went on."""
    _lag: int | None = None
    _wanted: int | None = None

    def see_run(self, run: JsonObject, elapsed_s: float) -> None:
        """Take in a state of the run."""
        status = run.get("status") or {}
        conditions = status.get("conditions") or ()
        self.conditions = {each["type"]: each["reason"] for each in conditions if _holds(each)}
        if self.ready_s is None and "Ready" in self.conditions:
            self.ready_s = elapsed_s
        self.steps = max(self.steps, status.get("step") or 0)
        self._see_lag(status.get("admissionLagSteps"))
        decision = status.get("lastDecision") or {}
        if self.throttled is None and decision.get("kind") == "Throttled":
            self.throttled = decision
            self.ess_health = next(
                (each["reason"] for each in conditions if each["type"] == "EssHealthy"), ""
            )

    def see_deployment(self, deployment: JsonObject) -> None:
        """Take in a state of the rollout workers' Deployment."""
        spec, status = deployment["spec"], deployment.get("status") or {}
        if spec.get("paused"):
            return
        ready = status.get("readyReplicas") or 0
        if (ready or self.ready_workers) and ready != (self.ready_workers or [0])[-1]:
            self.ready_workers.append(ready)
        self._see_wanted(spec["replicas"])

    def has_ended(self) -> bool:
        return bool({"Complete", "Failed"} & self.conditions.keys())

    def _see_lag(self, lag: int | None) -> None:
        if lag is None:
            return
        if self._lag is not None and lag < self._lag:
            self.throttles += 1
        self._lag = lag
        self.lags.add(lag)

    def _see_wanted(self, wanted: int) -> None:
        if self._wanted is not None and not self.has_ended():
            self.ups += wanted > self._wanted
            self.downs += wanted < self._wanted
        self._wanted = wanted


def _holds(condition: JsonObject) -> bool:
    return bool(condition["status"] == "True")
