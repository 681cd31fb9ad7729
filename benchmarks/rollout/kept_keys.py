"""Measure what it costs in effective sample size to keep keys and values across versions.

A model of `examples/models` takes real steps on its task, and a real vLLM samples while these
versions replace each other: once with `kvCache: recompute`, once with `keep`. Then the last version
scores every response, as the learner does.

- gap_nats: mean distance of a token's log-probability from that of a full forward of the version
  that labels it, for tokens that read no older keys, and for those that did;
- square_nats2_by_lag: mean square of a token's log weight, by the versions that it is behind;
- ess_ratio: of the responses of a round, mean over rounds and its standard error;
- older_share: share of tokens that read older keys.

The number of tokens between two versions depends on how busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from research.cells.cell import Cell
from research.cells.experiment import Experiment
from vcpo.algo.ess.importance_weights import ess_ratio
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import KvCache, Precision
from vcpo_rollout.engines.engine import Generation, GenerationRequest, PolicyWeights
from vcpo_rollout.engines.vllm.engine import VllmEngine
from vcpo_rollout.engines.vllm.start import VllmSettings, load_skeleton, start_llm

MODEL = Path(__file__).parents[2] / "examples" / "models" / "sort"
_DIGITS = 24
_WARM_UP_STEPS = 4
"""Steps before the first version, so that the optimizer's moments are those of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Successive versions of a policy, and requests for it."""

    payloads: Sequence[bytes]
    """Files of safetensors; version n is the n-th."""
    requests: Sequence[GenerationRequest]


def trained_versions(count: int, learning_rate: float) -> Versions:
    """Train a model on its task; return the last versions, and prompts of the last batch."""
    spec = VCPORunSpec.model_validate(
        {
            "model": {"name": str(MODEL)},
            "environment": {
                "name": "sort_digits",
                "parameters": {"digits": _DIGITS, "style": "plain"},
            },
            "steps": _WARM_UP_STEPS + count,
            "batch": {"promptsPerStep": 8, "trajectoriesPerPrompt": 8},
            "sampling": {"maxNewTokens": _DIGITS + 1},
            "optimizer": {"learningRate": learning_rate},
        }
    )
    cell = Cell(
        method="vcpo2", lag=0, learning_rate=learning_rate, seed=0, spec=spec, evaluation_seed=1
    )
    experiment, payloads = Experiment(cell, str(MODEL)), []
    for version in range(_WARM_UP_STEPS + count):
        experiment.publish()
        newest = experiment._versions.newest
        payloads.append(safetensors.torch.save(dict(newest.weights)))
        groups = experiment.sample(version)
        experiment.step(version, groups)
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(each.prompt_token_ids),
            temperature=1.0,
            max_new_tokens=_DIGITS + 1,
        )
        for group in groups
        for each in group
    ]
    return Versions(payloads=payloads[-count:], requests=requests)


class Samplers:
    """An engine of each kind; they take turns with one vLLM, which takes long to start."""

    def __init__(self) -> None:
        settings = VllmSettings(
            model_name=str(MODEL),
            revision=None,
            precision=Precision.FLOAT32,
            max_concurrent_sequences=64,
            seed=0,
            kv_cache_gibibytes=1 / 8,
        )
        llm, skeleton = start_llm(settings), load_skeleton(settings)
        self._engines = {
            kind: VllmEngine(llm, skeleton=skeleton, end_token_ids=frozenset(), kv_cache=kind)
            for kind in KvCache
        }

    async def rounds(self, kind: KvCache, versions: Versions, count: int) -> list[list[Generation]]:
        """Sample all requests in each round, while the versions replace each other."""
        engine = self._engines[kind]
        await _sample(engine, versions, spacing_s=None)  # the first requests take longer
        started_s = time.perf_counter()
        await _sample(engine, versions, spacing_s=None)
        spacing_s = (time.perf_counter() - started_s) / len(versions.payloads)
        return [await _sample(engine, versions, spacing_s=spacing_s) for _ in range(count)]

    async def close(self) -> None:
        """End vLLM."""
        for engine in self._engines.values():
            await engine.close()


async def _sample(
    engine: VllmEngine, versions: Versions, *, spacing_s: float | None
) -> list[Generation]:
    """Sample all requests; a version follows the other after `spacing_s`, if it is given."""
    await engine.swap_weights(PolicyWeights.whole(0, versions.payloads[0]))
    sampling = [asyncio.create_task(engine.generate(each)) for each in versions.requests]
    for version, payload in enumerate(versions.payloads if spacing_s is not None else ()):
        if version > 0:
            await asyncio.sleep(spacing_s or 0.0)
            await engine.swap_weights(PolicyWeights.whole(version, payload))
    return await asyncio.gather(*sampling)


class Scorer:
    """Scores responses with any version, by plain forward passes."""

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self._models: list[PreTrainedModel] = []
        for payload in payloads:
            model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
            model.load_state_dict(safetensors.torch.load(payload))
            self._models.append(model)

    @torch.no_grad()
    def logprobs(
        self, version: int, request: GenerationRequest, generation: Generation
    ) -> list[float]:
        """Return the log-probability of each token of a response."""
        prompt, response = request.prompt_token_ids, generation.token_ids
        tokens = torch.tensor([[*prompt, *response]])
        logits = self._models[version](input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        scored = logits.log_softmax(dim=-1).gather(1, tokens[0, len(prompt) :, None])
        return [float(each) for each in scored[:, 0]]


def figures(
    versions: Versions, rounds: Sequence[Sequence[Generation]], scorer: Scorer
) -> dict[str, Any]:
    """Return the figures of the module's docstring."""
    newest = len(versions.payloads) - 1
    ratios, gaps = [], defaultdict(list)
    squares: defaultdict[int, list[float]] = defaultdict(list)
    for generations in rounds:
        log_weights = []
        for request, generation in zip(versions.requests, generations, strict=True):
            learner = scorer.logprobs(newest, request, generation)
            log_ratios = [a - b for a, b in zip(learner, generation.logprobs, strict=True)]
            log_weights.append(math.fsum(log_ratios))
            first = 0
            for span in generation.version_spans:
                last = first + span.num_tokens
                own = scorer.logprobs(span.policy_version, request, generation)
                gaps[span.key_age_versions > 0] += [
                    abs(a - b)
                    for a, b in zip(own[first:last], generation.logprobs[first:last], strict=True)
                ]
                squares[newest - span.policy_version] += [r**2 for r in log_ratios[first:last]]
                first = last
        ratios.append(ess_ratio(log_weights))
    num_tokens = sum(map(len, gaps.values()))
    return {
        "ess_ratio": round(fmean(ratios), 4),
        "ess_ratio_se": round(stdev(ratios) / math.sqrt(len(ratios)), 4),
        "older_share": round(len(gaps[True]) / num_tokens, 3),
        "gap_nats": {
            "own keys": _mean(gaps[False]),
            "older keys": _mean(gaps[True]),
        },
        "square_nats2_by_lag": {lag: _mean(squares[lag]) for lag in sorted(squares)},
    }


async def measure(learning_rates: Sequence[float], count: int, rounds: int) -> None:
    """Print the figures of each rate and kind as JSON."""
    trained = {rate: trained_versions(count, rate) for rate in learning_rates}
    samplers = await asyncio.to_thread(Samplers)
    try:
        for rate, versions in trained.items():
            scorer = Scorer(versions.payloads)
            for kind in KvCache:
                found = figures(versions, await samplers.rounds(kind, versions, rounds), scorer)
                print(json.dumps({"learning_rate": rate, "kv_cache": kind, **found}), flush=True)
    finally:
        await samplers.close()


def _mean(values: Sequence[float]) -> float | None:
    return float(f"{fmean(values):.3g}") if values else None


def main() -> None:
    """Measure and print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--versions", type=int, default=5, help="during the responses of a round")
    parser.add_argument("--rounds", type=int, default=8, help="of 64 responses")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(arguments.learning_rates, arguments.versions, arguments.rounds))


if __name__ == "__main__":
    main()
