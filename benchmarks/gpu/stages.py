"""What a step's time goes to: its stages, its kernels, and a device at rest."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks.gpu.setting import Setting, milliseconds
from vcpo_learner.optimizer.policy_optimizer import PolicyOptimizer
from vcpo_learner.update import policy_update
from vcpo_learner.update.micro_batches import MicroBatchRunner

_SHOWN: Final = 20
_STAGES: Final = (
    (MicroBatchRunner, "forward", "forward"),
    (MicroBatchRunner, "logprobs", "forward"),
    (torch.autograd, "backward", "backward"),
    (torch.autograd, "grad", "backward"),
    (policy_update, "clip_gradient", "clip"),
    (PolicyOptimizer, "step", "step"),
)
"""Owner and name of what belongs to a stage."""


def stages_ms(setting: Setting, work: Callable[[], object]) -> dict[str, float]:
    """Take a step; return milliseconds by stage, the device waited for around each.

    `rest` is what no stage has: sums of gradients, the decision, zeros.
    """
    spent_s: defaultdict[str, float] = defaultdict(float)
    running: list[str] = []

    def timed(stage: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def waited(*arguments: Any, **options: Any) -> Any:
            if running:  # checkpointed layers run backward within the backward pass
                return run(*arguments, **options)
            running.append(stage)
            started_s = setting.now_s()
            result = run(*arguments, **options)
            spent_s[running.pop()] += setting.now_s() - started_s
            return result

        return waited

    with ExitStack() as stack:
        for owner, name, stage in _STAGES:
            stack.enter_context(patch.object(owner, name, timed(stage, getattr(owner, name))))
        started_s = setting.now_s()
        work()
        spent_s["rest"] = setting.now_s() - started_s - sum(spent_s.values())
    return {stage: milliseconds(seconds) for stage, seconds in spent_s.items()}


def profile(setting: Setting, work: Callable[[], object], step_s: float) -> dict[str, Any]:
    """Return what the device does most in a step, in ms and times, and its share at rest.

    step_s: seconds of such a step without a profiler, which slows the host down.
    """
    kind = DeviceType.CUDA if setting.is_gpu else DeviceType.CPU
    activity = ProfilerActivity.CUDA if setting.is_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        setting.wait()
    spans = [
        (each.time_range.start, each.time_range.end)
        for each in profiler.events() or ()
        if each.device_type == kind
    ]
    name = "self_device_time_total" if setting.is_gpu else "self_cpu_time_total"
    rows = [each for each in profiler.key_averages() if each.device_type == kind]
    rows.sort(key=lambda each: -getattr(each, name))
    busy_s = 1e-6 * covered(spans)
    return {
        "busy_ms": milliseconds(busy_s),
        "idle_share": round(1.0 - busy_s / step_s, 3),
        "launches": len(spans),
        "top": {
            each.key[:80]: (milliseconds(1e-6 * getattr(each, name)), each.count)
            for each in rows[:_SHOWN]
        },
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
