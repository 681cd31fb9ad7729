"""`python -m vcpo_rollout.trial NUMBER < run.yaml`: samples and judges answers of a run's model.

It takes the first prompts of a run, and samples and judges a group of responses to each, with the
parts of a worker. What a worker has of the learner is missing: the weights are those of the model
as it lies on the disk, and nothing is trained. New adapters (`model.lora`) change nothing of a
model, so they are left out.

Standard output gets one line of JSON for each message of `vcpo.records.trial`. What the user's code
prints goes to standard error, and so does an error that the user must correct, after its mark.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn, TextIO

import safetensors.torch

from vcpo.api import VCPORun, VCPORunSpec, parse_run
from vcpo.api.workloads import OverlongPrompts
from vcpo.metrics import RolloutMetrics
from vcpo.records.samples import Sample
from vcpo.records.trial import AnsweredPrompt, FailedPrompt, TrialEnd, TrialMessage, message_line
from vcpo.service.lifecycle import StartError, report_start_error, start_errors
from vcpo.service.model_files import local_model
from vcpo.service.plugins import import_from_run_folder
from vcpo.wire.trajectory import Trajectory
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.app import Sampler, load_sampler
from vcpo_rollout.engines.chat_codec import PromptCodec
from vcpo_rollout.engines.engine import EngineError, PolicyWeights
from vcpo_rollout.engines.loading import load_state
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import EnvironmentFailedError, EnvironmentThreads
from vcpo_rollout.generation.responses import ResponseGenerator
from vcpo_rollout.generation.rewards import make_task

_SEEDS: Final = 1 << 20
"""More than the prompts of a trial, so that two runs' seeds share none."""
_NOBODY: frozenset[int] = frozenset()
"""No end tokens: a text keeps all of its own."""


def main() -> NoReturn:
    """Read a run from standard input, sample from its model, and exit."""
    parser = argparse.ArgumentParser(prog="python -m vcpo_rollout.trial")
    parser.add_argument("prompts", type=int, help="number of prompts")
    parser.add_argument("--tokens", action="store_true", help="show prompts token by token")
    options = parser.parse_args()
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints is no message
    status = 0
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
        asyncio.run(try_run(run, options.prompts, messages, shows_tokens=options.tokens))
    except StartError as error:
        status = report_start_error(error)
    messages.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of the environment may never return


async def try_run(
    run: VCPORun, num_prompts: int, messages: TextIO, *, shows_tokens: bool = False
) -> None:
    """Sample and judge responses to the first prompts of a run; write each group when it is there.

    Raises:
        StartError: when the user must correct something.
    """
    with start_errors():
        spec = await asyncio.to_thread(_local_spec, run.spec)
        run = run.model_copy(update={"spec": spec})
        task, group = spec.environment, spec.rollouts[0]
        environment = make_task(task, spec.seed)
        sampler = await asyncio.to_thread(load_sampler, run, group, seed=spec.seed)
        await _swap_in_own_weights(spec, sampler)
    gauges = RolloutGauges(RolloutMetrics(run=run.metadata.name, group="trial"))
    generator = ResponseGenerator(
        engine=sampler.engine,
        environment=environment,
        codec=sampler.codec,
        gauges=gauges,
        threads=EnvironmentThreads(
            group.max_concurrent_sequences, gauges=gauges, timeout_s=spec.environment_timeout_s
        ),
        truncates_prompts=task.overlong_prompts is OverlongPrompts.TRUNCATE,
    )

    def write(message: TrialMessage) -> None:
        messages.write(message_line(message))
        messages.flush()

    async def try_prompt(index: int) -> None:
        try:
            responses = await generator.generate(_lease(spec, index), asyncio.Event())
        except (EngineError, EnvironmentFailedError) as error:
            write(FailedPrompt(prompt_index=index, why=str(error)))
        else:
            found = _samples(index, responses, sampler.codec, shows_tokens=shows_tokens)
            write(AnsweredPrompt(samples=found))

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as prompts:
        for index in range(num_prompts):
            prompts.create_task(try_prompt(index))
    write(TrialEnd(seconds=time.monotonic() - started_s))
    await sampler.engine.close()


def _local_spec(spec: VCPORunSpec) -> VCPORunSpec:
    """Return the spec with a model that lies on the disk, and without adapters."""
    name = local_model(spec.model.name)
    model = spec.model.model_copy(update={"name": name, "lora": None})
    return spec.model_copy(update={"model": model})


async def _swap_in_own_weights(spec: VCPORunSpec, sampler: Sampler) -> None:
    """Have the engine use the model's own weights, prepared as a worker prepares a version."""
    model = spec.model

    def read() -> PolicyWeights:
        state = load_state(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        weights = PolicyWeights.whole(0, safetensors.torch.save(state))
        return weights if sampler.postprocess is None else sampler.postprocess(weights)

    await sampler.engine.swap_weights(await asyncio.to_thread(read))


def _lease(spec: VCPORunSpec, prompt_index: int) -> work_pb2.Lease:
    """Return the work on a prompt, as the learner would grant it."""
    return work_pb2.Lease(
        lease_id=f"trial-{prompt_index}",
        split=work_pb2.SPLIT_TRAIN,
        prompt_index=prompt_index,
        num_trajectories=spec.batch.trajectories_per_prompt,
        sampling=work_pb2.Sampling(
            temperature=spec.sampling.temperature,
            max_new_tokens=spec.sampling.max_new_tokens,
            seed=(spec.seed * _SEEDS + prompt_index) % 2**64,
        ),
    )


def _samples(
    prompt_index: int, group: Sequence[Trajectory], codec: PromptCodec, *, shows_tokens: bool
) -> tuple[Sample, ...]:
    """Return what people see of a group of responses; texts are whole."""

    def text(token_ids: Sequence[int]) -> str:
        return codec.decode(token_ids, _NOBODY)

    prompt_ids = group[0].prompt_token_ids
    prompt = text(prompt_ids)
    if shows_tokens:
        prompt = " ".join(f"{each}:{text([each])!r}" for each in prompt_ids)
    rewards = tuple(each.reward for each in group)
    return tuple(
        Sample(
            prompt_index=prompt_index,
            prompt=prompt,
            response=text(each.response_token_ids),
            finish_reason=each.finish_reason,
            reward=each.reward,
            reward_parts=dict(each.reward_parts),
            group_rewards=rewards,
            prompt_tokens=len(prompt_ids),
            response_tokens=each.num_sampled_tokens,
        )
        for each in group
    )


if __name__ == "__main__":
    main()
