"""Judges what a run leaves for people: TensorBoard's files, its rollbacks, and an export.

```
journal       steps       ---> the same steps and rewards in TensorBoard's files
journal       RolledBack  ---> weights and rate of the next version, as the witness saw them
vcpo export   parameters  ---> the weights that were announced after as many steps
```
"""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import Tensor

from tests.chaos.recorder import Line
from tests.fixtures.tracking import tensorboard_scalars
from vcpo.records.exported_model import ExportedModel
from vcpo.records.journal import read_events, read_metrics
from vcpo.wire.versions import step_of

REWARD: Final = "task/reward_mean"
_ROLLED_BACK: Final = re.compile(
    r"step (\d+): .* are those of step (\d+) again, the learning rate goes on at x ([^ ,]+),"
)


def wrong_records(run_dir: Path, payloads: Path, lives: Sequence[Sequence[Line]]) -> list[str]:
    """What is not so in the records of a run that has ended, in words.

    payloads: the weights that it announced. lives: what each learner's witness said.
    """
    told = [each.message for each in read_events(run_dir) if each.kind == "RolledBack"]
    return [
        *wrong_steps_sent(run_dir),
        *wrong_rollbacks(told, lives),
        *wrong_export(run_dir, payloads),
    ]


def wrong_steps_sent(run_dir: Path) -> Iterator[str]:
    """Steps that TensorBoard shows otherwise than the journal has them."""
    shown = tensorboard_scalars(run_dir / "tensorboard").get(REWARD, {})
    kept = {each.step: each.reward_mean for each in read_metrics(run_dir).steps}
    if not kept:
        yield "the journal has no step"
    for step in sorted(kept.keys() | shown.keys()):
        if abs(shown.get(step, -9.0) - kept.get(step, -9.0)) > 1e-5:
            yield f"step {step}: TensorBoard {shown.get(step)}, journal {kept.get(step)}"


def wrong_rollbacks(told: Sequence[str], lives: Sequence[Sequence[Line]]) -> Iterator[str]:
    """Rollbacks that do not end at the weights and the rate that the journal tells.

    told: the messages of its events.
    """
    matches = [found for each in told if (found := _ROLLED_BACK.match(each))]
    rates = {(int(each[1]), int(each[2])): float(each[3]) for each in matches}
    digests: dict[int, set[str]] = {}
    for life in lives:
        due: Line | None = None
        for line in life:
            match line["what"]:
                case "rolled_back":
                    due = line
                case "published":
                    step = step_of(line["version"])
                    if due and step == due["step"] and line["digest"] not in digests[due["to"]]:
                        yield f"step {step}: the weights are not those of step {due['to']}"
                    digests.setdefault(step, set()).add(line["digest"])
                case "trained" if due:
                    told_rate = rates.get((due["step"], due["to"]))
                    if line["rate"] != told_rate:
                        yield f"step {due['step']}: rate x {line['rate']}, told {told_rate}"
                    due = None


def wrong_export(run_dir: Path, payloads: Path) -> Iterator[str]:
    """What `vcpo export` writes of the last checkpoint otherwise than it was announced."""
    folder = run_dir / "exported"
    command = [sys.executable, "-m", "vcpo_learner.export", str(run_dir), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    origin = ExportedModel.read(folder)
    if origin is None:
        yield f"export ended with {done.returncode}: {done.stderr[-500:]}"
        return
    versions = {int(each.name.partition("-")[0]): each for each in payloads.glob("*.safetensors")}
    newest = max((each for each in versions if step_of(each) == origin.step), default=None)
    if newest is None:
        yield f"export: no weights of step {origin.step} were announced"
        return
    exported, announced = load_file(folder / "model.safetensors"), load_file(versions[newest])
    yield from unlike(exported, announced)


def unlike(exported: Mapping[str, Tensor], announced: Mapping[str, Tensor]) -> Iterator[str]:
    """Parameters that an export lacks, or has otherwise than they were announced."""
    for name, value in announced.items():
        if name not in exported or not exported[name].equal(value.to(exported[name].dtype)):
            yield f"export: {name} is not as it was announced"
