"""Checks of whole steps: their speed, TRL beside them, attention, and the longest trajectory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.gpu.random_models import (
    PAD_TOKEN_ID,
    QWEN_1_5B,
    QWEN_7B,
    TINY,
    ModelSize,
    make_groups,
    make_model,
    make_spec,
)
from benchmarks.gpu.setting import Figures, Setting
from benchmarks.harness.group_tokens import Groups, tokens_of
from benchmarks.harness.random_llama import shortened
from vcpo.api.workloads import Lora
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.update.policy_update import PolicyUpdate

_WAYS: dict[str, dict[str, Any]] = {
    "group_mean": {"method": "sequenceTis"},
    "opob_one_pass": {"learner": {"gradientMode": "onePass"}},
    "opob_two_passes": {"learner": {"gradientMode": "twoPass"}},
    "opob_logit_energy": {"algorithm": {"gradientNorms": "logitEnergy"}},
}


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
        return None if result.skipped is None else f"{result.skipped}: {result.skip_detail}"


class PlainTrainer:
    """A training loop on transformers: full logits, checkpointed layers, AdamW."""

    def __init__(self, model: PreTrainedModel, setting: Setting) -> None:
        self._model, self._setting = model, setting
        # The library checkpoints in training mode only; the models here have no dropout.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def take(self, groups: Groups) -> str | None:
        """One trajectory at a time, as full logits are large."""
        batch = tokens_of(groups)
        for row, reward in enumerate(batch.rewards - batch.rewards.mean()):
            loss = -float(reward) * self._logprobs(batch.input_ids[row : row + 1]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return None

    def _logprobs(self, ids: Tensor) -> Tensor:
        ids = ids.to(self._setting.device)
        with torch.autocast(
            self._setting.device.type, torch.bfloat16, enabled=self._setting.is_gpu
        ):
            logits = self._model(input_ids=ids, use_cache=False).logits[:, :-1]
        return logits.float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])


def step_speed(setting: Setting) -> Figures:
    """A step of a 1.5 B model at 16k tokens in every mode, beside a plain one."""
    size = setting.choose(QWEN_1_5B, TINY)
    group_size, tokens = setting.choose((8, 2048), (4, 32))
    flops = setting.matmul_flops()
    yield {"tokens": group_size * tokens, "matmul_tflops": round(flops / 1e12, 1)}
    plain = None
    for name, make in {"plain": _make_plain, **{way: _maker(way) for way in _WAYS}}.items():
        line = _speed(setting, size, make, group_size=group_size, tokens=tokens)
        rate = line.get("tokens_per_s")
        if rate is not None:
            plain = plain or rate
            # Six operations a parameter and token; what checkpointing repeats does not count.
            line["share_of_matmul_rate"] = round(6 * line["parameters"] * rate / flops, 3)
            line["seconds_over_plain"] = round(plain / rate, 3)
        yield {name: line}


def step_beside_trl(setting: Setting) -> Figures:
    """The same batch through TRL's GRPO step with its own output head."""
    size = setting.choose(QWEN_1_5B, TINY)
    group_size, tokens = setting.choose((8, 2048), (4, 32))
    try:
        from benchmarks.harness.trl_step import TrlStep
    except ImportError as error:
        yield {"skipped": f"needs TRL ({error})"}
        return
    own = _speed(setting, size, _maker("opob_one_pass"), group_size=group_size, tokens=tokens)
    yield {"opob_one_pass": own}

    def make(model: PreTrainedModel, at: Setting) -> Trainer:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return TrlStep(
            model,
            trajectories=group_size,
            micro_batch=group_size,
            response_tokens=tokens - tokens // 8,
            learning_rate=1e-6,
            uses_bfloat16=at.is_gpu,
        )

    trl = _speed(setting, size, make, group_size=group_size, tokens=tokens)
    yield {"trl": trl}
    if "tokens_per_s" in own and "tokens_per_s" in trl:
        yield {"ratio_vs_trl": round(own["tokens_per_s"] / trl["tokens_per_s"], 3)}


def attention(setting: Setting) -> Figures:
    """A step without norms on trajectories of two lengths, padded and packed without a mask."""
    size = setting.choose(QWEN_1_5B, TINY)
    for tokens in setting.choose((2048, 8192, 32_768), (16, 32)):
        line = {}
        for name, layout, way in (
            ("padded_sdpa", "padded", "sdpa"),
            ("varlen", "packed", "varlen"),
        ):
            settings = {
                "method": "sequenceTis",
                "learner": {"attention": way},
                "batch": {"rowLayout": layout},
            }
            line[name] = _speed(
                setting,
                size,
                lambda model, at, given=settings, long=tokens: OwnTrainer(
                    model, at, group_size=4, tokens=long, **given
                ),
                group_size=4,
                tokens=tokens,
                is_uneven=True,
            )
        yield {f"tokens_{tokens}": line}


def longest_trajectory(setting: Setting) -> Figures:
    """Double the length of two trajectories until a step does not fit."""
    for name, size, rank in (("full_1_5b", QWEN_1_5B, None), ("lora_7b", QWEN_7B, 32)):
        chosen = setting.choose(size, TINY)
        yield {name: _longest(setting, chosen, rank, most=setting.choose(262_144, 32))}


def _longest(setting: Setting, size: ModelSize, rank: int | None, *, most: int) -> dict[str, Any]:
    """The longest trajectory that fits, of powers of two up to `most`."""
    tokens, found = setting.choose(4096, 16), None
    while tokens <= most:

        def make(model: PreTrainedModel, at: Setting, long: int = tokens) -> Trainer:
            if rank is not None:
                add_adapters(model, Lora(rank=rank, alpha=2.0 * rank))
            return OwnTrainer(model, at, group_size=2, tokens=long)

        line = _speed(setting, size, make, group_size=2, tokens=tokens, repeats=1)
        if "error" in line:
            return {"tokens": found, "does_not_fit": tokens, "error": line["error"]}
        found, tokens = tokens, 2 * tokens
    return {"tokens": found, "limit_of_this_check": most}


def _make_plain(model: PreTrainedModel, setting: Setting) -> Trainer:
    return PlainTrainer(model, setting)


def _maker(way: str) -> Callable[[PreTrainedModel, Setting], Trainer]:
    def make(model: PreTrainedModel, setting: Setting) -> Trainer:
        learner = {"activationCheckpointing": "layers", **_WAYS[way].get("learner", {})}
        group_size, tokens = setting.choose((8, 2048), (4, 32))
        settings = {**_WAYS[way], "learner": learner}
        return OwnTrainer(model, setting, group_size=group_size, tokens=tokens, **settings)

    return make


def _speed(
    setting: Setting,
    size: ModelSize,
    make: Callable[[PreTrainedModel, Setting], Trainer],
    *,
    group_size: int,
    tokens: int,
    is_uneven: bool = False,
    repeats: int = 3,
) -> dict[str, Any]:
    """Tokens per second and memory of a trainer's steps; `error` where one does not fit.

    is_uneven: whether every second trajectory has a quarter of the tokens.
    """
    setting.forget()
    try:
        model = make_model(size, setting.device)
        groups: Groups = make_groups(model, setting, group_size=group_size, tokens=tokens)
        if is_uneven:
            groups = _uneven(groups, tokens // 4)
        trainer = make(model, setting)
        skipped = trainer.take(groups)
        setting.forget()
        seconds = setting.seconds(lambda: trainer.take(groups), repeats=repeats)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    count = sum(len(one.prompt_token_ids) + len(one.response_token_ids) for one in groups[0])
    line = {
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens_per_s": round(count / seconds, 1),
        "seconds": round(seconds, 4),
        "peak_gib": setting.peak_gib(),
    }
    return line if skipped is None else line | {"skipped_step": skipped}


def _uneven(groups: Groups, short: int) -> Groups:
    return [
        [shortened(one, short) if at % 2 else one for at, one in enumerate(group)]
        for group in groups
    ]
