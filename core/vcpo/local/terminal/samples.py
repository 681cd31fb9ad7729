"""Responses as text on a terminal, and what a trial of a run says of them all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from vcpo.local.terminal.run_view import printable
from vcpo.records.samples import Sample
from vcpo.report.numbers import compact

_LINE: Final = 72
"""Characters of a response that stands on the line of its reward."""
_MANY: Final = 0.5
"""Share of cut answers from which they are worth a sentence."""
_INDENT: Final = "    | "


def prompt_lines(sample: Sample) -> Iterator[str]:
    """Yield the prompt of a sample, and the rewards of its group."""
    step = f"step {sample.step}, " if sample.step else ""
    yield f"{step}prompt {sample.prompt_index}, {sample.prompt_tokens} tokens"
    yield from _block(sample.prompt)
    if sample.answer:
        yield f"  answer {' '.join(printable(sample.answer).split())}"
    rewards = " ".join(map(compact, sample.group_rewards))
    lesson = "teaches" if teaches(sample) else "teaches nothing: they are equal"
    yield f"  rewards {rewards} ({lesson})"


def response_lines(sample: Sample) -> Iterator[str]:
    """Yield a response after its reward, its length, and how it ended."""
    end = "cut" if sample.is_cut else "stop"
    origin = f", version {sample.policy_version} of {sample.worker}" if sample.worker else ""
    parts = ", ".join(f"{name} {compact(part)}" for name, part in sample.told_parts.items())
    reward = f"{compact(sample.reward)} ({printable(parts)})" if parts else compact(sample.reward)
    head = f"  reward {reward}, {sample.response_tokens} tokens, {end}{origin}"
    if len(sample.response) <= _LINE and "\n" not in sample.response:
        yield f"{head} | {printable(sample.response)}"
    else:
        yield head
        yield from _block(sample.response)


def teaches(sample: Sample) -> bool:
    """Whether the rewards of its group differ: equal ones give no gradient."""
    return len(set(sample.group_rewards)) > 1


def trial_facts(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Return what whole groups of answers, at least one, say together.

    seconds: that it took to generate and to score them.
    """
    groups = {each.prompt_index: each for each in samples}
    lengths = [each.response_tokens for each in samples]
    prompts = [each.prompt_tokens for each in groups.values()]
    return {
        "reward_mean": fmean(each.reward for each in samples),
        "num_groups": len(groups),
        "teaching_groups_ratio": fmean(map(teaches, groups.values())),
        "num_responses": len(samples),
        "cut_responses_ratio": fmean(each.is_cut for each in samples),
        "prompt_tokens_mean": fmean(prompts),
        "prompt_tokens_max": max(prompts),
        "response_tokens_mean": fmean(lengths),
        "response_tokens_max": max(lengths),
        "seconds": seconds,
        "tokens_per_s": sum(lengths) / max(seconds, 1e-9),
    }


_FACTS: Final = {
    "answers": "{num_responses}, to {num_groups} prompts, in {seconds:.1f} s",
    "speed": "{tokens_per_s:,.0f} tokens/s",
    "reward": "{reward_mean:.3f} on average",
    "groups that teach": "{teaching_groups_ratio:.0%}; the rewards of the others are all equal",
    "cut answers": "{cut_responses_ratio:.0%}, at sampling.maxNewTokens",
    "tokens, prompt": "{prompt_tokens_mean:.0f}, {prompt_tokens_max} at most",
    "tokens, answer": "{response_tokens_mean:.0f}, {response_tokens_max} at most",
}


def fact_lines(facts: Mapping[str, float]) -> Iterator[str]:
    """Yield the facts of a trial in words."""
    yield from (f"{label:<18} {form.format(**facts)}" for label, form in _FACTS.items())


def trial_advice(facts: Mapping[str, float]) -> Iterator[str]:
    """Yield what to change after a trial, in sentences."""
    if facts["teaching_groups_ratio"] == 0.0:
        yield (
            "no group teaches: the rewards within each are equal, so a run would skip its steps."
            " Fix: prompts that the model answers right now and then, rewards for parts of an"
            " answer, or more batch.trajectoriesPerPrompt"
        )
    if (cut := facts["cut_responses_ratio"]) >= _MANY:
        yield (
            f"{cut:.0%} of the answers are cut before they end. Fix: a larger"
            " sampling.maxNewTokens, sampling.stopStrings, or prompts that ask for less"
        )


def choose_samples(
    samples: Iterable[Sample], *, best: bool, worst: bool, grep: str | None, limit: int
) -> list[Sample]:
    """Return up to `limit` of the samples that hold a text, sorted by reward if that is asked."""
    wanted = (grep or "").lower()
    found = [each for each in samples if wanted in f"{each.prompt}\n{each.response}".lower()]
    if best or worst:
        found.sort(key=lambda each: each.reward, reverse=best)
    return found[:limit]


def _block(text: str) -> Iterator[str]:
    for line in text.rstrip("\n").split("\n"):
        yield f"{_INDENT}{printable(line)}"
