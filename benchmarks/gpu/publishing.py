"""Part of publishing: a version from the device into the host's memory, whole and as changes."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.gpu.random_models import QWEN_0_5B, QWEN_1_5B, TINY, make_model
from benchmarks.gpu.setting import Figures, Setting
from vcpo.api.workloads import Precision
from vcpo.wire.deltas import elements_of, write_changes
from vcpo_learner.model.published_state import PublishedState
from vcpo_rollout.engines.loading_weights import tensors_of

_VERSIONS = 3
_CHANGED_SHARE = 0.01
"""Elements that a step changes in bfloat16 at the learning rates of RL, about."""


def publishing(setting: Setting) -> Figures:
    """Publish 1 or 3 GB: all of it, and then what changed, which is found on the device."""
    size = QWEN_0_5B if setting.is_quick else QWEN_1_5B
    model = make_model(setting.choose(size, TINY), setting.device)
    parameters = PublishedState(model)
    whole_s = setting.seconds(lambda: parameters.whole(Precision.BFLOAT16), repeats=1)
    full_set = parameters.whole(Precision.BFLOAT16)
    yield {
        "payload_gb": round(len(full_set) / 1e9, 3),
        "changed_share": _CHANGED_SHARE,
        "whole_s": round(whole_s, 4),
    }
    times_s = []
    for _ in range(_VERSIONS):
        _change(model)
        setting.wait()
        started_s = time.perf_counter()
        changes = parameters.take(Precision.BFLOAT16)
        times_s.append(time.perf_counter() - started_s)
        assert isinstance(changes, dict), "one element in a hundred is a delta"
        write_changes(elements_of(full_set), changes)
        num_changes = sum(change.positions.size for change in changes.values())
    num_elements = sum(each.numel() for each in model.parameters())
    yield {
        "changes_share": round(num_changes / num_elements, 4),
        "changes_found_s": round(min(times_s), 4),
        "parameters_match": _matches(model, full_set),
    }


@torch.no_grad()
def _change(model: nn.Module) -> None:
    for parameter in model.parameters():
        chosen = torch.rand_like(parameter) < _CHANGED_SHARE
        parameter.add_(chosen * 0.1)


def _matches(model: nn.Module, payload: bytearray) -> bool:
    named = dict(model.named_parameters())
    return all(
        torch.equal(named[name].detach().bfloat16().cpu(), each)
        for name, each in tensors_of(payload).items()
    )
