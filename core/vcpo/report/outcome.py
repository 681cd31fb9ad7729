"""What came of a run, in sentences that the terminal and the report share."""

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from vcpo.algo.ess.verdict import LearningRateRule
from vcpo.algo.health.collapse import share_error
from vcpo.api.algorithm import Algorithm
from vcpo.judgement import skip_cause
from vcpo.records.journal import EvaluationRecord, Metrics
from vcpo.records.reasons import drop_words
from vcpo.records.samples import Sample
from vcpo.report.numbers import whole

_CONFIDENT = 1.96
"""Standard errors that chance stays within, 19 times of 20."""


def held_out_text(metrics: Metrics) -> str:
    """Return the held-out reward, as `0.32 -> 0.98`, with its step if that is over; or ''."""
    if not (found := metrics.evaluations):
        return ""
    first, last = found[0], found[-1]
    before = f"{first.accuracy:.2f} -> " if first.step < last.step else ""
    is_old = any(last.step < each.step for each in metrics.steps[-1:])
    at = "" if before and not is_old else f" at step {whole(last.step)}"
    return f"{before}{last.accuracy:.2f}{at}"


def band_of(evaluation: EvaluationRecord) -> float:
    """Return how far chance moves an evaluation; 0 if its rewards are not from 0 to 1."""
    return _CONFIDENT * share_error(evaluation.accuracy, evaluation.num_prompts)


def chance_text(metrics: Metrics) -> str:
    """Return whether the change of the held-out reward is more than chance; empty if unknown."""
    ends = [metrics.evaluations[0], metrics.evaluations[-1]] if metrics.evaluations else []
    band = math.hypot(*map(band_of, ends))
    if not band or ends[0].step == ends[-1].step:
        return ""
    moved = abs(ends[0].accuracy - ends[-1].accuracy) > band
    prompts = f"{min(each.num_prompts for each in ends)} prompts"
    return f"{'more' if moved else 'no more'} than chance, which is ±{band:.2f} with {prompts}"


def left_out(metrics: Metrics, *, but: Collection[str] = ()) -> Iterator[str]:
    """Yield what was not trained on, and why, except for the reasons `but`."""
    if not metrics.steps:
        return
    last = metrics.steps[-1]
    if dropped := Counter({name: n for name, n in last.dropped.items() if name not in but}):
        reasons = ", ".join(f"{drop_words(name)} {whole(n)}" for name, n in dropped.most_common())
        yield f"{whole(dropped.total())} of {whole(last.leased)} responses: {reasons}"
    skipped = Counter(skip_cause(each.skipped) for each in metrics.steps if each.skipped)
    for cause, number in skipped.most_common():
        yield f"{number} of {len(metrics.steps)} steps: {cause}"


def before_and_after(evaluations: Sequence[Sequence[Sample]]) -> list[tuple[Sample, Sample]]:
    """Return the answers to each prompt of the first and the last evaluation.

    Those whose reward changed most come first.
    """
    if len(evaluations) < 2:
        return []
    after = {each.prompt_index: each for each in evaluations[-1]}
    pairs = [(each, after[each.prompt_index]) for each in evaluations[0]
             if each.prompt_index in after]  # fmt: skip
    return sorted(pairs, key=lambda pair: -abs(pair[1].reward - pair[0].reward))


def scale_words(algorithm: Algorithm) -> str:
    """Return what scales the learning rate of a run's steps."""
    is_region = algorithm.loss_config.learning_rate_rule is LearningRateRule.TRUST_REGION
    return "trust region" if is_region else "ESS"


def resume_command(run_file: Path, run_dir: Path) -> str:
    """Return the command that goes on with a run."""
    return shlex.join(["vcpo", "run", str(run_file), "--run-dir", str(run_dir), "--resume"])
