"""Parts of whole steps: their speed, alone and beside TRL's, on real lengths, and their memory."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Final, Protocol

import torch
from transformers import PreTrainedModel

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
from benchmarks.gpu.stages import profile, stages_ms
from benchmarks.harness.measures import in_digits
from benchmarks.harness.plain_step import Groups, PlainStep
from benchmarks.harness.random_llama import log_normal_lengths, shorten
from vcpo_learner.device import free_bytes
from vcpo_learner.schedule import token_budget as plan
from vcpo_learner.update.policy_update import PolicyUpdate

_WAYS: dict[str, dict[str, Any]] = {
    "group_mean": {"method": "sequenceTis"},
    "opob_one_pass": {"learner": {"gradientMode": "onePass"}},
    "opob_two_passes": {"learner": {"gradientMode": "twoPass"}},
}


_GROUP_SIZE: Final = 8
_MOST_LOGITS: Final = 1 << 30
"""Logits that the plain loop has at once; it holds each about four times, in 14 bytes."""


class Trainer(Protocol):
    """Something that takes steps."""

    def take(self, groups: Groups) -> object:
        """Take a step; return why it was skipped, if it was."""


class OwnTrainer:
    """The learner's update."""

    def __init__(self, model: PreTrainedModel, setting: Setting, **settings: Any) -> None:
        spec = make_spec(setting, **settings)
        self._update = PolicyUpdate(model, spec, PAD_TOKEN_ID)

    def take(self, groups: Groups) -> str | None:
        """As `Trainer`."""
        self.result = self._update.step(groups, policy_version=0)
        skipped = self.result.skipped
        return None if skipped is None else f"{skipped}: {self.result.skip_detail}"


def step_speed(setting: Setting) -> Figures:
    """A step in every mode beside a plain one: 0.5 B and short, then 1.5 B and long trajectories.

    With short ones a step is the host's, with long ones the device's.
    """
    flops = setting.matmul_flops()
    yield {"matmul_tflops": round(flops / 1e12, 1)}
    sizes = {"0.5b": (QWEN_0_5B, 512), "1.5b": (QWEN_1_5B, 2048)}
    ways = {"plain": _make_plain, **{way: _maker(way) for way in _WAYS}}
    for name in ("0.5b",) if setting.is_quick or setting.is_tiny else sizes:
        size, tokens = setting.choose(sizes[name], (TINY, 32))
        plain = None
        for way in ("plain", "group_mean", "opob_one_pass") if setting.is_quick else ways:
            is_profiled = way == "opob_one_pass"
            line = _speed(setting, size, ways[way], tokens=tokens, is_profiled=is_profiled)
            rate = line.get("tokens_per_s")
            if rate is not None:
                plain = plain or rate
                # Six operations a parameter and token; what checkpointing repeats does not count.
                line["share_of_matmul"] = round(6 * line["parameters"] * rate / flops, 3)
                line["seconds_over_plain"] = round(plain / rate, 3)
            yield {f"{way}_{name}": line}


def step_beside_trl(setting: Setting) -> Figures:
    """The same batch through TRL's GRPO step with its own output head."""
    try:
        from benchmarks.harness.trl_step import TrlStep
    except ImportError as error:
        yield {"skipped": f"needs TRL (pip install --no-deps trl): {error}"}
        return
    size, tokens = setting.choose((QWEN_1_5B, 2048), (TINY, 32))

    def make(model: PreTrainedModel, at: Setting, num_tokens: int) -> Trainer:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return TrlStep(
            model,
            trajectories=_GROUP_SIZE,
            micro_batch=_GROUP_SIZE,
            response_tokens=num_tokens - num_tokens // 8,
            learning_rate=1e-6,
            uses_bfloat16=at.is_gpu,
        )

    own = _speed(setting, size, _maker("opob_one_pass"), tokens=tokens)
    yield {"opob_one_pass": own}
    trl = _speed(setting, size, make, tokens=tokens)
    yield {"trl": trl}
    if "tokens_per_s" in own and "tokens_per_s" in trl:
        yield {"ratio_vs_trl": round(own["tokens_per_s"] / trl["tokens_per_s"], 3)}


def memory_plan(setting: Setting) -> Figures:
    """The peak of a step of 16k tokens beside what the plan of a GPU's memory says of it."""
    if not setting.is_gpu:
        yield {"skipped": "needs a GPU: a CPU has no plan"}
        return
    model = make_model(QWEN_1_5B, setting.device)
    size = plan.ModelSize.of(model)
    assert size is not None
    use = plan.MemoryUse(activation_bytes=2, checkpoints_layers=True, num_shards=1)
    tokens = 2048
    weights = sum(each.nbytes for each in model.parameters())
    free = free_bytes(setting.device)
    assert free is not None
    of_step = plan.state_bytes(size, use)
    of_step += _GROUP_SIZE * tokens * plan.token_bytes(size, use)
    yield {
        "free_gib": round(free / 2**30, 2),
        "tokens_that_fit": plan.memory_budget(free, size, use).tokens,
        "planned_gib": round((weights + of_step) / 2**30, 2),
    }
    del model
    line = _speed(setting, QWEN_1_5B, _maker("opob_one_pass"), tokens=tokens, repeats=1)
    yield {"peak_gib": line.get("peak_gib", line.get("error"))}


def real_lengths(setting: Setting) -> Figures:
    """Steps of 16 groups of 8 responses of log-normal lengths, with the learner's own defaults."""
    num_groups, tokens = setting.choose((16, 1024), (2, 32))
    for layout, attention in (("padded", "sdpa"), ("packed", "varlen")):
        for way, method in (("opob", "vcpo"), ("group_mean", "sequenceTis")):
            learner, batch = {"attention": attention}, {"rowLayout": layout}
            line = _speed(
                setting,
                setting.choose(QWEN_1_5B, TINY),
                _own(method=method, num_groups=num_groups, learner=learner, batch=batch),
                tokens=tokens,
                num_groups=num_groups,
                is_profiled=way == "opob",
            )
            yield {f"{way}_{layout}": line}


def _make_plain(model: PreTrainedModel, setting: Setting, tokens: int) -> Trainer:
    # The library checkpoints in training mode only; the models here have no dropout.
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    rows = max(1, _MOST_LOGITS // (tokens * model.config.vocab_size))
    return PlainStep(model, rows, uses_bfloat16=setting.is_gpu)


def _maker(way: str) -> Callable[[PreTrainedModel, Setting, int], Trainer]:
    learner = {"activationCheckpointing": "layers", **_WAYS[way].get("learner", {})}
    return _own(**{**_WAYS[way], "learner": learner})


def _own(**settings: Any) -> Callable[[PreTrainedModel, Setting, int], Trainer]:
    return lambda model, setting, tokens: OwnTrainer(
        model, setting, group_size=_GROUP_SIZE, tokens=tokens, **settings
    )


def _speed(
    setting: Setting,
    size: ModelSize,
    make: Callable[[PreTrainedModel, Setting, int], Trainer],
    *,
    tokens: int,
    num_groups: int = 1,
    repeats: int = 3,
    is_profiled: bool = False,
) -> dict[str, Any]:
    """Tokens per second and memory of a trainer's steps; `error` where one does not fit.

    tokens: of the longest trajectory. num_groups: if several, responses have real lengths.
    """
    setting.forget()
    try:
        model = make_model(size, setting.device)
        shape = {"num_groups": num_groups, "group_size": _GROUP_SIZE, "tokens": tokens}
        groups: Groups = make_groups(model, setting, **shape)
        groups = groups if num_groups == 1 else _with_real_lengths(groups)
        trainer = make(model, setting, tokens)
        skipped = [trainer.take(groups)]
        setting.forget()
        seconds = setting.seconds(lambda: skipped.append(trainer.take(groups)), repeats=repeats)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    every = chain.from_iterable(groups)
    count = sum(len(one.prompt_token_ids) + len(one.response_token_ids) for one in every)
    line: dict[str, Any] = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens": count,
        "tokens_per_s": round(count / seconds, 1),
        "seconds": round(seconds, 4),
        "peak_gib": setting.peak_gib(),
        "skipped_steps": [why for why in skipped if why is not None],
    }
    if isinstance(trainer, OwnTrainer):
        line["attention"] = dict(trainer.result.attention_calls)
        line["times_s"] = in_digits(trainer.result.times.by_stage())
        line["stages_ms"] = stages_ms(setting, lambda: trainer.take(groups))
    if is_profiled:
        line["profile"] = profile(setting, lambda: trainer.take(groups), seconds)
    return line


def _with_real_lengths(groups: Groups) -> Groups:
    most = len(groups[0][0].response_token_ids)
    drawn = log_normal_lengths(sum(map(len, groups)), median=max(1, most // 3), most=most)
    lengths = iter(drawn)
    return [[shorten(one, next(lengths)) for one in group] for group in groups]
