"""Runs of a cluster, as kubectl shows them: this machine needs kubectl and no client library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from vcpo.local.terminal.run_view import RunView
from vcpo.monitor.kubectl import Scope, kubectl_output
from vcpo.monitor.run_row import RunRow
from vcpo.records.journal import EventRecord
from vcpo.spec.algorithm import Algorithm

_RESOURCE = "vcporuns.vcpo.dev"
_CHUNK_BYTES = 65_536
_AGAIN_S = 2.0
"""Time between the end of a watch, which API servers end now and then, and the next."""
_OPERATOR = "operator"
"""Source of the operator's events."""
_DEFAULT_LAG_BOUND = Algorithm().max_policy_lag_steps


class ClusterRuns:
    """The runs of a scope, kept up to date by `kubectl get --watch`. Owner: one event loop."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._runs: dict[str, dict[str, Any]] = {}
        self._watching: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why the newest watch ended; empty while it goes on."""

    async def start(self) -> None:
        """List the runs and begin to watch them.

        Raises: KubectlError.
        """
        runs = await asyncio.to_thread(list_runs, self._scope)
        self._runs = {_place(run): run for run in runs}
        self._watching = asyncio.create_task(self._watch_for_ever())

    def rows(self, now_s: float) -> list[RunRow]:
        """Return the runs by namespace and name. now_s: Unix time."""
        return [object_row(self._runs[place], now_s) for place in sorted(self._runs)]

    async def close(self) -> None:
        """End the watch."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch_for_ever(self) -> None:
        while True:
            await self._watch()
            await asyncio.sleep(_AGAIN_S)

    async def _watch(self) -> None:
        arguments = ["get", _RESOURCE, *self._scope.arguments(), "--output=json"]
        process = await asyncio.create_subprocess_exec(
            "kubectl",
            *arguments,
            "--watch",
            "--output-watch-events",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            documents, is_first = JsonStream(), True
            while chunk := await process.stdout.read(_CHUNK_BYTES):
                for event in documents.feed(chunk.decode()):
                    if is_first:  # the watch begins with all runs that exist
                        self._runs, is_first = {}, False
                    self._take(event)
                self.trouble = ""
            _, errors = await process.communicate()
            self.trouble = " ".join(errors.decode().split())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _take(self, event: Mapping[str, Any]) -> None:
        run = event["object"]
        if run.get("kind") != "VCPORun":
            return
        if event["type"] == "DELETED":
            self._runs.pop(_place(run), None)
        else:
            self._runs[_place(run)] = run


class JsonStream:
    """Splits text that arrives in pieces into JSON objects that follow one another."""

    def __init__(self) -> None:
        self._text = ""
        self._decoder = json.JSONDecoder()

    def feed(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the objects that this piece completes."""
        self._text += text
        while self._text:
            self._text = self._text.lstrip()
            try:
                value, end = self._decoder.raw_decode(self._text)
            except json.JSONDecodeError:
                return  # the rest of the object has not arrived
            self._text = self._text[end:]
            yield value


def list_runs(scope: Scope) -> list[dict[str, Any]]:
    """Return the runs of a scope.

    Raises: KubectlError.
    """
    answer = kubectl_output(["get", _RESOURCE, *scope.arguments(), "--output=json"])
    items: list[dict[str, Any]] = json.loads(answer)["items"]
    return items


def find_run(scope: Scope, name: str) -> dict[str, Any] | None:
    """Return a run of a namespace; None if it does not exist.

    Raises: KubectlError.
    """
    arguments = ["get", _RESOURCE, name, *scope.arguments(), "--ignore-not-found", "--output=json"]
    answer = kubectl_output(arguments)
    found: dict[str, Any] | None = json.loads(answer) if answer.strip() else None
    return found


def has_ended(run: Mapping[str, Any]) -> bool:
    """Return whether a VCPORun object is complete or has failed."""
    status = run.get("status") or {}
    return any(_condition(status, kind).get("status") == "True" for kind in ("Complete", "Failed"))


def run_events(scope: Scope, name: str) -> list[EventRecord]:
    """Return the operator's events of a run, by time.

    Raises: KubectlError.
    """
    about = f"--field-selector=involvedObject.kind=VCPORun,involvedObject.name={name}"
    answer = kubectl_output(["get", "events", *scope.arguments(), about, "--output=json"])
    events = []
    for item in json.loads(answer)["items"]:
        time = item.get("lastTimestamp") or item["metadata"].get("creationTimestamp")
        events.append(
            EventRecord(
                time_unix_s=_unix_s(time) or 0.0,
                source=_OPERATOR,
                kind=item["reason"],
                message=item["message"],
            )
        )
    return sorted(events, key=lambda event: event.time_unix_s)


def object_row(run: Mapping[str, Any], now_s: float) -> RunRow:
    """Return the row of a VCPORun object. now_s: Unix time."""
    updated_s = _unix_s((run.get("status") or {}).get("updateTime"))
    age_s = None if updated_s is None else max(0.0, now_s - updated_s)
    return RunRow(place=_place(run), view=object_view(run, now_s), age_s=age_s)


def object_view(run: Mapping[str, Any], now_s: float) -> RunView:
    """Return the state of a VCPORun object, from its spec and status. now_s: Unix time."""
    spec, status = run["spec"], run.get("status") or {}
    lag, warning = status.get("lag") or {}, status.get("warning") or {}
    trajectories = status.get("trajectories") or {}
    groups: Sequence[Mapping[str, Any]] = status.get("rollouts") or ()
    start_s = _unix_s(status.get("startTime"))
    end_s = _unix_s(status.get("completionTime")) or now_s
    return RunView(
        run_name=run["metadata"]["name"],
        phase=_condition(status, "Ready").get("reason", "Pending"),
        step=status.get("step", 0),
        total_steps=spec["steps"],
        reward_mean=status.get("rewardMean"),
        accuracy=status.get("evaluationAccuracy"),
        ess_ratio=status.get("essRatio"),
        on_policy_ess_ratio=status.get("onPolicyEssRatio"),
        learning_rate_scale=status.get("learningRateScale"),
        lag_p50=lag.get("p50"),
        lag_max=lag.get("max"),
        lag_bound=(spec.get("algorithm") or {}).get("maxPolicyLagSteps", _DEFAULT_LAG_BOUND),
        admission_lag_steps=status.get("admissionLagSteps"),
        warning_level=warning.get("level"),
        warning_score=warning.get("score"),
        buffered=trajectories.get("buffered", 0),
        in_flight=trajectories.get("inFlight", 0),
        workers_ready=sum(group.get("readyReplicas", 0) for group in groups),
        workers_desired=sum(group.get("desiredReplicas", 0) for group in groups),
        tokens_per_s=status.get("tokensPerSecond"),
        elapsed_s=0.0 if start_s is None else max(0.0, end_s - start_s),
        eta_s=None,
        notices=tuple(_notices(status)),
    )


def _notices(status: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("Ready", "SignalsFresh", "EssHealthy", "Stable"):
        condition = _condition(status, kind)
        if condition.get("status") == "False":
            yield f"{kind} ({condition['reason']}): {condition['message']}"


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    conditions = status.get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def _place(run: Mapping[str, Any]) -> str:
    return f"{run['metadata']['namespace']}/{run['metadata']['name']}"


def _unix_s(time: str | None) -> float | None:
    return None if time is None else datetime.fromisoformat(time).timestamp()
