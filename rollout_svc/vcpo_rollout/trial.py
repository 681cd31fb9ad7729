"""`python -m vcpo_rollout.trial WHAT < run.yaml`: tries a run with the parts of a worker.

--environment  makes the environment, asks for prompts and has a small response scored
--engine       imports the engines of the user's own, and loads no model
--model        opens the tokenizer and each file of weights
--samples N    samples and scores answers to the first N prompts; the weights are the model's own,
               as it lies on the disk, and new adapters are left out, as they change nothing

It ends with 0 after what it found and the line `TRIED`, with `CANNOT_START` where a worker would
fail, or with `NOT_TRIED` where a service does not answer or a call takes long. The message is then
recorded as the end of the process, and begins with the field; with 0 each line of it is a warning.
With `--samples` standard output gets one line of JSON for each message of `vcpo.records.samples`
instead; what the user's code prints goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TextIO, TypeVar

from vcpo.api import VCPORun, VCPORunSpec, parse_run
from vcpo.metrics import RolloutMetrics
from vcpo.records.samples import (
    AnsweredPrompt,
    FailedPrompt,
    Sample,
    TrialEnd,
    TrialMessage,
    message_line,
)
from vcpo.service.lifecycle import CANNOT_START, NOT_TRIED, TRIED, StartError, start_errors
from vcpo.service.logs import record_end
from vcpo.service.model_files import local_model
from vcpo.service.plugins import import_from_run_folder
from vcpo.wire.failures import FailureCause
from vcpo.wire.v1 import work_pb2
from vcpo_rollout.environments.environment import (
    Conversation,
    Environment,
    MultiTurnEnvironment,
    Prompt,
    Split,
    make_environment,
)
from vcpo_rollout.gauges import RolloutGauges
from vcpo_rollout.generation.environment_pool import (
    EnvironmentFailedError,
    EnvironmentThreads,
    check_judgement,
    environment_errors,
    require_type,
)
from vcpo_rollout.generation.rewards import JudgedEnvironment, make_task

if TYPE_CHECKING:  # an environment is tried without torch
    from vcpo.wire.trajectory import Trajectory
    from vcpo_rollout.app import Sampler
    from vcpo_rollout.engines.chat_codec import PromptCodec

_Result = TypeVar("_Result")

RESPONSE: Final = "The answer is 42."
"""The response that the environment scores; it must score any text."""
_CALL_S: Final = 20.0
"""Longest wait for one call; a worker waits for half of a lease."""
_MAKE_S: Final = 60.0
_UNREACHABLE: Final = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}
_SEEDS: Final = 1 << 20
"""More than the prompts of a trial, so that two runs' seeds share none."""
_FEW_REPEATED: Final = 0.9  # share of prompts that differ; from it on nothing is said of the rest
_MOST_WARNINGS: Final = 100
_UNMARKED: Final = (
    "no response marks its answer, with \\boxed{} or <answer> tags (gsm8k: ####), and none is"
    " right; ask for the mark in environment.systemPrompt\n"
)
_NOBODY: frozenset[int] = frozenset()
"""No end tokens: a text keeps all of its own."""


class NotTriedError(Exception):
    """The trial did not come to its end here; a worker may have more luck."""


def main() -> NoReturn:
    """Read a run from standard input, try what the command line names, and exit."""
    parser = argparse.ArgumentParser(prog="python -m vcpo_rollout.trial")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--environment", action="store_true", help="try the environment")
    what.add_argument("--engine", action="store_true", help="try engines of the user's own")
    what.add_argument("--model", action="store_true", help="try the model's files")
    what.add_argument("--samples", type=int, metavar="N", help="answer the first N prompts")
    parser.add_argument("--tokens", action="store_true", help="show prompts token by token")
    options = parser.parse_args()
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints is not a message
    status = 0
    try:
        with start_errors():
            run = parse_run(sys.stdin.read(), source="standard input")
            import_from_run_folder(run)
        if options.environment:
            record_end("\n".join(asyncio.run(try_environment(run, messages))))
        elif options.engine:
            _try_engines(run)
        elif options.model:
            _try_model(run)
        else:
            asyncio.run(try_run(run, options.samples, messages, shows_tokens=options.tokens))
        if not options.samples:
            messages.write(TRIED)
    except StartError as error:
        record_end(str(error))
        status = CANNOT_START
    except NotTriedError as error:
        record_end(str(error))
        status = NOT_TRIED
    messages.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of the environment may never return


def _try_engines(run: VCPORun) -> None:
    from vcpo_rollout.engines.factory import find_engine

    with start_errors():
        for group in run.spec.rollouts:
            is_of_vllm = group.engine_arguments and find_spec("vllm")
            if ":" in group.engine_name or is_of_vllm:
                find_engine(run.spec, group)


def _try_model(run: VCPORun) -> None:
    """Open the tokenizer and each file of weights, with the libraries that load them."""
    from safetensors import safe_open
    from tokenizers import Tokenizer

    folder = Path(run.spec.model.name)
    index = folder / "model.safetensors.index.json"
    names, has_index = ["model.safetensors"], index.is_file()
    if has_index and not (folder / names[0]).is_file():  # transformers' order
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise StartError(
            f"model.name: has no {', '.join(missing[:4])}; give a whole model's folder"
        )
    if (folder / "tokenizer.json").is_file():
        names.append("tokenizer.json")
    for name in names:
        try:
            if name == "tokenizer.json":
                Tokenizer.from_file(str(folder / name))
            else:
                safe_open(folder / name, framework="numpy")  # its header is checked
        except Exception as error:  # tokenizers has no class of its own for what it refuses
            raise StartError(
                f"model.name: has a {name} that cannot be read ({error}); copy or download it"
                " again (a pointer of Git LFS: `git lfs pull`)"
            ) from error


async def try_environment(
    run: VCPORun, found: TextIO | None = None, *, call_s: float = _CALL_S, make_s: float = _MAKE_S
) -> tuple[str, ...]:
    """Make a run's environment, and make each kind of call that a worker makes; return warnings.

    found: gets a line on the rows of a data set.
    call_s: longest wait for one call, and about the longest for all evaluation prompts; after it,
        and where a service does not answer, a NotTriedError names the field.
    make_s: longest wait for the environment's class.
    """
    settings = run.spec.environment
    told = BufferingHandler(_MOST_WARNINGS)
    logging.getLogger(make_environment.__module__.rpartition(".")[0]).addHandler(told)
    gauges = RolloutGauges(RolloutMetrics(run=run.metadata.name, group="trial"))
    maker = EnvironmentThreads(1, gauges=gauges, timeout_s=make_s)
    try:
        environment = await maker.call(partial(make_task, settings, run.spec.seed))
    except EnvironmentFailedError as error:
        where = f" ({error.failure.location})" if error.failure.location else ""
        raise StartError(
            f"environment.name: {settings.name!r} was not made within {make_s:g} s{where}; load"
            " less before the first prompt"
        ) from error
    except ValueError as error:
        raise (NotTriedError if _is_unanswered(error) else StartError)(str(error)) from error
    calls = _Calls(run, environment, call_s, gauges)
    if found is not None and (questions := getattr(calls.own, "_questions", None)) is not None:
        num_prompts = run.spec.steps * run.spec.batch.prompts_per_step
        found.write(f"{questions.sizes_in_words(num_prompts)}\n")
    prompt = await calls.prompt(Split.TRAIN, 0)
    await calls.prompt(Split.TRAIN, 1)
    await calls.prompt(Split.EVALUATION, 0)
    again = await calls.prompt(Split.TRAIN, 0)
    if (again.text, again.messages) != (prompt.text, prompt.messages):
        calls.refuse(
            f"prompt('train', 0) returned {prompt.text!r:.100} and then {again.text!r:.100}; it"
            " must return the same prompt for the same seed, split and index"
        )
    await calls.judge(prompt)
    warnings = [line.getMessage() for line in told.buffer]
    return (*warnings, *await calls.repeated(run.spec.evaluation.prompts))


class _Calls:
    """The calls of a trial; an error names the environment's class and the call."""

    def __init__(
        self, run: VCPORun, environment: Environment, call_s: float, gauges: RolloutGauges
    ) -> None:
        settings, self.environment = run.spec.environment, environment
        own = environment.environment if isinstance(environment, JudgedEnvironment) else environment
        self.own, self.owner, self.field = own, f"{type(own).__name__}.", "environment.name"
        self.fix = "the class" if ":" in settings.name else "environment.parameters"
        self.most_reward = settings.max_absolute_reward
        self.allowed_s = run.spec.environment_timeout_s
        self.waited_s = min(call_s, self.allowed_s)
        self.threads = EnvironmentThreads(1, gauges=gauges, timeout_s=self.waited_s)

    async def prompt(self, split: Split, index: int) -> Prompt:
        make = self.environment.prompt
        return await self._call(
            f"prompt('{split}', {index})",
            FailureCause.PROMPT,
            lambda: require_type(make(split, index), Prompt, make),
        )

    async def repeated(self, num_prompts: int) -> list[str]:
        """Return a warning if many of an evaluation's prompts, as far as tried, repeat others."""
        loop, texts = asyncio.get_running_loop(), list[str]()
        end_s = loop.time() + self.waited_s
        while len(texts) < num_prompts and loop.time() < end_s:
            texts.append((await self.prompt(Split.EVALUATION, len(texts))).text)
        found = len(set(texts))
        told = f"{found} distinct among {len(texts)} prompts, and an evaluation counts each once"
        warning = f"evaluation.prompts: {told}; set {found}, or give the environment more"
        return [] if found >= _FEW_REPEATED * len(texts) else [warning]

    async def judge(self, prompt: Prompt) -> None:
        """Have a response judged; in a conversation, after one turn."""
        name, method = "reward(prompt, response)", self.environment.reward
        if isinstance(self.environment, JudgedEnvironment):
            name, self.owner = "a function", ""
            self.field, self.fix = "environment.rewards", "the function"
        judge: Callable[[], object] = partial(method, prompt, RESPONSE)
        if isinstance(self.environment, MultiTurnEnvironment):
            conversation = await self._first_turn(self.environment, prompt)
            name, judge = "reward()", conversation.reward
        judgement = await self._call(
            name, FailureCause.REWARD, lambda: check_judgement(judge(), judge)
        )
        if abs(judgement.reward) > self.most_reward:
            self.refuse(
                f"{name} returned {judgement.reward:g}, and a response with more than"
                f" {self.most_reward:g} counts as failed (environment.maxAbsoluteReward)"
            )

    async def _first_turn(self, environment: MultiTurnEnvironment, prompt: Prompt) -> Conversation:
        conversation: Conversation = await self._call(
            "converse(prompt)", FailureCause.PROMPT, partial(environment.converse, prompt)
        )
        for method in ("next_turn", "reward"):
            if not callable(getattr(conversation, method, None)):
                self.refuse(
                    f"converse(prompt) returned {conversation!r:.100}; it must return an object"
                    f" with the methods next_turn and reward, and this one has no {method}"
                )
        take = conversation.next_turn

        def reply() -> None:
            if (text := take(RESPONSE)) is not None:
                require_type(text, str, take)

        await self._call("next_turn(response)", FailureCause.REPLY, reply)
        return conversation

    async def _call(
        self, name: str, cause: FailureCause, function: Callable[[], _Result]
    ) -> _Result:
        def guarded() -> _Result:
            with environment_errors(cause):
                return function()

        try:
            return await self.threads.call(guarded)
        except EnvironmentFailedError as error:
            failure = error.failure
            where = f" ({failure.location})" if failure.location else ""
            if failure.cause is FailureCause.TIMEOUT:
                self._refuse_slow(name, where)
            what = failure.message + where  # what the method must return, and what it returned
            if failure.exception_type:
                what = f"{self.owner}{name} raised {failure.exception_type}: {what}"
            if _is_unanswered(error):
                raise NotTriedError(f"{self.field}: {what}") from error
            self._blame(what)

    def refuse(self, what: str) -> NoReturn:
        self._blame(f"{self.owner}{what}")

    def _blame(self, what: str) -> NoReturn:
        raise StartError(f"{self.field}: {what}; correct {self.fix}")

    def _refuse_slow(self, name: str, where: str) -> NoReturn:
        allowed = f"{self.allowed_s:g} s (half of lease.timeoutSeconds)"
        if self.allowed_s <= self.waited_s:
            self.refuse(f"{name} had not returned after {allowed}{where}")
        raise NotTriedError(
            f"{self.field}: {self.owner}{name} had not returned after {self.waited_s:g} s"
            f"{where}; a worker waits for {allowed}"
        )


def _is_unanswered(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if isinstance(error, OSError) and error.errno in _UNREACHABLE:
            return True
        error = error.__cause__ or error.__context__
    return False


async def try_run(
    run: VCPORun, num_prompts: int, messages: TextIO, *, shows_tokens: bool = False
) -> None:
    """Sample and judge responses to the first prompts of a run; write each group at once."""
    from vcpo_rollout.app import load_sampler, response_generator
    from vcpo_rollout.engines.engine import EngineError

    with start_errors():
        name = await asyncio.to_thread(local_model, run.spec.model.name)
        model = run.spec.model.model_copy(update={"name": name, "lora": None})
        spec = run.spec.model_copy(update={"model": model})
        run = run.model_copy(update={"spec": spec})
        group = spec.rollouts[0]
        environment = make_task(spec.environment, spec.seed)
        sampler = await asyncio.to_thread(load_sampler, run, group, seed=spec.seed)
        await _swap_in_own_weights(spec, sampler)
    gauges = RolloutGauges(RolloutMetrics(run=run.metadata.name, group="trial"))
    generator = response_generator(spec, group, sampler, environment, gauges)
    found: list[Sample] = []

    def write(message: TrialMessage) -> None:
        messages.write(message_line(message))
        messages.flush()

    async def try_prompt(index: int) -> TrialMessage:
        try:
            responses = await generator.generate(_lease(spec, index), asyncio.Event())
        except (EngineError, EnvironmentFailedError) as error:
            return FailedPrompt(prompt_index=index, why=str(error))
        group = _samples(index, responses, sampler.codec, shows_tokens=shows_tokens)
        found.extend(group)
        return AnsweredPrompt(samples=group)

    started_s = time.monotonic()
    async with asyncio.TaskGroup() as prompts:
        tasks = [prompts.create_task(try_prompt(index)) for index in range(num_prompts)]
        for tried in tasks:
            write(await tried)
    reader = getattr(environment, "marked_answer", None)
    if reader and found and not any(one.reward > 0.0 or reader(one.response) for one in found):
        sys.stderr.write(_UNMARKED)
    write(TrialEnd(seconds=time.monotonic() - started_s))
    await sampler.engine.close()


async def _swap_in_own_weights(spec: VCPORunSpec, sampler: Sampler) -> None:
    import safetensors.torch

    from vcpo_rollout.engines.engine import PolicyWeights
    from vcpo_rollout.engines.loading import load_state

    model = spec.model

    def read() -> PolicyWeights:
        state = load_state(
            model.name, revision=model.revision, trust_remote_code=model.trust_remote_code
        )
        weights = PolicyWeights(0, safetensors.torch.save(state))
        return weights if sampler.postprocess is None else sampler.postprocess(weights)

    await sampler.engine.swap_weights(await asyncio.to_thread(read))


def _lease(spec: VCPORunSpec, prompt_index: int) -> work_pb2.Lease:
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
            question=each.question,
            answer=each.answer,
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
