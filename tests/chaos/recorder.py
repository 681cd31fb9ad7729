"""Judges a run by what its processes' witnesses said: what was lost, trained on twice, mislabelled.

```
worker    submitted (content)   confirmed by the learner   swapped (weights)
learner   resumed (held)   trained (content)   dropped (reason)   published (weights)   ended (held)
```

The learner's own books, the redo log and the journal, are not read. A confirmed response must be in
a step that stands, still wait, or have been dropped for a reason that may drop it
(`tests.chaos.drops`).
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.answers import ANSWERS, Damage, Loss
from tests.chaos.drops import Drop, Facts, Granted, Terms, complaint, drops_of
from tests.chaos.witness import TRAIN_PREFIX, content_digest
from vcpo.wire.v1 import work_pb2
from vcpo.wire.versions import step_of

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run did with the responses that it accepted; each list names responses."""

    lost: Sequence[str]
    double_trained: Sequence[str]
    mislabelled: Sequence[str]
    wrongly_dropped: Sequence[str]
    """With why."""
    num_confirmed: int
    num_trained: int
    num_waiting: int
    num_weights: int
    """Different sets of weights that were published."""
    num_lost_with_disk: int
    """Those that a log held which was damaged on purpose."""
    dropped: Mapping[str, int]
    """Confirmed responses that were dropped, by the learner's reason."""


@dataclass(slots=True)
class History:
    """The steps that stand; a later life of the learner undoes steps of an earlier one."""

    standing: dict[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Responses of each step with the digests of their content, by the steps before it."""
    dropped: dict[str, Drop] = field(default_factory=dict)
    """By response."""
    granted: dict[str, Granted] = field(default_factory=dict)
    """By lease."""
    set_aside: set[str] = field(default_factory=set)
    """Workers that the learner took out of the run."""
    broken: set[str] = field(default_factory=set)
    """Responses of batches on which an update raised an error."""
    published: set[tuple[int, str]] = field(default_factory=set)
    """Version and digest of its weights."""
    held: set[str] = field(default_factory=set)
    """Responses that the learner had when it last resumed or ended."""
    held_after: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    """What each life had when it resumed, with the Unix time."""
    _limit: int | None = None
    """The tighter lag limit that the learner said last."""

    _is_redoing: bool = False
    """Whether the life applies what the log has: an earlier one decided it, at its own time."""

    def begin_life(self, *, resumes: bool) -> None:
        self._is_redoing = resumes

    def end_life(self) -> None:
        self._limit = None

    def take(self, line: Line) -> None:
        """Follow one line."""
        match line["what"]:
            case "broken" | "trained":
                self._take_step(line)
            case "limited" | "granted" | "set_aside":
                self._take_of_leases(line)
            case "resumed":
                self._is_redoing = False
                self._undo_from(line["step"])
                self.held = set(line["ids"])
                self.held_after.append((line["unix_s"], frozenset(line["ids"])))
                # A drop that died with its process before the log had it did not happen.
                for each in self.held & self.dropped.keys():
                    del self.dropped[each]
            case "dropped":
                for drop in drops_of(line, self._limit):
                    known = self.dropped if self._is_redoing else {}
                    self.dropped |= {each: known.get(each, drop) for each in drop.ids}
            case "published":
                self.published.add((line["version"], line["digest"]))
            case "ended":
                self.held = set(line["ids"])

    def _take_of_leases(self, line: Line) -> None:
        match line["what"]:
            case "limited":
                self._limit = line["lag_steps"]
            case "granted":
                granted = Granted(
                    monotonic_s=line["monotonic_s"], number=line["number"], worker=line["worker"]
                )
                self.granted.setdefault(line["lease"], granted)  # a redo grants it again
            case "set_aside":
                self.set_aside.add(line["worker"])

    def _take_step(self, line: Line) -> None:
        if line["what"] == "broken":
            self.broken.update(line["ids"])
        elif line["what"] == "trained":
            step = step_of(line["version"])
            self._undo_from(step)
            self.standing[step] = line["content"]

    def _undo_from(self, step: int) -> None:
        self.standing = {at: kept for at, kept in self.standing.items() if at < step}


def judge(
    learners: Iterable[Sequence[Line]],
    workers: Iterable[Sequence[Line]],
    *,
    terms: Terms,
    damages: Sequence[Damage] = (),
) -> Verdict:
    """Judge a run that has ended.

    learners: the lines of each life of the learner, in order; workers: those of each worker.
    terms: what the spec promises, by which drops are judged.
    damages: of the redo log, on purpose. What a learner had confirmed before, and does not hold
        when it resumes, was lost with the disk, if the learner said how many changes are lost: a
        change holds the responses of one group at most.
    """
    history = History()
    for number, life in enumerate(learners):
        history.begin_life(resumes=number > 0)
        for line in life:
            history.take(line)
        history.end_life()
    said = [line for worker in workers for line in worker]
    submitted = {line["id"]: line["message"] for line in said if line["what"] == "submitted"}
    confirmed = _confirmed(said)
    trained = Counter(each for content in history.standing.values() for each, _ in content)
    gone = confirmed.keys() - trained.keys() - history.held - history.dropped.keys()
    with_disk = gone & _lost_with_the_disk(confirmed, history, damages, terms)
    dropped = {
        each: drop
        for each, drop in history.dropped.items()
        if each in confirmed and each not in trained and each not in history.held
    }
    facts = Facts(
        oldest_step=_oldest_steps(submitted),
        granted=history.granted,
        set_aside=history.set_aside,
        failed={line["lease"] for line in said if line["what"] == "failed"},
        broken=history.broken,
    )
    complaints = {each: complaint(drop, facts, terms) for each, drop in dropped.items()}
    return Verdict(
        lost=sorted(gone - with_disk),
        double_trained=sorted(each for each, times in trained.items() if times > 1),
        mislabelled=sorted(
            {
                *_altered(history, submitted),
                *_strange_weights(history, said),
                *_named_twice(history),
                *_never_published(history, {each: submitted[each] for each in confirmed}),
            }
        ),
        wrongly_dropped=sorted(f"{each}: {why}" for each, why in complaints.items() if why),
        num_confirmed=len(confirmed),
        num_trained=trained.total(),
        num_waiting=len(history.held - trained.keys()),
        num_weights=len({digest for _, digest in history.published}),
        num_lost_with_disk=len(with_disk),
        dropped=dict(Counter(drop.reason for drop in dropped.values())),
    )


def read_message(encoded: str) -> work_pb2.Trajectory:
    """The message that a witness wrote down."""
    return work_pb2.Trajectory.FromString(base64.b64decode(encoded))


def write_message(message: work_pb2.Trajectory) -> str:
    """A message as a witness writes it down."""
    return base64.b64encode(message.SerializeToString()).decode()


def read_lines(path: Path) -> list[Line]:
    """The lines of one process; a last one that is half written is left out."""
    return read_new_lines(path, 0)[0]


def read_new_lines(path: Path, offset: int) -> tuple[list[Line], int]:
    """The lines from an offset in bytes on, and the offset after them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        whole, end, _ = file.read().rpartition(b"\n")
    lines = [json.loads(line) for line in whole.splitlines()]
    return lines, offset + len(whole) + len(end)


def digest_of_message(message: work_pb2.Trajectory) -> str:
    """Digest of a response as its worker sent it."""
    return content_digest(
        prompt=_numbers(message.prompt_token_ids, "I"),
        response=_numbers(message.response_token_ids, "I"),
        logprobs=_numbers(message.rollout_logprobs, "f"),
        spans=[(span.policy_version, span.num_tokens) for span in message.version_spans],
        reward=message.reward,
    )


def _numbers(packed: bytes, form: str) -> list[Any]:
    return memoryview(packed).cast(form).tolist()


def _confirmed(lines: Iterable[Line]) -> dict[str, float]:
    """Unix time of the first confirmation of each training response."""
    confirmed: dict[str, float] = {}
    for line in lines:
        if line["what"] == "confirmed":
            for each in line["ids"]:
                if each.startswith(TRAIN_PREFIX):
                    confirmed.setdefault(each, line["unix_s"])
    return confirmed


def _oldest_steps(submitted: Mapping[str, str]) -> dict[str, int]:
    """The fewest steps behind a token of each response that was submitted."""
    spans = {each: read_message(message).version_spans for each, message in submitted.items()}
    return {
        each: min(step_of(span.policy_version) for span in of_response)
        for each, of_response in spans.items()
        if of_response
    }


def _altered(history: History, submitted: Mapping[str, str]) -> set[str]:
    """Responses that a step trained on with other content or labels than their worker sent."""
    return {
        each
        for content in history.standing.values()
        for each, digest in content
        if each not in submitted or digest_of_message(read_message(submitted[each])) != digest
    }


def _strange_weights(history: History, said: Iterable[Line]) -> set[str]:
    used = {(line["version"], line["digest"]) for line in said if line["what"] == "swapped"}
    return {f"version {version}" for version, _ in used - history.published}


def _named_twice(history: History) -> set[str]:
    names = Counter(version for version, _ in history.published)
    return {f"version {version}" for version, number in names.items() if number > 1}


def _never_published(history: History, submitted: Mapping[str, str]) -> set[str]:
    """Responses with the label of a version that no learner announced."""
    published = {version for version, _ in history.published}
    return {
        each
        for each, message in submitted.items()
        if any(span.policy_version not in published for span in read_message(message).version_spans)
    }


def _lost_with_the_disk(
    confirmed: Mapping[str, float], history: History, damages: Sequence[Damage], terms: Terms
) -> set[str]:
    """Responses that were confirmed before a damage, and of whose loss the learner told enough."""
    lost: set[str] = set()
    seen: set[str] = set()
    trained = {each for content in history.standing.values() for each, _ in content}
    for damage in damages:
        held = next(
            (ids for at_s, ids in history.held_after if at_s > damage.at_unix_s), frozenset()
        )
        before = {each for each, at_s in confirmed.items() if at_s < damage.at_unix_s}
        gone = before - held - trained - history.dropped.keys() - seen
        seen |= gone
        may_lose = ANSWERS[damage.kind].loses is Loss.TOLD
        if may_lose and len(gone) <= damage.told_changes * terms.group_size:
            lost |= gone
    return lost
