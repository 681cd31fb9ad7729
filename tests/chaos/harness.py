"""Plays a schedule of faults on a run, and judges what came of it.

```
seed --> schedule --> inject --> did it happen? --> did the product show it? --> a new step?
```
At the end the run is drained, and the recorder judges every response that was accepted. The exit
status is 1 if a bar is missed. A seed gives one schedule; what a fault hits is up to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.chaos import machine_faults, wire_faults
from tests.chaos.__main__ import OWN_MOUNTS_VARIABLE
from tests.chaos.answers import Window, unexpected_ends
from tests.chaos.fault import Fault, NotInjectedError, schedule
from tests.chaos.kinds import ON_OWN_DISK, SHORT, Kind
from tests.chaos.live_run import MODEL, TERMS, LiveRun
from tests.chaos.recorder import Verdict, judge, read_message, read_new_lines
from vcpo.service.lifecycle import SERVICE_ENVIRONMENT

if TYPE_CHECKING:
    from tests.chaos.labels import LabelCheck
    from tests.chaos.steps import StepCheck

_INJECTORS = {**wire_faults.INJECTORS, **machine_faults.INJECTORS}
_KINDS_BAR = 34
_ZERO = (
    *("lost", "double_trained", "mislabelled", "wrongly_dropped", "wrong_steps"),
    *("wrong_records", "unexpected_ends", "hangs", "silent", "orphans"),
)
"""Fields that must be zero."""
_LEAST_TO_JUDGE = 2
"""Responses, labels, steps and sets of weights: with one version no label can be wrong."""
_RECENT_MESSAGES = 8192
"""Of which a batch is put together again; the ledger holds a few hundred."""
_LABELS_AT_ONCE = 64
_MOST_TRIES = 10
"""How often a fault is tried that cannot happen yet; the run takes a step between two tries."""


@dataclass(slots=True)
class Chaos:
    """One run under a schedule, and what came of it."""

    run: LiveRun
    labels: LabelCheck
    steps: StepCheck
    draw: random.Random
    happened: list[Fault] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults that could not be injected, by kind."""
    silent: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    """The times of the faults."""
    wrong_labels: set[str] = field(default_factory=set)
    _read_bytes: dict[Path, int] = field(default_factory=dict)
    """How much of each worker's witness was read for labels."""
    _submitted: dict[str, str] = field(default_factory=dict)
    """Messages that were submitted and are not confirmed yet, by id."""
    _recent: dict[str, str] = field(default_factory=dict)
    """The newest messages that were submitted, by id."""

    async def play(self, faults: Sequence[Fault], ends_s: float) -> None:
        """Inject faults one after another until a moment of the monotonic clock.

        What could not happen is tried again at the end.
        """
        waiting, tries = deque(faults), Counter[int]()
        while waiting and time.monotonic() < ends_s:
            fault = waiting.popleft()
            tries[fault.number] += 1
            await asyncio.sleep(fault.pause_s)
            happened = await self._play(fault, tries[fault.number])
            if not happened and tries[fault.number] < _MOST_TRIES:
                waiting.append(fault)
            await asyncio.to_thread(self.check)
        if waiting:
            _say(f"the time is up, {len(waiting)} faults are left")

    async def _play(self, fault: Fault, number_of_try: int) -> bool:
        """Inject one fault, and let the run recover; return False if it could not happen."""
        draw = random.Random(fault.seed + number_of_try)
        self.windows.append(Window(kind=fault.kind, begun_s=time.monotonic()))
        try:
            injected = await _INJECTORS[fault.kind](self.run, draw)
        except NotInjectedError as error:
            self.missed[fault.kind] += 1
            _say(f"{fault.number} {fault.kind}: not injected, {error}")
            await self._recover(fault)
            return False
        self.happened.append(fault)
        shown = "" if injected.is_shown else f"; NOT SHOWN: {injected.sign}"
        _say(f"{fault.number} {fault.kind}: {injected.what}{shown}")
        if not injected.is_shown:
            self.silent.append(f"{fault.number} {fault.kind}: {injected.what}")
        if not fault.overlaps:
            await self._recover(fault)
        return True

    async def _recover(self, fault: Fault) -> None:
        """Wait until the run goes on; if it does not in time, it hangs."""
        if not await self.run.progress():
            _say(f"    HANGS after {fault.kind}")
            self.hangs.append(f"{fault.number} {fault.kind}")
        for window in self.windows:
            window.over_s = min(window.over_s, time.monotonic())

    async def begin(self) -> None:
        """Wait until the run works."""
        if not await self.run.progress():
            raise RuntimeError(f"the run did not begin to work; see {self.run.folder}")
        _say("the run works")

    async def settle(self) -> None:
        if not await self.run.progress():
            self.hangs.append("at the end")

    def check_labels(self) -> None:
        """Compute again some of the responses that were confirmed since the last time."""
        confirmed: dict[str, str] = {}
        for worker in self.run.workers:
            lines, self._read_bytes[worker.witness] = read_new_lines(
                worker.witness, self._read_bytes.get(worker.witness, 0)
            )
            for line in lines:
                if line["what"] == "submitted":
                    self._submitted[line["id"]] = self._recent[line["id"]] = line["message"]
                elif line["what"] == "confirmed":
                    sent = {each: self._submitted.pop(each, "") for each in line["ids"]}
                    confirmed |= {each: message for each, message in sent.items() if message}
        chosen = self.draw.sample(sorted(confirmed), min(_LABELS_AT_ONCE, len(confirmed)))
        messages = [read_message(confirmed[each]) for each in chosen]
        self.wrong_labels |= set(self.labels.wrong_labels(messages))
        self.labels.forget_old()

    def check_steps(self) -> None:
        """Compute a step again, if there is one whose checkpoint was copied."""
        for each in list(self._recent)[:-_RECENT_MESSAGES]:
            del self._recent[each]
        self.steps.look([each.witness for each in self.run.lives], self._recent.get)

    def check(self) -> None:
        self.check_labels()
        self.check_steps()

    def result(
        self, verdict: Verdict, records: Sequence[str], orphans: Sequence[str], seconds: float
    ) -> dict[str, Any]:
        """What the last line says."""
        mislabelled = {*verdict.mislabelled, *self.wrong_labels}
        unexpected = unexpected_ends(self.run.ends, self.windows)
        return {
            "faults": len(self.happened),
            "kinds": len({fault.kind for fault in self.happened}),
            "lost": len(verdict.lost),
            "double_trained": len(verdict.double_trained),
            "mislabelled": len(mislabelled),
            "wrongly_dropped": len(verdict.wrongly_dropped),
            "wrong_steps": len(self.steps.wrong),
            "wrong_records": len(records),
            "unexpected_ends": len(unexpected),
            "hangs": len(self.hangs),
            "silent": len(self.silent),
            "orphans": len(orphans),
            "confirmed": verdict.num_confirmed,
            "trained": verdict.num_trained,
            "waiting": verdict.num_waiting,
            "dropped": dict(verdict.dropped),
            "lost_with_damaged_log": verdict.num_lost_with_disk,
            "weights": verdict.num_weights,
            "labels_checked": self.labels.num_checked,
            "steps_checked": self.steps.num_checked,
            "farthest_step": round(self.steps.farthest, 6),
            "usual_step_s": round(median(self.run.pace.steps_s or [0.0]), 2),
            "longest_silence_s": round(self.run.pace.longest_silence_s, 1),
            "learner_lives": len(self.run.lives),
            "worker_lives": len(self.run.workers),
            "not_injected": dict(self.missed),
            "seconds": round(seconds),
            "named": {
                "lost": list(verdict.lost[:5]),
                "double_trained": list(verdict.double_trained[:5]),
                "mislabelled": sorted(mislabelled)[:5],
                "wrongly_dropped": list(verdict.wrongly_dropped[:5]),
                "wrong_steps": self.steps.wrong[:5],
                "wrong_records": list(records[:5]),
                "unexpected_ends": unexpected[:5],
                "hangs": self.hangs,
                "silent": self.silent,
                "orphans": list(orphans),
            },
        }


async def chaos(
    folder: Path, run_dir: Path, faults: Sequence[Fault], *, seed: int, minutes: float
) -> dict[str, Any]:
    """Run a schedule; what came of it."""
    from tests.chaos.records import wrong_records  # it loads torch

    started_s = time.monotonic()
    async with LiveRun(folder, run_dir) as run:
        # It loads torch, which takes seconds; the processes start meanwhile.
        labels, steps = await asyncio.to_thread(_checks, run)
        played = Chaos(run, labels, steps, random.Random(seed))
        await played.begin()
        await played.play(faults, started_s + 60.0 * minutes)
        await played.settle()
        if await run.drain() is None:
            played.hangs.append("the learner does not end")
        orphans = run.leftovers()
        played.check()
        learners, workers = run.lines()
        verdict = judge(learners, workers, terms=TERMS, damages=run.damages)
        records = wrong_records(run.run_dir, run.payloads, learners)
    return played.result(verdict, records, orphans, time.monotonic() - started_s)


def _checks(run: LiveRun) -> tuple[LabelCheck, StepCheck]:
    from tests.chaos.labels import LabelCheck
    from tests.chaos.steps import StepCheck

    run_file, checkpoints = run.folder / "run.yaml", run.run_dir / "checkpoints"
    steps = StepCheck(run_file, checkpoints, run.payloads, run.folder / "copies")
    return LabelCheck(MODEL, run.payloads), steps


def shortfalls(result: Mapping[str, Any], *, faults: int, kinds: int) -> list[str]:
    """Bars that a result misses; empty when it passes."""
    missed = [f"{name} is {result[name]}, must be 0" for name in _ZERO if result[name]]
    if result["faults"] < faults:
        missed.append(f"faults is {result['faults']}, must be at least {faults}")
    if result["kinds"] < kinds:
        missed.append(f"kinds is {result['kinds']}, must be at least {kinds}")
    missed += [
        f"{name} is {result[name]}: the run did nothing to judge"
        for name in ("confirmed", "trained", "weights", "labels_checked", "steps_checked")
        if result[name] < _LEAST_TO_JUDGE
    ]
    return missed


def main() -> int:
    """Parse the command line and run; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=300, help="faults to inject (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most (%(default)s)")
    parser.add_argument("--kind", type=Kind, action="append", help="of these kinds only")
    parser.add_argument(
        "--short", action="store_true", help="of the kinds that take a second or two, one restart"
    )
    parser.add_argument("--folder", type=Path, help="new folder for logs, which stay then")
    options = parser.parse_args()
    os.environ |= SERVICE_ENVIRONMENT  # it loads a model too, and its lines are the harness's own
    kinds = possible_kinds(options.kind or (SHORT if options.short else Kind))
    faults = schedule(options.seed, options.faults, kinds)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="vcpo-chaos-"))).absolute()
    folder.mkdir(exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder: {folder} is not empty; give a new one")
    with _disk(folder / "run") as run_dir:
        run = chaos(folder, run_dir, faults, seed=options.seed, minutes=options.minutes)
        result = asyncio.run(run)
    least = min(_KINDS_BAR, len(kinds), options.faults)
    missed = shortfalls(result, faults=options.faults, kinds=least)
    for each in missed:
        _say(f"MISSED: {each}")
    if missed:
        again = ["python -m tests.chaos", *sys.argv[1:], f"--seed {options.seed}"]
        _say(f"again: {' '.join(again)}")
        _say(f"logs and witnesses: {folder}")
    elif options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if missed else 0


def possible_kinds(kinds: Collection[Kind]) -> list[Kind]:
    """The kinds that this system allows: full and read-only disks take one of our own."""
    if OWN_MOUNTS_VARIABLE in os.environ:
        return list(kinds)
    _say("this system lets nobody mount a disk of his own: no full and no read-only disk")
    return [kind for kind in kinds if kind not in ON_OWN_DISK]


@contextlib.contextmanager
def _disk(run_dir: Path) -> Iterator[Path]:
    """The run's directory, on a small disk of its own where this process may mount one."""
    run_dir.mkdir()
    if OWN_MOUNTS_VARIABLE not in os.environ:
        yield run_dir
        return
    size = f"size={machine_faults.DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(run_dir)], check=True)
    try:
        yield run_dir
    finally:
        subprocess.run(["umount", "--lazy", str(run_dir)], check=True)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
