"""Responses of a run for people: `samples/`, one file for a step, one line of JSON for a response.

A step keeps a few of its responses, from the worst reward to the best. The newest steps keep their
files, and of the steps before them about a hundred do, so the folder stays small however long the
run is. A step that is taken again replaces its file. Of the evaluations the first and the newest
keep answers to a few held-out prompts. No decision of training reads any of it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter

FOLDER: Final = "samples"
SAMPLES_PER_STEP: Final = 8
NEWEST_STEPS: Final = 16
"""Newest steps, which all keep theirs."""
_STEPS_KEPT: Final = 100
"""About how many of the other steps do."""
MOST_CHARACTERS: Final = 4_000
"""Longest text of a prompt or a response; the middle of a longer one is left out."""
LEFT_OUT: Final = " [... the middle is left out ...] "
"""Stands for the middle of a text that was too long."""
_FILE: Final = "step-{:08d}.jsonl"
_EVALUATION: Final = "evaluation-{:08d}.jsonl"

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response, with what the model was asked and what the response was worth."""

    prompt_index: int
    """Number of the prompt in its split."""
    question: str = ""
    """What the prompt asks last, without its template; cut at its end if it is long."""
    answer: str = ""
    """The right answer; empty if the environment says none."""
    prompt: str
    """The prompt as the model sees it, with the special tokens of its template."""
    response: str
    """The response with its end token, if it has one."""
    finish_reason: str
    """`stop`, or `length` for a response that was cut at `sampling.maxNewTokens`."""
    reward: float
    group_rewards: tuple[float, ...]
    """Rewards of all responses to the prompt; if they are equal, the group teaches nothing."""
    prompt_tokens: int
    response_tokens: int
    """Tokens that the model sampled."""
    reward_parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Parts of the reward by name, if the environment says them."""
    step: int = 0
    """Step that was taken with it, from 1, or steps taken before an evaluation; 0 for a trial."""
    policy_version: int = 0
    """Newest version that sampled a token of it."""
    worker: str = ""
    """Worker that sampled it; empty if several did."""

    @property
    def is_cut(self) -> bool:
        return self.finish_reason == "length"

    @property
    def told_parts(self) -> Mapping[str, float]:
        """Parts of the reward, unless there is one and it is the reward."""
        return {} if [*self.reward_parts.values()] == [self.reward] else self.reward_parts


def evenly_by_reward(items: Sequence[_Item], rewards: Sequence[float], most: int) -> list[_Item]:
    """Return up to `most` (>= 2) items, evenly spread from the smallest reward to the largest."""
    order = sorted(range(len(items)), key=rewards.__getitem__)
    if len(order) > most:
        order = [order[round(at * (len(order) - 1) / (most - 1))] for at in range(most)]
    return [items[at] for at in order]


def shorten(text: str) -> str:
    """Return a text without the middle of what is too long of it."""
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}{LEFT_OUT}{text[-half:]}"


def write_samples(run_dir: Path, step: int, samples: Sequence[Sample], *, total_steps: int) -> None:
    """Write the samples of a step, and remove those of a step that need not be kept any longer.

    total_steps: of the run; it decides which older steps are kept.
    """
    path = run_dir / FOLDER / _FILE.format(step)
    _write(path, samples)
    old = step - NEWEST_STEPS
    if old > 1 and old % max(1, total_steps // _STEPS_KEPT):
        path.with_name(_FILE.format(old)).unlink(missing_ok=True)


def write_answers(run_dir: Path, step: int, answers: Sequence[Sample]) -> None:
    """Write answers of an evaluation, and remove those of all others but the first.

    step: optimizer steps taken when the evaluation started.
    """
    path = run_dir / FOLDER / _EVALUATION.format(step)
    _write(path, answers)
    for other in _evaluations(run_dir)[1:]:
        if other != path:
            other.unlink(missing_ok=True)


def _write(path: Path, samples: Sequence[Sample]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = (json.dumps(dataclasses.asdict(each), ensure_ascii=False) for each in samples)
    write_whole(path, "".join(f"{line}\n" for line in lines))


def write_whole(path: Path, text: str) -> Path:
    """Write a file for people; a reader finds the whole of it, or the older one."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        return partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def sampled_steps(run_dir: Path) -> list[int]:
    """Return the steps that have samples, in order."""
    names = (path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.jsonl"))
    return sorted(int(name) for name in names if name.isdecimal())


def read_samples(run_dir: Path, steps: Sequence[int]) -> Iterator[Sample]:
    """Yield the samples of steps; what cannot be read is left out."""
    for step in steps:
        yield from _read(run_dir / FOLDER / _FILE.format(step))


def read_answers(run_dir: Path) -> list[list[Sample]]:
    """Return the answers of the first evaluation and of the newest; what cannot be read lacks."""
    return [list(_read(path)) for path in _evaluations(run_dir)]


def read_evaluation(run_dir: Path, step: int) -> list[Sample]:
    """Return the answers of the evaluation at a step; none if they are not kept."""
    return list(_read(run_dir / FOLDER / _EVALUATION.format(step)))


def _evaluations(run_dir: Path) -> list[Path]:
    return sorted((run_dir / FOLDER).glob("evaluation-*.jsonl"))


def _read(path: Path) -> Iterator[Sample]:
    with contextlib.suppress(OSError):  # removed in the meantime
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError, RecursionError):
                yield sample_of(json.loads(line))


def sample_of(entry: Mapping[str, Any]) -> Sample:
    """Return what `dataclasses.asdict` made of a sample, also after a way through JSON."""
    return TypeAdapter(Sample).validate_python(entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    """A prompt and all responses to it, at least one."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedPrompt:
    """A prompt to which there are no responses."""

    prompt_index: int
    why: str
    """A sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnd:
    """All prompts have their responses, or have failed."""

    seconds: float
    """From the first prompt to the last reward, without the loading of the model."""


TrialMessage = AnsweredPrompt | FailedPrompt | TrialEnd


def message_line(message: TrialMessage) -> str:
    """Return a message as a line."""
    return json.dumps({type(message).__name__: dataclasses.asdict(message)}) + "\n"


def read_message(line: str) -> TrialMessage:
    """Return what `message_line` made a line of."""
    ((name, fields),) = json.loads(line).items()
    match name:
        case "AnsweredPrompt":
            return AnsweredPrompt(samples=tuple(map(sample_of, fields["samples"])))
        case "FailedPrompt":
            return FailedPrompt(**fields)
    return TrialEnd(**fields)
