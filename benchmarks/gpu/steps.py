"""Parts of whole steps: their speed, TRL beside them, their memory, and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
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
from benchmarks.harness.group_tokens import Groups, tokens_of
from benchmarks.harness.random_llama import shorten
from vcpo_learner.device import free_bytes
from vcpo_learner.schedule import token_budget as plan
from vcpo_learner.update.policy_update import PolicyUpdate

_WAYS: dict[str, dict[str, Any]] = {
    "group_mean": {"method": "sequenceTis"},
    "opob_one_pass": {"learner": {"gradientMode": "onePass"}},
    "opob_two_passes": {"learner": {"gradientMode": "twoPass"}},
}


_GROUP_SIZE: Final = 8
"""Trajectories of a batch, which is one group."""
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
        result = self._update.step(groups, policy_version=0)
        self.attention_calls = result.attention_calls
        return None if result.skipped is None else f"{result.skipped}: {result.skip_detail}"


class PlainTrainer:
    """A training loop on transformers: full logits, checkpointed layers, AdamW."""

    def __init__(self, model: PreTrainedModel, setting: Setting) -> None:
        self._model, self._setting = model, setting
        # The library checkpoints in training mode only; the models here have no dropout.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=setting.is_gpu)

    def take(self, groups: Groups) -> str | None:
        """As many trajectories at a time as full logits allow."""
        batch = tokens_of(groups)
        num_rows, tokens = batch.input_ids.shape
        advantages = (batch.rewards - batch.rewards.mean()).to(self._setting.device)
        rows = max(1, _MOST_LOGITS // (tokens * self._model.config.vocab_size))
        for first in range(0, num_rows, rows):
            part = slice(first, first + rows)
            means = self._logprobs(batch.input_ids[part]).mean(dim=(1, 2))
            (-(advantages[part] * means).sum() / num_rows).backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return None

    def _logprobs(self, ids: Tensor) -> Tensor:
        ids = ids.to(self._setting.device)
        kind, is_gpu = self._setting.device.type, self._setting.is_gpu
        with torch.autocast(kind, torch.bfloat16, enabled=is_gpu):
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        return logits.float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])


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
            line = _speed(setting, size, ways[way], tokens=tokens)
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


def attention(setting: Setting) -> Figures:
    """A step without norms on trajectories of two lengths, padded and packed without a mask."""
    for tokens in setting.choose((2048, 8192), (32,)):
        for name, layout in (("sdpa", "padded"), ("varlen", "packed")):
            learner, batch = {"attention": name}, {"rowLayout": layout}
            settings = {"method": "sequenceTis", "learner": learner, "batch": batch}
            line = _speed(
                setting,
                setting.choose(QWEN_1_5B, TINY),
                lambda model, at, long, given=settings: OwnTrainer(
                    model, at, group_size=_GROUP_SIZE, tokens=long, **given
                ),
                tokens=tokens,
                is_uneven=True,
            )
            yield {f"{layout}_{tokens}": line}


def _make_plain(model: PreTrainedModel, setting: Setting, _tokens: int) -> Trainer:
    return PlainTrainer(model, setting)


def _maker(way: str) -> Callable[[PreTrainedModel, Setting, int], Trainer]:
    learner = {"activationCheckpointing": "layers", **_WAYS[way].get("learner", {})}
    settings = {**_WAYS[way], "learner": learner}
    return lambda model, setting, tokens: OwnTrainer(
        model, setting, group_size=_GROUP_SIZE, tokens=tokens, **settings
    )


def _speed(
    setting: Setting,
    size: ModelSize,
    make: Callable[[PreTrainedModel, Setting, int], Trainer],
    *,
    tokens: int,
    is_uneven: bool = False,
    repeats: int = 3,
) -> dict[str, Any]:
    """Tokens per second and memory of a trainer's steps; `error` where one does not fit.

    tokens: of each of eight trajectories.
    is_uneven: whether every second trajectory has a quarter of the tokens.
    """
    setting.forget()
    try:
        model = make_model(size, setting.device)
        groups: Groups = make_groups(model, setting, group_size=_GROUP_SIZE, tokens=tokens)
        if is_uneven:
            groups = _uneven(groups, tokens // 4)
        trainer = make(model, setting, tokens)
        skipped = trainer.take(groups)
        setting.forget()
        seconds = setting.seconds(lambda: trainer.take(groups), repeats=repeats)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    count = sum(len(one.prompt_token_ids) + len(one.response_token_ids) for one in groups[0])
    line = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens": count,
        "tokens_per_s": round(count / seconds, 1),
        "seconds": round(seconds, 4),
        "peak_gib": setting.peak_gib(),
    }
    if isinstance(trainer, OwnTrainer) and trainer.attention_calls:
        line["attention"] = dict(trainer.attention_calls)
    return line if skipped is None else line | {"skipped_step": skipped}


def _uneven(groups: Groups, short: int) -> Groups:
    return [
        [shorten(one, short) if at % 2 else one for at, one in enumerate(group)] for group in groups
    ]
