"""What publishing a version costs the step that it follows, and what it costs beside training.

    copied      until the next step may begin: parameters are rounded into the published file
    announced   until workers hear of the version after that: checksums, and the delta from the
                version before, from which one value in a hundred differs
    in_step     what the step would wait if it waited for all of it
    rounded     the same parameters rounded into new memory and nothing else: the memory's own speed

The model is a Llama with random parameters, published in bfloat16; one CPU thread.

    python -m benchmarks.learner.publication

The last line printed is JSON. Seconds are of a gigabyte (10^9 bytes) of the published file, the
least of all repeats. `waited_ratio` is copied over in_step, `rounded_ratio` is rounded over copied
(1 is the memory's own speed), and `copies` is the memory that a copy takes, over the file's size.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable

import torch

from benchmarks.harness.random_llama import random_llama
from vcpo.spec.workloads import Precision
from vcpo_learner.model.loading import policy_payload
from vcpo_learner.weights.store import PolicyStore

_CHANGED_SHARE = 0.01


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the least time of some calls."""
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - started_s)
        del result
    return min(times)


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """Move a share of the values by more than their rounding."""
    for parameter in model.parameters():
        parameter.mul_(1.0 + 0.1 * (torch.rand_like(parameter) < _CHANGED_SHARE))


def main() -> None:
    """Print the size, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = random_llama(
        options.hidden_size, max_tokens=64, vocabulary=32_000, num_layers=options.layers
    )
    parameters = [each.detach() for each in model.parameters()]
    held_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    base = policy_payload(model, Precision.BFLOAT16)
    copy_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held_kib
    gigabytes = len(base) / 1e9
    print(f"{gigabytes:.3f} GB published")
    rounded_s = seconds(lambda: [each.bfloat16() for each in parameters], options.repeats)
    copied_s = seconds(lambda: policy_payload(model, Precision.BFLOAT16), options.repeats)
    store = PolicyStore(incarnation="benchmark", clock=time.monotonic)
    store.publish(store.prepare(0, base))
    change(model)
    changed = policy_payload(model, Precision.BFLOAT16)
    announced_s = seconds(lambda: store.prepare(1, changed), options.repeats)
    delta = store.prepare(1, changed).delta
    result = {
        "gigabytes": gigabytes,
        "copied_s_per_gb": copied_s / gigabytes,
        "announced_s_per_gb": announced_s / gigabytes,
        "in_step_s_per_gb": (copied_s + announced_s) / gigabytes,
        "rounded_s_per_gb": rounded_s / gigabytes,
        "waited_ratio": copied_s / (copied_s + announced_s),
        "rounded_ratio": rounded_s / copied_s,
        "copies": copy_kib * 1024 / len(base),
        "delta_ratio": None if delta is None else len(delta.data) / len(changed),
    }
    print(json.dumps({name: value and round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
