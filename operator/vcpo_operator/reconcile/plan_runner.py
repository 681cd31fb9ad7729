"""Planning what a run lacks, and executing the plan."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vcpo.api import missing_gpus
from vcpo_operator.children.family import memory_notes, skipped_monitor_note
from vcpo_operator.children.manifest import Kind, Parent
from vcpo_operator.children.network import OperatorDefaults
from vcpo_operator.children.pod_template.template import moving_images
from vcpo_operator.cluster_api.client import ApiError
from vcpo_operator.cluster_api.executor import Executor, is_refusal
from vcpo_operator.cluster_api.run_secrets import NameConflictError
from vcpo_operator.decisions.autoscale import AutoscaleDecision
from vcpo_operator.decisions.desired import DesiredState, desired_state
from vcpo_operator.decisions.events import recreated_event
from vcpo_operator.decisions.plan import Action, Apply, IssueSecret, Throttle, first_conflict, plan
from vcpo_operator.decisions.snapshot import PlanResult, Snapshot
from vcpo_operator.names import credential_name
from vcpo_operator.observed.records import ObservedChild
from vcpo_operator.reconcile.memory import RunMemory
from vcpo_operator.reconcile.status_writer import StatusWriter
from vcpo_operator.signals.client import LearnerCommandError

_LOGGER = logging.getLogger(__name__)


def _notes(
    parent: Parent, defaults: OperatorDefaults, desired: DesiredState, memory: RunMemory
) -> Iterator[str]:
    if note := skipped_monitor_note(parent, defaults):
        yield note
    yield from missing_gpus(parent.run.spec)
    yield from moving_images(desired.children)
    yield from memory_notes(parent, desired.children)
    if memory.unknown_fields:
        fields = ", ".join(f"`{name}`" for name in memory.unknown_fields)
        yield f"Fields of a newer definition are left out: {fields}; upgrade the operator."


@dataclass(slots=True, eq=False)
class PlanRunner:
    """Plans and executes, one run at a time. One owner: the reconciler."""

    executor: Executor
    writer: StatusWriter
    defaults: OperatorDefaults

    async def run(
        self, snapshot: Snapshot, memory: RunMemory, autoscale: AutoscaleDecision | None
    ) -> PlanResult:
        """Plan and execute; twice if the first plan creates the keys that the rest needs."""
        result = await self._run_once(snapshot, memory, autoscale)
        if result.needs_replan:
            observed = memory.with_unwatched(snapshot.observed)
            result = await self._run_once(replace(snapshot, observed=observed), memory, autoscale)
        return result

    async def _run_once(
        self, snapshot: Snapshot, memory: RunMemory, autoscale: AutoscaleDecision | None
    ) -> PlanResult:
        observed, parent = snapshot.observed, memory.parent_of(snapshot.record, snapshot.run)
        try:
            desired = desired_state(
                parent,
                self.defaults,
                snapshot,
                decision=autoscale.decision if autoscale else None,
                kept=memory.kept_revision(observed),
            )
        except ValueError as error:
            return PlanResult(refusal=str(error))
        actions = plan(desired, observed, applied=memory.applied_versions, signals=snapshot.signals)
        if memory.keys_conflict is not None:  # the Secret may exist, but cannot be read
            actions = tuple(each for each in actions if not isinstance(each, IssueSecret))
        try:
            await self._execute(snapshot, memory, desired, actions)
        except ApiError as error:
            return PlanResult(error=str(error), retry_after_s=error.retry_after_s)
        except LearnerCommandError as error:
            return PlanResult(error=str(error))
        except NameConflictError as error:
            return PlanResult(conflict=error.conflict)
        return PlanResult(
            refusal=memory.refusal_message(desired),
            conflict=first_conflict(desired, observed) or memory.keys_conflict,
            note=" ".join(_notes(parent, self.defaults, desired, memory)),
            needs_replan=any(
                isinstance(action, IssueSecret)
                and action.child.name == credential_name(parent.name)
                for action in actions
            ),
            pending=desired.pending if desired.revision is not None else None,
        )

    async def _execute(
        self,
        snapshot: Snapshot,
        memory: RunMemory,
        desired: DesiredState,
        actions: Iterable[Action],
    ) -> None:
        """Execute actions; skip what the API server calls invalid, and all that is new after it.

        Existing objects are still changed. Nothing new is created after a refusal: workers would
        hold their GPUs while they wait for a learner that cannot be created.
        """
        key, is_refused = snapshot.record.key, False
        for action in actions:
            if isinstance(action, Apply):
                known = memory.is_refused(action, snapshot.now_s)
                if known or (is_refused and not action.force):
                    is_refused = True
                    continue
            # What steers a run is told to everybody who reads the log; the rest only on request.
            level = logging.INFO if isinstance(action, Throttle) else logging.DEBUG
            _LOGGER.log(level, "%s: %s", key, action)
            try:
                applied = await self.executor.execute(key, action)
            except ApiError as error:
                if not (isinstance(action, Apply) and is_refusal(action, error)):
                    raise
                _LOGGER.warning("%s: %s", key, error)
                memory.record_refusal(action, error.message, snapshot.now_s)
                is_refused = True
                continue
            if applied is not None:
                await self._record_applied(snapshot, memory, desired, applied)
            memory.record_action(action, applied)

    async def _record_applied(
        self, snapshot: Snapshot, memory: RunMemory, desired: DesiredState, applied: ObservedChild
    ) -> None:
        if applied.kind is Kind.CONFIG_MAP:
            memory.applied_revision = desired.revision
        memory.applied_versions[applied.uid] = applied.version
        if memory.record_child(applied):
            event = recreated_event(snapshot.record, applied, snapshot.now_s)
            await self.writer.post_event(snapshot.record.key, event)
