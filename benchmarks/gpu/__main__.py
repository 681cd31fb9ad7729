"""Answer what only a GPU can tell, the most important first: parts of a minute or two, JSON lines.

    python -m benchmarks.gpu --quick       two minutes: is it right, how fast, does a run end
    python -m benchmarks.gpu               all of it, in a quarter of an hour
    python -m benchmarks.gpu --parts gradient whole_run --limit-seconds 300
    python -m benchmarks.gpu --device cpu --tiny      the same code on a CPU; no figures

Models have random parameters, and nothing is fetched. docs/performance.md says what each part asks.
Each part is a process of its own with a time of its own. A line is printed as soon as it is known:
the machine, then each figure under its part's name, at the end of each part its `status` (`ran`,
`skipped` or `failed`, and why), and last how many of each there are.
"""

import argparse
import importlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from benchmarks.gpu.setting import Figures, Setting, lacks_gpu, machine
from benchmarks.harness.apart import run_apart
from vcpo_learner.device import let_segments_grow

_USELESS_S: Final = 10.0
"""With less time left, no part is started."""
_CPU_TIMES: Final = 4.0
"""On a CPU a part may take this many times its limit: it has no figures to hurry for."""


class Part(NamedTuple):
    """One question."""

    place: str
    """MODULE:FUNCTION of this package."""
    limit_s: float
    quick_limit_s: float | None = None
    """With `--quick`; None leaves the part out."""

    @property
    def name(self) -> str:
        return self.place.partition(":")[2]

    def limit(self, setting: Setting) -> float | None:
        found = self.quick_limit_s if setting.is_quick else self.limit_s
        return found if found is None or setting.is_gpu else _CPU_TIMES * found

    def load(self) -> Callable[[Setting], Figures]:
        """Import the function."""
        module = importlib.import_module(f"benchmarks.gpu.{self.place.partition(':')[0]}")
        found: Callable[[Setting], Figures] = getattr(module, self.name)
        return found


PARTS: Final = (
    Part(place="gradient:gradient", limit_s=90, quick_limit_s=30),
    Part(place="steps:step_speed", limit_s=150, quick_limit_s=30),
    Part(place="steps:real_lengths", limit_s=150),
    Part(place="whole_runs:whole_run", limit_s=150, quick_limit_s=60),
    Part(place="kernels:publishing", limit_s=45, quick_limit_s=20),
    Part(place="sharding:sharded_step", limit_s=75, quick_limit_s=25),
    Part(place="steps:step_beside_trl", limit_s=60),
    Part(place="steps:memory_plan", limit_s=60),
    Part(place="kernels:break_even", limit_s=30),
    Part(place="sampling:sampler_against_learner", limit_s=120),
    Part(place="whole_runs:whole_run_vllm", limit_s=240),
    Part(place="sampling:hybrids_against_learner", limit_s=300),
)
"""In the order of their weight: a run that is cut short has answered the first ones."""


def run_part(part: Part, setting: Setting, left_s: float) -> dict[str, Any]:
    """Run a part, print what it finds, and return its last line."""
    limit_s = part.limit(setting)
    if limit_s is None:
        return {"part": part.name, "status": "skipped", "why": "left out of --quick"}
    if left_s < _USELESS_S:
        return {"part": part.name, "status": "skipped", "why": "no time left"}

    def tell(figures: Any) -> None:
        print(json.dumps({"part": part.name, **figures}), flush=True)

    found = run_apart(lambda: part.load()(setting), min(limit_s, left_s), tell)
    last = {"part": part.name, "seconds": found["seconds"]}
    for key, status in (("skipped", "skipped"), ("error", "failed"), ("stopped", "failed")):
        if key in found:
            return {**last, "status": status, "why": found[key]}
    return {**last, "status": "ran"}


def run_parts(parts: Sequence[Part], setting: Setting, limit_s: float) -> list[dict[str, Any]]:
    """Run parts one after another, until the time is up; return their last lines."""
    deadline_s = time.monotonic() + limit_s
    lines = []
    for part in parts:
        line = run_part(part, setting, deadline_s - time.monotonic())
        print(json.dumps(line), flush=True)
        lines.append(line)
    return lines


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how many parts ran, were skipped and failed, and why, by name."""
    counts = Counter(line["status"] for line in lines)
    return {
        "benchmark": "gpu",
        **{status: counts[status] for status in ("ran", "skipped", "failed")},
        "why": {line["part"]: line["why"] for line in lines if "why" in line},
    }


def main() -> None:
    """Run the parts and print their lines; the exit status is 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    parser.add_argument("--quick", action="store_true", help="the first figures, in two minutes")
    parser.add_argument("--limit-seconds", type=float, help="900; with --quick 120; on a CPU 290")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("argument --device: sizes are those of a GPU; add --tiny for a CPU")
    setting = Setting(
        # As a learner's: the card's number too, which some of PyTorch's calls ask for.
        device=torch.device(arguments.device, 0 if arguments.device == "cuda" else None),
        is_tiny=arguments.tiny,
        is_quick=arguments.quick,
    )
    limit_s = arguments.limit_seconds or (
        (120.0 if setting.is_quick else 900.0) if setting.is_gpu else 290.0
    )
    chosen = [part for part in PARTS if part.name in arguments.parts]
    let_segments_grow(os.environ)
    started_s = time.monotonic()
    # Apart, as it touches the device.
    found = run_apart(lambda: machine(setting), limit_s)
    print(json.dumps({"part": "machine", **found}), flush=True)
    if lacks_gpu(setting, found):
        lines = [{"part": one.name, "status": "skipped", "why": "needs a GPU"} for one in chosen]
    else:
        for part in chosen:
            with suppress(ImportError):  # once for all parts, which are forks of this process
                part.load()
        lines = run_parts(chosen, setting, limit_s - (time.monotonic() - started_s))
    last = summary(lines)
    print(json.dumps(last))
    raise SystemExit(1 if last["failed"] else 0)


if __name__ == "__main__":
    main()
