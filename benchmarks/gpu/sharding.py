"""Part of FSDP2 on one rank: the sharded step against the unsharded one."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

# `torch.distributed` exports them without types.
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.gpu.random_models import (
    PAD_TOKEN_ID,
    QWEN_0_5B,
    QWEN_1_5B,
    TINY,
    ModelSize,
    make_groups,
    make_model,
    make_spec,
)
from benchmarks.gpu.setting import Figures, Setting
from benchmarks.harness.plain_step import Groups
from vcpo.api import VCPORunSpec
from vcpo.service.lifecycle import StartError
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.ranks.ranks import REPLICATE, SHARD, Communication, Ranks
from vcpo_learner.ranks.sharding import place_model
from vcpo_learner.update.policy_update import PolicyUpdate

_TIMEOUT = timedelta(minutes=5)


def sharded_step(setting: Setting) -> Figures:
    """Take the same step with and without FSDP2, in each gradient mode."""
    size = setting.choose(QWEN_0_5B if setting.is_quick else QWEN_1_5B, TINY)
    group_size, tokens = setting.choose((8, 1024), (4, 32))
    groups = make_groups(
        make_model(size, setting.device), setting, group_size=group_size, tokens=tokens
    )
    with one_rank(setting) as sharded:
        for mode in ("onePass",) if setting.is_quick else ("onePass", "twoPass"):
            spec = make_spec(
                setting,
                group_size=group_size,
                tokens=tokens,
                learner={"gradientMode": mode, "activationCheckpointing": "layers"},
            )
            yield {mode: _compare(setting, size, spec, sharded, groups)}


def _compare(
    setting: Setting, size: ModelSize, spec: VCPORunSpec, sharded: Ranks, groups: Groups
) -> dict[str, Any]:
    """The numbers of both steps and their differences; `refused` where ranks lack the mode."""
    lines: dict[str, Any] = {}
    for name, ranks in (("plain", Ranks(device=setting.device)), ("fsdp2", sharded)):
        setting.forget()
        try:
            lines[name] = _step(setting, make_model(size, torch.device("cpu")), spec, ranks, groups)
        except StartError as error:
            return lines | {"refused": str(error)}
    return lines | _differences(lines["plain"], lines["fsdp2"])


@contextmanager
def one_rank(setting: Setting) -> Iterator[Ranks]:
    """The only rank of a process group: NCCL on a GPU, gloo on a CPU."""
    store = HashStore()
    dist.init_process_group(
        backend="nccl" if setting.is_gpu else "gloo",
        store=PrefixStore("groups", store),
        rank=0,
        world_size=1,
        timeout=_TIMEOUT,
    )
    try:
        mesh = init_device_mesh(setting.device.type, (1, 1), mesh_dim_names=(REPLICATE, SHARD))
        rooms = ("commands", "control", "checkpoints", "publication")
        groups = {name: dist.new_group(backend="gloo", timeout=_TIMEOUT) for name in rooms}
        communication = Communication(mesh=mesh, errors=store, timeout=_TIMEOUT, **groups)
        yield Ranks(device=setting.device, communication=communication)
    finally:
        dist.destroy_process_group()


def _step(
    setting: Setting, model: torch.nn.Module, spec: VCPORunSpec, ranks: Ranks, groups: Groups
) -> dict[str, Any]:
    """Take two steps; the numbers of the first, the seconds of the second."""
    network = PolicyNetwork(model)
    place_model(network, ranks, spec.learner.number_format)
    update = PolicyUpdate(network, spec, PAD_TOKEN_ID, ranks=ranks)
    before = _checksum(model)
    result = update.step(groups, policy_version=0)
    line = {
        "gradient_norm": result.gradient_norm,
        "ess_ratio": result.ess_ratio,
        "learning_rate": result.learning_rate,
        "moved": _checksum(model) - before,
        "skipped": result.skipped,
    }
    seconds = setting.seconds(lambda: update.step(groups, policy_version=0), repeats=2)
    every = chain.from_iterable(groups)
    count = sum(len(one.prompt_token_ids) + len(one.response_token_ids) for one in every)
    return line | {"tokens_per_s": round(count / seconds, 1), "peak_gib": setting.peak_gib()}


def _checksum(model: torch.nn.Module) -> float:
    """Sum of the parameters' magnitudes."""
    total = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            total += float(own.double().abs().sum())
    return total


def _differences(plain: dict[str, Any], sharded: dict[str, Any]) -> dict[str, float]:
    names = ("gradient_norm", "ess_ratio", "learning_rate", "moved")
    return {
        f"{name}_relative_error": abs(sharded[name] - plain[name]) / abs(plain[name])
        for name in names
        if plain[name]
    }
