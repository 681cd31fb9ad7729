"""Measure how long vLLM stops for a new version of the weights.

The model has more than 100 M random parameters in bfloat16; no sequences are being generated. Swaps
take turns: of all tensors, of the elements that one optimizer step at the learning rate of RL
changed, of none. A second vLLM serves LoRA adapters of all linear layers. On a CPU vLLM keeps
weights as it loads them, as on a GPU: it does not pack them.

- pause_s: median of wall-clock seconds from before the pause to after the resumption;
- sent_fraction: bytes of the file for vLLM over those of the full set.

vLLM runs in a process of its own, so other work on the machine adds to the seconds.
"""

import asyncio
import json
import tempfile
import time
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch.nn import Linear, Module
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.harness.measures import parser_of
from benchmarks.harness.successive_versions import make_model, updates
from tests.fixtures.rollout.unpacked_vllm import UNPACKED
from vcpo.api.workloads import Lora, Model, Precision, RolloutGroup
from vcpo.wire.deltas import Positions, elements_of
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges
from vcpo_rollout.engines.loading_weights import tensors_of
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.exchange import patches_to_send
from vcpo_rollout.engines.vllm.start import VllmSettings, load_skeleton, start_llm


class TimedPauses:
    """vLLM, and the duration of each of its pauses, seconds."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._paused_s = 0.0
        self.pauses_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def pause_generation(self, **options: Any) -> None:
        self._paused_s = time.perf_counter()
        await self._llm.pause_generation(**options)

    async def resume_generation(self) -> None:
        await self._llm.resume_generation()
        self.pauses_s.append(time.perf_counter() - self._paused_s)


def changes_between(before: bytes, after: bytes) -> dict[str, Positions]:
    """Return where tensors differ."""
    was, now = (elements_of(each) for each in (before, after))
    places = {name: np.flatnonzero(was[name] != now[name]) for name in now}
    return {name: each for name, each in places.items() if each.size}


def sent_bytes(payload: bytes, changed: dict[str, Positions] | None) -> int:
    """Return the bytes of the tensors that a swap sends."""
    tensors = tensors_of(payload)
    sent = tensors if changed is None else patches_to_send(tensors, changed) or {}
    return sum(each.nbytes for each in sent.values())


async def measure(
    settings: VllmSettings,
    payload: bytes,
    cases: dict[str, Any],
    rounds: int,
    *,
    full_payload: bytes | None = None,
) -> dict[str, dict[str, float]]:
    """Swap all cases `rounds` times and return the figures of each.

    full_payload: the full set; None for `payload` itself.
    """
    llm = TimedPauses(await asyncio.to_thread(start_llm, settings))
    skeleton = load_skeleton(settings)
    engine = VllmEngine(llm, skeleton=skeleton, end_token_ids=frozenset(), lora=settings.lora)
    pauses: dict[str, list[float]] = {name: [] for name in cases}
    version = 0
    try:
        await engine.swap_weights(PolicyWeights(version, payload))
        for _ in range(rounds):
            for case, changed in cases.items():
                await engine.swap_weights(_weights(payload, changed, base=version))
                version += 1
                pauses[case].append(llm.pauses_s[-1])
                print(f"{case}: paused {llm.pauses_s[-1]:.3f} s", flush=True)
    finally:
        await engine.close()
    full_bytes = sent_bytes(full_payload or payload, None)
    shares = {case: sent_bytes(payload, each) / full_bytes for case, each in cases.items()}
    return {
        case: {"pause_s": round(median(pauses[case]), 4), "sent_fraction": round(share, 4)}
        for case, share in shares.items()
    }


def random_adapters(model: Module, rank: int) -> bytes:
    """Return adapters of all linear layers but the head, as a learner publishes them."""
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and "lm_head" not in name:
            tensors[f"{name}.lora_A.default.weight"] = torch.randn(rank, layer.in_features)
            tensors[f"{name}.lora_B.default.weight"] = torch.zeros(layer.out_features, rank)
    return safetensors.torch.save(tensors)


def _weights(payload: bytes, changed: dict[str, Positions] | None, *, base: int) -> PolicyWeights:
    changes = None
    if changed is not None:
        changes = WeightChanges(base_policy_version=base, positions=changed)
    return PolicyWeights(base + 1, payload, changes=changes)


def main() -> None:
    """Measure and print everything as JSON."""
    arguments = parser_of(
        __doc__,
        hidden=(768, "width of the model"),
        layers=10,
        steps=(3, "optimizer steps; the last one counts"),
        rounds=7,
        rank=(16, "rank of the adapters"),
    ).parse_args()
    torch.set_num_threads(1)
    model = make_model(arguments.hidden, arguments.layers)
    *_, update = updates(model, steps={arguments.steps}, learning_rate=1e-6)
    changed = changes_between(update.before, update.after)
    cases = {"full": None, "step": changed, "none": {}}
    lora = Lora(rank=arguments.rank)
    adapters = random_adapters(model, lora.rank)
    group = {"name": "vllm", "engine": "vllm", "precision": Precision.BFLOAT16}
    sizes = {"maxConcurrentSequences": 8, "kvCacheGibibytes": 1 / 16}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = VllmSettings(
            model=Model(name=folder),
            group=RolloutGroup.model_validate(group | sizes),
            seed=0,
            arguments=UNPACKED,
        )
        report = asyncio.run(measure(settings, update.after, cases, arguments.rounds))
        with_adapters = replace(settings, model=Model(name=folder, lora=lora), serves_adapters=True)
        full = {"full_payload": update.after}
        report |= asyncio.run(
            measure(with_adapters, adapters, {"adapters": None}, arguments.rounds, **full)
        )
    print(json.dumps({"parameters": model.num_parameters(), **report}))


if __name__ == "__main__":
    main()
