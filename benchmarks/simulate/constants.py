"""Where the model's constants come from: measured by other benchmarks, or assumed of hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number with its source."""

    value: float
    unit: str
    source: str
    """The command that measures it; or why it is assumed."""


GROUP_S: Final = Constant(
    value=1.7e-3,
    unit="CPU s of the learner's event loop for a group: lease, submission, redo log",
    source="python -m benchmarks.soak: 8 over trajectories_per_s",
)
SUBMITTED_TOKEN_S: Final = Constant(
    value=5e-8,
    unit="CPU s of the event loop for one more response token",
    source="python -m benchmarks.learner.ingest with --tokens 64 and 1024: the difference",
)
WAITING_S: Final = Constant(
    value=2.4e-4,
    unit="CPU s of the event loop for a worker that waits for a second",
    source="python -m benchmarks.learner.waiting_workers: waiting_us_per_s",
)
VERSION_S: Final = Constant(
    value=9e-4,
    unit="CPU s of the event loop for a worker that hears of a version",
    source="python -m benchmarks.learner.waiting_workers: version_us_per_worker",
)
STEP_HOST_TOKEN_S: Final = Constant(
    value=1.1e-7,
    unit="CPU s of the tensor thread's Python for a response token, on each step's path",
    source="assumed; python -m benchmarks.learner.learner_host has .27 us on a slower machine",
)
COPIED_S_PER_GB: Final = Constant(
    value=0.54,
    unit="s until the next step may begin, for a gigabyte that a rank publishes alone",
    source="python -m benchmarks.publish: step_path_cpu_s_per_gb of one rank",
)
GATHERED_S_PER_GB: Final = Constant(
    value=1.74,
    unit="the same for a gigabyte that rank 0 gathers from the others",
    source="a learner whose rank 0 gathered versions; ranks publish their own rows",
)
ANNOUNCED_S_PER_GB: Final = Constant(
    value=0.28,
    unit="s beside the next step until workers hear of a version, for a published gigabyte",
    source="python -m benchmarks.publish: beside_cpu_s_per_gb",
)
DELTA_SHARE: Final = Constant(
    value=0.015,
    unit="bytes of a delta over those of the full set",
    source="python -m benchmarks.rollout.weight_sync: delta_bytes_over_full",
)
APPLIED_S_PER_GB: Final = Constant(
    value=0.13,
    unit="CPU s beside decoding until a worker may swap, for a gigabyte of the full set",
    source="python -m benchmarks.publish: apply_cpu_s_per_gb",
)
MEMORY_BYTES_PER_S: Final = Constant(
    value=0.6 * 3.35e12, unit="B/s that decoding reads on one GPU", source="0.6 of an H100's peak"
)
FLOPS: Final = Constant(
    value=0.4 * 989e12,
    unit="FLOP/s of one GPU in a step, and where a worker reads prompts and responses",
    source="0.4 of an H100's peak in bf16",
)
LINK_BYTES_PER_S: Final = Constant(
    value=25e9 / 8, unit="B/s of one host, each direction", source="25 Gbit/s"
)

SENT_S_PER_GB: Final = Constant(
    value=0.19,
    unit="CPU s of the process that sends weights, for a gigabyte",
    source="python -m benchmarks.learner.sending_weights: server_cpu_s_per_gb",
)
SERVED_WORKERS: Final = 64
"""Most workers that read from the learner's server; more of them have an object store."""

MEASURED: Final = {
    "group_s": GROUP_S,
    "submitted_token_s": SUBMITTED_TOKEN_S,
    "waiting_s": WAITING_S,
    "version_s": VERSION_S,
    "step_host_token_s": STEP_HOST_TOKEN_S,
    "copied_s_per_gb": COPIED_S_PER_GB,
    "gathered_s_per_gb": GATHERED_S_PER_GB,
    "announced_s_per_gb": ANNOUNCED_S_PER_GB,
    "delta_share": DELTA_SHARE,
    "applied_s_per_gb": APPLIED_S_PER_GB,
    "sent_s_per_gb": SENT_S_PER_GB,
}
ASSUMED: Final = {
    "memory_bytes_per_s": MEMORY_BYTES_PER_S,
    "flops": FLOPS,
    "link_bytes_per_s": LINK_BYTES_PER_S,
}
