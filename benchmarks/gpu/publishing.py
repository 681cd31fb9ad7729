"""Check of publishing: a version from the device into the host's memory, and its delta."""

from __future__ import annotations

import safetensors.torch
import torch
from torch import nn

from benchmarks.gpu.random_models import QWEN_1_5B, TINY, make_model
from benchmarks.gpu.setting import Figures, Setting
from vcpo.spec.workloads import Precision
from vcpo_learner.model.loading import policy_payload, policy_tensors
from vcpo_learner.weights.deltas import encode_delta

_CHANGED_SHARE = 0.01
"""Elements that a step changes in bfloat16 at the learning rates of RL, about."""


def publishing(setting: Setting) -> Figures:
    """Publish 3 GB: copy, serialize, and find what changed, on the host and on the device."""
    model = make_model(setting.choose(QWEN_1_5B, TINY), setting.device)
    base = policy_payload(model, Precision.BFLOAT16)
    before = [each.detach().bfloat16() for each in model.parameters()]
    yield {"payload_gb": round(len(base) / 1e9, 3), "changed_share": _CHANGED_SHARE}
    _change(model)
    copy_s = setting.seconds(lambda: policy_tensors(model, torch.bfloat16), repeats=2)
    yield {"copy_to_host_s": round(copy_s, 4)}
    serialize_s = setting.seconds(lambda: policy_payload(model, Precision.BFLOAT16), repeats=1)
    yield {"copy_and_serialize_s": round(serialize_s, 4)}
    after = policy_payload(model, Precision.BFLOAT16)
    delta = encode_delta(base, after)
    delta_s = setting.seconds(lambda: encode_delta(base, after), repeats=1)
    yield {
        "delta_on_host_s": round(delta_s, 4),
        "delta_gb": None if delta is None else round(len(delta) / 1e9, 4),
        "parameters_match": _matches(model, after),
    }
    found_s = setting.seconds(lambda: _changed_positions(model, before), repeats=3)
    yield {"changes_found_on_device_s": round(found_s, 4)}


@torch.no_grad()
def _change(model: nn.Module) -> None:
    """Move a share of the elements by far more than their rounding."""
    for parameter in model.parameters():
        chosen = torch.rand_like(parameter) < _CHANGED_SHARE
        parameter.add_(chosen * 0.1)


@torch.no_grad()
def _changed_positions(model: nn.Module, before: list[torch.Tensor]) -> list[torch.Tensor]:
    """Positions of changed elements, on the device; the project's delta does this on the host."""
    return [
        (now.bfloat16().view(torch.int16) != was.view(torch.int16)).flatten().nonzero()
        for now, was in zip(model.parameters(), before, strict=True)
    ]


def _matches(model: nn.Module, payload: bytes) -> bool:
    tensors = safetensors.torch.load(payload)
    named = dict(model.named_parameters())
    return all(
        torch.equal(named[name].detach().bfloat16().cpu(), each) for name, each in tensors.items()
    )
