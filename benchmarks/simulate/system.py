"""What the model knows of a run: sizes and times."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness.timed_engine import Lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How a worker generates."""

    lengths: Lengths
    """Lengths of responses, in tokens."""
    token_s: float
    """Seconds for one token of every response that the worker generates."""
    places: int
    """Responses that a worker has room for; a group holds its places until it is complete."""
    swaps_in_flight: bool = True
    """Whether running responses continue with a new version; else all of a group's tokens have the
    version that its worker held at their start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How long an optimizer step takes: a constant, and what each response token adds."""

    constant_s: float = 0.0
    token_s: float = 0.0
    """Of the GPUs."""
    host_token_s: float = 0.0
    """Of each rank's Python, before the GPUs can begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLoop:
    """CPU seconds of the one core that serves all workers."""

    group_s: float = 0.0
    """For one group: its lease, its submission, and the redo log's part, without its tokens."""
    token_s: float = 0.0
    """More for each response token of a submission."""
    version_s: float = 0.0
    """For one worker that hears of a version and asks for work with it."""
    waiting_s: float = 0.0
    """For each second that one worker waits for work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What a version of the weights weighs, and what it costs on its way to a worker."""

    full_bytes: int = 0
    delta_bytes: int = 0
    """From one version to the next."""
    chain_share: float = 0.25
    """Several deltas are fetched while they are smaller than this share of the full set."""
    copied_s: float = 0.0
    """Until the next step may begin."""
    announced_s: float = 0.0
    """From then until workers hear of it, beside the next step."""
    sent_byte_s: float = 0.0
    """CPU seconds of the process that sends the learner's bytes, for each; it has one core."""
    link_bytes_per_s: float = float("inf")
    """Of one host, in each direction; all workers to which the learner sends share its link."""
    are_stored: bool = False
    """Whether workers read from an object store, each over its own link."""
    applied_s: float = 0.0
    """From the last byte to the swap, beside decoding."""
    pause_s: float = 0.0
    """For which a worker's decoding stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One run on one cluster."""

    workers: int
    generation: Generation
    prompts_per_step: int
    group_size: int
    max_policy_lag_steps: int
    """k, the largest lag of a token, in policy versions; 0 is synchronous training."""
    step: Step
    event_loop: EventLoop = EventLoop()
    versions: Versions = Versions()

    @property
    def batch_trajectories(self) -> int:
        """Trajectories of one step."""
        return self.prompts_per_step * self.group_size
