"""What a checkpoint costs the step that it follows, and what its files cost beside training.

    staged     until `PolicyUpdate.save_tensors` returns: parameters and moments are copied to the
               host's memory, and the next step may begin. The first save also allocates the copies.
    written    until the files are on the disk, with their checksums
    in_step    what the step would wait if it waited for the files, as `written` plus staging

The model is a Llama with random parameters and moments of AdamW, 12 bytes per parameter.

    python -m benchmarks.learner.checkpoint

The last line printed is JSON. `staged_ratio` is the share of `in_step` that the step still waits,
the median of the later saves.
"""

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness.random_llama import PAD_TOKEN_ID, random_llama
from vcpo.api import VCPORunSpec
from vcpo_learner.update.policy_update import PolicyUpdate


def make_update(hidden_size: int, num_layers: int) -> PolicyUpdate:
    """Return an update of a random model whose optimizer has moments."""
    spec = VCPORunSpec.model_validate(
        {
            "model": {"name": "random"},
            "environment": {"name": "countdown"},
            "steps": 1,
            "algorithm": {"method": "grpo"},
        }
    )
    model = random_llama(hidden_size, max_tokens=64, vocabulary=32_000, num_layers=num_layers)
    update = PolicyUpdate(model, spec, PAD_TOKEN_ID)
    update._optimizer.allocate_moments()
    return update


def measure(update: PolicyUpdate, folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Return the seconds until each save was staged, and until it was written after that."""
    staged, written = [], []
    for number in range(repeats + 1):
        target = folder / str(number)
        started_s = time.perf_counter()
        writing = update.save_tensors(target)
        staged_s = time.perf_counter()
        writing.result()
        staged.append(staged_s - started_s)
        written.append(time.perf_counter() - staged_s)
        shutil.rmtree(target)
    return staged, written


def main() -> None:
    """Print a line for each save, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: temporary")
    options = parser.parse_args()
    torch.set_num_threads(1)
    update = make_update(options.hidden_size, options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        staged, written = measure(update, Path(folder), options.repeats)
    update.close()
    for number, (one, other) in enumerate(zip(staged, written, strict=True)):
        print(f"save {number}: staged {one:6.3f} s, written {other:6.3f} s")
    later_staged, later_written = median(staged[1:]), median(written[1:])
    result = {
        "checkpoint_mib": round(update.checkpoint_bytes / 2**20),
        "first_staged_s": round(staged[0], 3),
        "staged_s": round(later_staged, 3),
        "written_s": round(later_written, 3),
        "staged_ratio": round(later_staged / (later_staged + later_written), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
