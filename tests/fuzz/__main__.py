"""`make fuzz`: every target in turn with new inputs, for some minutes; the last line is JSON.

An input that fails is made small and written to the corpus, where `make test` finds it. Fix the
fault, and commit the input with the fix.
"""

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field

import xxhash
from hypothesis import HealthCheck, given, seed, settings

from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

_INPUTS_OF_A_ROUND = 100


@dataclass(slots=True)
class _Trial:
    """What happened to one target."""

    target: Target
    num_inputs: int = 0
    last: bytes = b""
    """The input checked last; after a fault, the smallest one that fails."""
    faults: dict[str, str] = field(default_factory=dict)
    """Errors by the file of the input that caused them."""

    def check(self, data: bytes) -> None:
        self.num_inputs += 1
        self.last = data
        self.target.check(data)

    def run(self, ends_s: float) -> None:
        """Draw rounds of inputs until a moment of the monotonic clock, or until one fails."""
        while time.monotonic() < ends_s and not self.faults:
            draw = settings(
                max_examples=_INPUTS_OF_A_ROUND,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )(given(data=self.target.damaged_inputs())(self.check))
            try:
                seed(random.getrandbits(64))(draw)()
            except Exception as error:  # noqa: BLE001 - any error is the finding
                self.faults[str(self._keep())] = f"{type(error).__name__}: {error}"[:200]

    def _keep(self) -> str:
        path = CORPUS / self.target.name / xxhash.xxh3_64_hexdigest(self.last)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.last)
        return str(path.relative_to(CORPUS.parents[2]))


def main() -> int:
    """Run the targets; return 1 if one of them failed."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", choices=names, action="append", help="default: all of them")
    options = parser.parse_args()
    trials = [_Trial(one) for one in TARGETS if one.name in (options.target or names)]
    share_s = options.minutes * 60.0 / len(trials)
    for trial in trials:
        sys.stderr.write(f"{trial.target.name}: {share_s:.0f} s ...")
        sys.stderr.flush()
        trial.run(time.monotonic() + share_s)
        sys.stderr.write(f" {trial.num_inputs} inputs, {len(trial.faults)} faults\n")
    faults = {path: error for trial in trials for path, error in trial.faults.items()}
    inputs = {trial.target.name: trial.num_inputs for trial in trials}
    sys.stdout.write(json.dumps({"minutes": options.minutes, "inputs": inputs, "faults": faults}))
    sys.stdout.write("\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
