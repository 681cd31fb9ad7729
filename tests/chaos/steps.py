"""Computes steps again: the parameters that one step makes of a checkpoint and a recorded batch.

```
checkpoint of step s   parameters, moments, calibration          (copied while it is there)
witness of the learner ids of the batch, and of what calibrated  --+
witnesses of workers   what they sent for these ids  <-------------+
        |
        +--> gradient (the product's) --> AdamW (the textbook's) --> parameters s+1
                                                      compared with the weights of version s+1
```

The gradient is that of the product, in this process. Its own tests compare it with autograd. What
the learner did with it is computed here by the formula, so a step that is taken twice is found
wherever it is taken twice.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.chaos.recorder import Line, read_message, read_new_lines
from vcpo.api import VCPORun, load_run
from vcpo.wire.trajectory import Trajectory, trajectory_from_message
from vcpo.wire.versions import step_of
from vcpo_learner.checkpoints.folder import Checkpoint, CheckpointFolder
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.ranks.ranks import RankEnvironment
from vcpo_learner.training.policy_on_ranks import PolicyOnRanks

TOLERANCE: Final = 0.1
"""Share of the step's own length by which the parameters may differ. Float32 sums in another order
differ by less than a thousandth of it; a second step is about as long as the first one."""
_ROUNDING: Final = 1e-6
"""The same, as a share of the parameters' length: of a step that is hardly one."""
_PATIENCE: Final = 30
"""How often a step is looked for before another checkpoint is taken."""


@dataclass(slots=True)
class _Taken:
    """A checkpoint that was copied, and how often the step after it was looked for."""

    folder: Path
    step: int
    num_looks: int = 0


@dataclass(slots=True)
class _Life:
    """What one learner's witness has said of the steps that it took."""

    read_bytes: int = 0
    trained: dict[int, Line] = field(default_factory=dict)
    """By the steps before it."""
    published: dict[int, str] = field(default_factory=dict)
    """Version and digest of the weights after so many steps, as in the names of their files."""


class StepCheck:
    """Computes one step after a checkpoint, again and again, spread over a run.

    run_file: the run's spec. checkpoints: its folder. payloads: the weights that it announced.
    folder: an own one, for copies.
    """

    def __init__(self, run_file: Path, checkpoints: Path, payloads: Path, folder: Path) -> None:
        self.num_checked = 0
        self.wrong: list[str] = []
        self.farthest = 0.0
        """Largest distance so far, as a share of the step's length."""
        self._run_file = run_file
        self._checkpoints = checkpoints
        self._payloads = payloads
        self._folder = folder
        self._taken: _Taken | None = None
        self._lives: dict[Path, _Life] = {}
        self._policy: PolicyOnRanks | None = None

    def look(self, witnesses: Sequence[Path], message_of: Callable[[str], str | None]) -> None:
        """Check the step after the checkpoint that was copied, if it was taken; or copy one.

        witnesses: of the learner's lives. message_of: what a worker sent, by the response's id.
        """
        for path in witnesses:
            self._read(path)
        if self._taken is None:
            self._take_copy()
            return
        self._taken.num_looks += 1
        if self._check(self._taken, message_of) or self._taken.num_looks >= _PATIENCE:
            shutil.rmtree(self._taken.folder, ignore_errors=True)
            self._taken = None

    def _read(self, path: Path) -> None:
        life = self._lives.setdefault(path, _Life())
        lines, life.read_bytes = read_new_lines(path, life.read_bytes)
        for line in lines:
            if line["what"] == "trained":
                life.trained[step_of(line["version"])] = line
            elif line["what"] == "published":
                name = f"{line['version']}-{line['digest']}"
                life.published[step_of(line["version"])] = name

    def _take_copy(self) -> None:
        """Copy the newest checkpoint; it may vanish meanwhile, or be damaged by a fault."""
        steps = {int(each.name[5:]): each for each in self._checkpoints.glob("step-*")}
        if not steps:
            return
        step = max(steps)
        copy = self._folder / "checkpoint"
        shutil.rmtree(copy, ignore_errors=True)
        try:
            shutil.copytree(steps[step], copy / steps[step].name)
        except (OSError, shutil.Error):
            return
        self._taken = _Taken(copy, step)

    def _check(self, taken: _Taken, message_of: Callable[[str], str | None]) -> bool:
        """Compute the step of every life that took it; return whether there was one."""
        found = False
        for life in self._lives.values():
            line = life.trained.get(taken.step)
            before, after = life.published.get(taken.step), life.published.get(taken.step + 1)
            if line is None or not before or not after:
                continue
            batch = self._responses([each for each, _ in line["content"]], message_of)
            fresh = self._responses(line["fresh"], message_of)
            if batch is None or fresh is None:
                continue
            version = line["version"]
            found = self._compare(taken, version, (before, after), batch, fresh) or found
        return found

    def _compare(
        self,
        taken: _Taken,
        version: int,
        names: tuple[str, str],
        batch: Sequence[Trajectory],
        fresh: Sequence[Trajectory],
    ) -> bool:
        """Compare a step that a life took with the one computed here.

        Returns False if the checkpoint is not that life's, or is damaged.
        """
        run, policy = load_run(self._run_file), self._loaded()
        try:
            checkpoint, _ = CheckpointFolder(taken.folder, run).load_newest()
        except CheckpointError:
            return True  # a fault has damaged it
        weights = [self._payloads / f"{name}.safetensors" for name in names]
        if checkpoint is None or not all(path.exists() for path in weights):
            return True
        was, became = (load_file(path) for path in weights)
        expected = step_after(policy, run, checkpoint, batch, fresh, version=version)
        start = {name: each.start for name, each in expected.items()}
        if any(not torch.equal(start[name], was[name]) for name in was):
            return False
        distance = distance_of(expected, became)
        self.num_checked += 1
        self.farthest = max(self.farthest, distance)
        if distance > TOLERANCE:
            self.wrong.append(f"step {taken.step + 1} is {distance:.3g} of its length off")
        return True

    def _responses(
        self, ids: Sequence[str], message_of: Callable[[str], str | None]
    ) -> list[Trajectory] | None:
        """What workers sent; None if not all of it was read yet."""
        sent = [message_of(each) for each in ids]
        if not all(sent):
            return None
        return [trajectory_from_message(read_message(each or ""), path="sent") for each in sent]

    def _loaded(self) -> PolicyOnRanks:
        if self._policy is None:
            self._policy = PolicyOnRanks.load(load_run(self._run_file).spec, RankEnvironment())
        return self._policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One parameter, before and after a step."""

    start: Tensor
    end: Tensor


def step_after(
    policy: PolicyOnRanks,
    run: VCPORun,
    checkpoint: Checkpoint,
    batch: Sequence[Trajectory],
    fresh: Sequence[Trajectory],
    *,
    version: int,
) -> Mapping[str, Stepped]:
    """The parameters after one step of AdamW from a checkpoint, by name.

    batch: the groups one after another. fresh: responses beside it that calibrate. version: of the
    checkpoint's parameters, as the learner published them.
    Source: Decoupled Weight Decay Regularization, arXiv 1711.05101, algorithm 2.
    """
    settings, size = run.spec.optimizer, run.spec.batch.trajectories_per_prompt
    policy.update.load_tensors(checkpoint.tensors)
    policy.update.load_state_dict(checkpoint.update_state)
    moments = {
        name: {key: each.clone() for key, each in held.items()}
        for name, held in policy.update._optimizer.moments().items()
    }
    groups = [batch[start : start + size] for start in range(0, len(batch), size)]
    policy.update.begin(groups, policy_version=version)
    parameters = {
        name: each for name, each in policy.model.named_parameters() if each.grad is not None
    }
    start = {name: each.detach().clone() for name, each in parameters.items()}
    gradient = {name: each.grad.clone() for name, each in parameters.items()}  # type: ignore[union-attr]
    norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradient.values()))
    clip = min(1.0, settings.max_gradient_norm / (norm + 1e-6))
    rate = policy.update.finish(fresh).learning_rate
    if rate == 0.0:
        return {name: Stepped(start=each, end=each) for name, each in start.items()}
    first, second = settings.betas
    ends: dict[str, Any] = {}
    for name, old in start.items():
        zero = torch.zeros_like(old)
        held = moments.get(name, {"exp_avg": zero, "exp_avg_sq": zero, "step": torch.tensor(0.0)})
        clipped, number = gradient[name] * clip, float(held["step"]) + 1.0
        mean = (first * held["exp_avg"] + (1.0 - first) * clipped) / (1.0 - first**number)
        square = second * held["exp_avg_sq"] + (1.0 - second) * clipped.square()
        root = (square / (1.0 - second**number)).sqrt() + settings.epsilon
        decay = settings.weight_decay if old.ndim >= 2 else 0.0
        ends[name] = old * (1.0 - rate * decay) - rate * mean / root
    return {name: Stepped(start=start[name], end=ends[name]) for name in start}


def distance_of(expected: Mapping[str, Stepped], found: Mapping[str, Tensor]) -> float:
    """How far parameters are from where a step leads, as a share of the step's length."""
    off = sum(float((found[name] - each.end).square().sum()) for name, each in expected.items())
    step = sum(float((each.end - each.start).square().sum()) for each in expected.values())
    whole = sum(float(each.start.square().sum()) for each in expected.values())
    return math.sqrt(off) / (math.sqrt(step) + _ROUNDING * math.sqrt(whole))
