"""The run: workers, event loop, learner and publication as processes in simulated time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from simpy import Environment, Process

from benchmarks.simulate.fan_out import Events, FanOut
from benchmarks.simulate.ledger import GeneratedGroup, Ledger
from benchmarks.simulate.system import Generation, System
from benchmarks.simulate.worker import RunningGroup, Worker

_ROWS = 4096
"""Groups whose lengths are drawn at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step; all but the first four are counted from the start of the run to its end."""

    ended_s: float
    tokens: int
    """Response tokens of its batch."""
    lag_mean: float
    """Of its tokens, in policy versions."""
    lag_max: int
    computed_s: float
    """Seconds in which the learner computed steps, its Python included."""
    host_s: float
    """Of these, the seconds of its Python."""
    published_s: float
    """Seconds in which its next step waited for a publication."""
    loop_s: float
    """CPU seconds of the event loop."""
    place_s: float
    """Seconds of all places in which a group held them."""
    sent_bytes: int
    """Bytes of weights that the learner sent."""
    dropped: int
    """Trajectories that were too old."""
    fan_out_s: float
    """Most seconds from the announcement of a version to a worker's swap to it."""


class Simulation:
    """One simulated run; it begins when every worker holds version 0."""

    def __init__(self, system: System, *, seed: int) -> None:
        self.steps: list[SimulatedStep] = []
        self._system = system
        self._environment = Environment()
        self._lengths = drawn_lengths(system.generation, system.group_size, seed)
        self._ledger = Ledger(
            prompts_per_step=system.prompts_per_step,
            group_size=system.group_size,
            max_policy_lag_steps=system.max_policy_lag_steps,
        )
        self._fan_out = FanOut(self._environment, system)
        self._workers = [
            Worker(f"worker-{number}", system.generation) for number in range(system.workers)
        ]
        self._waiting: defaultdict[int, dict[Worker, None]] = defaultdict(dict)
        """Workers with places for a group, by the version that they hold; first come, first."""
        self._batch_event = self._environment.event()
        """There are enough groups for the step that the learner waits for."""
        self._announcement = self._environment.event()
        """Of the next version."""
        self._newest = 0
        """Version that workers may fetch."""
        self._announced_s = 0.0
        """Time since when they may."""
        self._computed_s = self._host_s = self._published_s = self._loop_s = self._place_s = 0.0
        self._fan_out_s = 0.0
        self._loop_free_s = 0.0
        """When the event loop has served all calls so far."""

    def run(self, num_steps: int) -> list[SimulatedStep]:
        """Take some steps and return all of them."""
        for worker in self._workers:
            self._environment.process(self._receive(worker))
            self._lease(worker)
        if self._system.event_loop.waiting_s > 0.0:
            self._environment.process(self._answer_waiting())
        self._environment.run(self._environment.process(self._train(num_steps)))
        return self.steps

    def _train(self, num_steps: int) -> Events:
        """The learner: wait for a batch, step, copy the version, and begin the next step."""
        announcing: Process | None = None
        for version in range(num_steps):
            while (batch := self._ledger.take_batch()) is None:
                self._batch_event = self._environment.event()
                yield self._batch_event
            self._grant_waiting()
            tokens = sum(size for group in batch for _, size in group.spans)
            step = self._system.step
            host_s = step.host_token_s * tokens
            step_s = step.constant_s + step.token_s * tokens + host_s
            yield self._environment.timeout(step_s)
            self._computed_s += step_s
            self._host_s += host_s
            computed_s = self._environment.now
            if announcing is not None:
                yield announcing
            yield self._environment.timeout(self._system.versions.copied_s)
            self._published_s += self._environment.now - computed_s
            announcing = self._environment.process(self._announce(version + 1))
            self._record(batch, version)

    def _announce(self, version: int) -> Events:
        yield self._environment.timeout(self._system.versions.announced_s)
        self._newest, self._announced_s = version, self._environment.now
        announcement, self._announcement = self._announcement, self._environment.event()
        announcement.succeed()

    def _receive(self, worker: Worker) -> Events:
        """A worker that brings every newest version into its engine."""
        versions = self._system.versions
        while True:
            while worker.held_version == self._newest:
                yield self._announcement
            yield from self._call(self._system.event_loop.version_s)
            version, announced_s = self._newest, self._announced_s
            yield from self._fan_out.fetch(worker, version)
            yield self._environment.timeout(versions.applied_s)
            self._waiting[worker.held_version].pop(worker, None)
            self._fan_out_s = max(self._fan_out_s, self._environment.now - announced_s)
            worker.swap(version, self._environment.now, versions.pause_s)
            self._lease(worker)

    def _decode(self, worker: Worker, group: RunningGroup, begun_s: float) -> None:
        """Decode a group to its end, over pauses, and then submit it.

        There are millions of groups: callbacks take half of the time of a process for each.
        """
        left_s = group.ends_s - worker.decoding_time_s(self._environment.now)
        if left_s > 1e-9:
            self._after(left_s, partial(self._decode, worker, group, begun_s))
            return
        generated = worker.generated(group)
        loop = self._system.event_loop
        service_s = loop.group_s + loop.token_s * sum(group.lengths)
        submit = partial(self._submit, worker, group.grant_number, generated, begun_s, service_s)
        if service_s == 0.0:
            submit()
        else:
            self._after(self._served_after_s(service_s), submit)

    def _submit(
        self,
        worker: Worker,
        grant_number: int,
        generated: GeneratedGroup,
        begun_s: float,
        service_s: float,
    ) -> None:
        """Give the learner a group that its event loop has served."""
        self._loop_s += service_s
        is_one_dropped = self._ledger.accept(grant_number, generated)
        worker.free_places += generated.size
        self._place_s += generated.size * (self._environment.now - begun_s)
        if self._ledger.has_batch and not self._batch_event.triggered:
            self._batch_event.succeed()
        self._lease(worker)
        if is_one_dropped:
            self._grant_waiting()

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later."""
        timeout = self._environment.timeout(delay_s)
        assert timeout.callbacks is not None  # it has not passed
        timeout.callbacks.append(lambda _: action())

    def _answer_waiting(self) -> Events:
        """The event loop's work for workers that wait, once a second."""
        while True:
            due_s = self._environment.now + 1.0
            number = sum(len(waiting) for waiting in self._waiting.values())
            yield from self._call(number * self._system.event_loop.waiting_s)
            yield self._environment.timeout(max(0.0, due_s - self._environment.now))

    def _call(self, service_s: float) -> Events:
        """Occupy the learner's event loop; calls are served in the order in which they come."""
        if service_s == 0.0:
            return
        yield self._environment.timeout(self._served_after_s(service_s))
        self._loop_s += service_s

    def _served_after_s(self, service_s: float) -> float:
        """Queue a call at the event loop; return the seconds until it is served."""
        self._loop_free_s = max(self._loop_free_s, self._environment.now) + service_s
        return self._loop_free_s - self._environment.now

    def _lease(self, worker: Worker) -> None:
        """Grant a worker what is admissible; it waits for more while it has places for a group."""
        for number in self._ledger.grant(
            held_version=worker.held_version, free_places=worker.free_places
        ):
            group = worker.start(number, next(self._lengths), self._environment.now)
            self._decode(worker, group, self._environment.now)
        if worker.free_places >= self._system.group_size:
            self._waiting[worker.held_version][worker] = None
        else:
            self._waiting[worker.held_version].pop(worker, None)

    def _grant_waiting(self) -> None:
        """Grant waiting workers what has become admissible: those with the newest weights first."""
        for version in sorted(self._waiting, reverse=True):
            waiting = self._waiting[version]
            while waiting and self._ledger.is_admissible(version):
                self._lease(next(iter(waiting)))
            if not waiting:
                del self._waiting[version]

    def _record(self, batch: list[GeneratedGroup], version: int) -> None:
        spans = [span for group in batch for span in group.spans]
        tokens = sum(size for _, size in spans)
        self.steps.append(
            SimulatedStep(
                ended_s=self._environment.now,
                tokens=tokens,
                lag_mean=sum((version - own) * size for own, size in spans) / tokens,
                lag_max=version - min(own for own, _ in spans),
                computed_s=self._computed_s,
                host_s=self._host_s,
                published_s=self._published_s,
                loop_s=self._loop_s,
                place_s=self._place_s,
                sent_bytes=self._fan_out.sent_bytes,
                dropped=self._ledger.num_dropped,
                fan_out_s=self._fan_out_s,
            )
        )


def drawn_lengths(generation: Generation, group_size: int, seed: int) -> Iterator[list[int]]:
    """Yield the lengths of the responses of one group after another, without end."""
    lengths = generation.lengths
    rng = np.random.default_rng(seed)
    while True:
        drawn = rng.lognormal(np.log(lengths.median), lengths.sigma, (_ROWS, group_size))
        yield from np.clip(np.ceil(drawn), 1, lengths.most).astype(int).tolist()
