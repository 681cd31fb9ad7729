"""What a trial of a run tells, a line of JSON each: its responses, its failures, and its end."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from vcpo.records.samples import Sample, sample_of


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
