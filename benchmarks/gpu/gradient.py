"""Part of correctness: each way of a step in bfloat16 against float64 on the same device.

A forward pass in bfloat16 rounds the log weight of each response, by a tenth of a nat over hundreds
of tokens, and the weight is a factor of its coefficients and of its norm. That is `log_weight_abs`,
of which plain autocast has as much. The arithmetic is judged apart from it: a gradient against that
of float64 with the same coefficients, and a norm against the exact one with the same weight.
"""

import math
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks.gpu.random_models import PAD_TOKEN_ID, ModelSize, make_model, make_spec
from benchmarks.gpu.setting import Figures, Setting, relative_error
from benchmarks.harness.made import trajectory
from vcpo.algo.methods import LossConfig
from vcpo.wire.trajectory import Trajectory
from vcpo_learner.estimator.loss import token_coefficients, trajectory_advantages
from vcpo_learner.estimator.record import BatchRecord
from vcpo_learner.forward.attention import take_calls
from vcpo_learner.forward.forward_pass import token_logprobs
from vcpo_learner.forward.token_batch import token_batch
from vcpo_learner.update.batch_decision import split_groups
from vcpo_learner.update.gradient import GradientAccumulation

_WAYS: Final[Mapping[str, dict[str, Any]]] = {
    "float32": {"learner": {"precision": "float32"}},
    "one_pass": {},
    "packed": {"batch": {"rowLayout": "packed"}},
    "two_pass": {"learner": {"gradientMode": "twoPass"}},
    "checkpointed": {"learner": {"activationCheckpointing": "layers"}},
}
"""Settings of a step; in bfloat16 where they say nothing. `--quick` takes the first three."""
_PROMPT_TOKENS: Final = 16
_WRONG: Final = 3.0
"""Times the error of plain autocast at which a gradient is wrong; the aim is 1.5."""
Groups = list[list[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Result:
    """What the stages of a step give before the optimizer."""

    norms: list[float]
    log_weights: list[float]
    advantages: list[float]
    gradient: Tensor
    record: BatchRecord
    loss: LossConfig


def gradient(setting: Setting) -> Figures:
    """Compare two groups of four trajectories of several lengths; tied and untied heads."""
    wrong = []
    for is_tied in (True,) if setting.is_quick else (True, False):
        size = _size(setting, is_tied=is_tied)
        groups = _groups(setting, make_model(size, setting.device))
        exact = _run(setting, make_model(size, setting.device).double(), groups, _WAYS["float32"])
        found, logprobs = _plain_gradient(setting, size, groups, exact)
        plain = relative_error(found, exact.gradient)
        head = "tied" if is_tied else "untied"
        gap = _largest_gap(exact.record.sums(logprobs - exact.record.learner_logprobs).tolist())
        yield {f"plain_autocast_{head}": {"gradient_rel": plain, "log_weight_abs": gap}}
        for name in list(_WAYS)[: 3 if setting.is_quick else None]:
            line = _compared(setting, size, groups, exact, _WAYS[name])
            line["gradient_over_plain"] = line["gradient_rel"] / plain
            if line["gradient_over_plain"] > _WRONG or "one_by_one" in line["attention"]:
                wrong += [f"{name}_{head}"] if setting.is_gpu else []
            yield {f"{name}_{head}": line}
    if wrong:
        raise ValueError(f"these are wrong, or took the slow way of attention: {', '.join(wrong)}")


def _size(setting: Setting, *, is_tied: bool) -> ModelSize:
    hidden, layers, vocabulary = setting.choose((512, 6, 32_000), (64, 2, 500))
    heads = hidden // 64 if hidden > 64 else 4
    return ModelSize(hidden, layers, 3 * hidden, heads, 2, vocabulary, is_tied)


def _groups(setting: Setting, model: nn.Module) -> Groups:
    """Trajectories whose sampler differs from the model by a little noise."""
    drawn = random.Random(1)  # noqa: S311 - no secret
    shortest, longest = setting.choose((300, 900), (10, 30))
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(3, vocabulary) for _ in range(count))

    def one(prompt: tuple[int, ...], number: int) -> Trajectory:
        count = drawn.randrange(shortest, longest)
        noughts = (0.0,) * count
        return trajectory(number, prompt, tokens(count), noughts, reward=float(number % 2))

    def sampled(rows: list[Trajectory]) -> list[Trajectory]:
        with torch.no_grad():
            batch = token_batch(rows, PAD_TOKEN_ID, setting.device)
            logprobs = token_logprobs(model, batch, temperature=1.0).tolist()
        return [
            replace(
                each,
                rollout_logprobs=tuple(
                    min(value + drawn.gauss(0.0, 0.02), -1e-6)
                    for value in row[_PROMPT_TOKENS:][: len(each.response_token_ids)]
                ),
            )
            for each, row in zip(rows, logprobs, strict=True)
        ]

    prompts = [tokens(_PROMPT_TOKENS) for _ in range(2)]
    return [sampled([one(prompt, number) for number in range(4)]) for prompt in prompts]


def _run(
    setting: Setting, model: nn.Module, groups: Groups, settings: Mapping[str, dict[str, Any]]
) -> _Result:
    """Score a batch and form its gradient, as a step does."""
    spec = make_spec(
        setting,
        group_size=4,
        num_groups=2,
        tokens=2048,
        method="vcpo2",
        learner={"precision": "bfloat16", **settings.get("learner", {})},
        batch=settings.get("batch"),
    )
    accumulation = GradientAccumulation(model, spec, PAD_TOKEN_ID)
    take_calls()
    scored = accumulation.score(groups, 0)
    summary = scored.summary
    grouped = (
        split_groups(values, summary.group_sizes)
        for values in (summary.rewards, summary.squared_norms, summary.log_weights)
    )
    advantages = trajectory_advantages(*grouped, spec.algorithm.loss_config, 1.0)
    accumulation.accumulate(scored, advantages)
    return _Result(
        norms=summary.squared_norms,
        log_weights=summary.log_weights,
        advantages=list(advantages),
        gradient=_gradient_of(model),
        record=scored.record,
        loss=spec.algorithm.loss_config,
    )


def _compared(
    setting: Setting,
    size: ModelSize,
    groups: Groups,
    exact: _Result,
    settings: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    model = make_model(size, setting.device)
    _run(setting, model, groups, settings)  # kernels are chosen, and modules probed
    model.zero_grad()
    with _waits(setting) as waits:
        found = _run(setting, model, groups, settings)
    gaps = [one - other for one, other in zip(found.log_weights, exact.log_weights, strict=True)]
    wanted = [norm * math.exp(2.0 * gap) for norm, gap in zip(exact.norms, gaps, strict=True)]
    expected, _ = _plain_gradient(setting, size, groups, found, in_float64=True)
    norms = zip(found.norms, wanted, strict=True)
    advantages = zip(found.advantages, exact.advantages, strict=True)
    return {
        "gradient_rel": relative_error(found.gradient, expected),
        "norm_rel": max(abs(one / other - 1.0) for one, other in norms),
        "log_weight_abs": _largest_gap(gaps),
        "advantage_abs": _largest_gap([one - other for one, other in advantages]),
        "attention": take_calls(),
        "waits": len(waits) if setting.is_gpu else None,
    }


def _plain_gradient(
    setting: Setting, size: ModelSize, groups: Groups, step: _Result, *, in_float64: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradient by autograd with the coefficients of a step, and the log-probabilities.

    Under plain autocast, or in float64.
    """
    model = make_model(size, setting.device)
    model = model.double() if in_float64 else model
    values = token_coefficients(step.record, step.advantages, step.loss).values
    parts = torch.split(
        values, [sum(len(each.response_token_ids) for each in rows) for rows in groups]
    )
    sampled = []
    for rows, coefficients in zip(groups, parts, strict=True):
        batch = token_batch(rows, PAD_TOKEN_ID, setting.device)
        with torch.autocast(setting.device.type, torch.bfloat16, enabled=not in_float64):
            logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]
        targets = batch.input_ids[:, 1:, None]
        exact = logits if in_float64 else logits.float()
        logprobs = exact.log_softmax(dim=-1).gather(2, targets)[..., 0]
        whole = torch.cat([logprobs.new_zeros(len(logprobs), 1), logprobs], dim=1)
        torch.autograd.backward((whole * batch.place_trained(coefficients.to(whole))).sum())
        sampled.append(batch.select_trained(whole.detach()))
    return _gradient_of(model), torch.cat(sampled).double()


def _gradient_of(model: nn.Module) -> Tensor:
    grads = (each.grad for each in model.parameters())
    return torch.cat([each.double().flatten() for each in grads if each is not None])


def _largest_gap(gaps: list[float]) -> float:
    return max(map(abs, gaps))


@contextmanager
def _waits(setting: Setting) -> Iterator[list[Any]]:
    """Collect a warning for each time that the host waits for a GPU."""
    if not setting.is_gpu:
        yield []
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
