"""What an engine samples beside what the learner makes of it, at one version and at the next."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from benchmarks.harness.made import trajectory
from benchmarks.model_families.learner_side import (
    MAX_NEW_TOKENS,
    learner_logprobs,
    load_learner,
    make_spec,
    mean_difference,
)
from benchmarks.model_families.tiny_model import FIRST_TOKEN_ID, change_state
from vcpo.api import VCPORunSpec
from vcpo.api.workloads import EngineName
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.update.micro_batches import MicroBatchRunner
from vcpo_rollout.engines.engine import Engine, EngineError, GenerationRequest, PolicyWeights
from vcpo_rollout.engines.factory import load_engine, plan_weights
from vcpo_rollout.weights.postprocess import make_postprocessing

_PROMPTS: Final = (3, 9, 3, 20, 5, 12, 3, 50, 8, 70, 3, 6)
"""Tokens of the prompts: twice as many as the engine has places, so that some join others. A prompt
and a response pass a chunk of the delta rule, 64 tokens."""
_LORA: Final = {"rank": 4, "alpha": 8}


def engine_difference(
    folder: Path, engine: EngineName, *, adapters: bool = False, **settings: Any
) -> float:
    """Compare an engine with the learner: mean difference, nats a token; the worse of two versions.

    adapters: whether the run trains adapters.
    settings: of the rollout group, beside its own; in float32 if they do not say.

    Raises:
        StartError: if the learner refuses the model.
        ValueError: if the worker does.
    """
    places = {"maxConcurrentSequences": len(_PROMPTS) // 2}
    group: dict[str, Any] = {"name": "main", "engine": engine, **places, "precision": "float32"}
    if engine is EngineName.VLLM:
        group["kvCacheGibibytes"] = 1 / 8
    spec = make_spec(folder, rollouts=[group | settings], model={"lora": _LORA} if adapters else {})
    return asyncio.run(_worse_version(spec))


async def _worse_version(spec: VCPORunSpec) -> float:
    network, pad = load_learner(spec)
    (group,) = spec.rollouts
    plan = plan_weights(spec, group)
    postprocess = make_postprocessing(
        spec, group, seed=0, rounding=plan.rounding, adapters=plan.adapters
    )
    engine, _ = load_engine(spec, group, plan, seed=0)
    differences: list[float] = []
    for version in (1, 2):
        if spec.model.lora is not None:
            change_state(network.model, 1.0)  # half of an adapter is 0 at first
        elif version > 1:
            change_state(network.model, 0.1)
        payload = PublishedState(network.model).whole(group.number_format)
        weights = PolicyWeights(version, bytes(payload))
        try:
            await engine.swap_weights(weights if postprocess is None else postprocess(weights))
            sampled = await _sample(engine, version)
        except EngineError as error:
            if differences:
                raise
            raise ValueError(f"spec.rollouts[].engine: {error}") from error  # it samples nothing
        # Anew for each version: it compares the output head with its tiles.
        runner = MicroBatchRunner(network, spec, pad)
        own = [learner_logprobs(runner, [each])[0] for each in sampled]
        drawn = [torch.tensor(each.rollout_logprobs) for each in sampled]
        differences.append(mean_difference(own, drawn))
    await engine.close()
    limit_nats = 2 * spec.mismatch_limit_nats  # at which the self-check ends a run at the latest
    if min(differences) > limit_nats:
        off = f"computes another policy, more than {limit_nats} nats a token off"
        ends = "the self-check of a run ends it before its first step"
        raise ValueError(f"spec.rollouts[].engine: {group.engine} {off}; {ends}")
    return max(differences)


async def _sample(engine: Engine, version: int) -> list[Trajectory]:
    """Sample a response to each prompt."""
    random = Random(version)  # noqa: S311 - tokens, not secrets
    prompts = [
        tuple(random.randrange(FIRST_TOKEN_ID, 101) for _ in range(length)) for length in _PROMPTS
    ]
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt, temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, seed=number
        )
        for number, prompt in enumerate(prompts)
    ]
    found = await asyncio.gather(*map(engine.generate, requests))
    return [
        trajectory(
            number,
            prompt,
            one.token_ids,
            one.logprobs,
            version_spans=one.version_spans,
            finish_reason=one.finish_reason,
        )
        for number, (prompt, one) in enumerate(zip(prompts, found, strict=True))
    ]
