"""The model of `benchmarks.simulate`: cases by hand, laws of queues, and what real runs showed."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from simpy import Environment

from benchmarks.async_speedup.hardware import REFERENCE
from benchmarks.async_speedup.trial import Setting
from benchmarks.harness.timed_engine import Lengths
from benchmarks.simulate import scaling
from benchmarks.simulate.cluster import MODELS, Cluster, Workload
from benchmarks.simulate.constants import FLOPS
from benchmarks.simulate.exchange import MicroStep
from benchmarks.simulate.fan_out import FanOut
from benchmarks.simulate.figures import Limit, figures
from benchmarks.simulate.local_run import Comparison, Course, paced_system, simulated_course
from benchmarks.simulate.simulation import Simulation
from benchmarks.simulate.system import EventLoop, Generation, Step, System, Versions
from benchmarks.simulate.worker import Worker

# Every response has ten tokens and takes a second: the median is far beyond the longest.
TEN_TOKENS = Lengths(median=1e6, sigma=0.1, most=10)
ONE_SECOND = Generation(lengths=TEN_TOKENS, token_s=0.1, places=1)
ONE_WORKER = System(
    workers=1,
    generation=ONE_SECOND,
    prompts_per_step=1,
    group_size=1,
    max_policy_lag_steps=0,
    step=Step(constant_s=0.25),
)


def ends(system: System, num_steps: int = 3) -> list[float]:
    return [step.ended_s for step in Simulation(system, seed=0).run(num_steps)]


def test_without_lag_a_step_takes_the_time_of_a_response_and_of_the_learner():
    assert ends(ONE_WORKER) == pytest.approx([1.25, 2.5, 3.75])


def test_with_lag_the_worker_generates_while_the_learner_computes():
    assert ends(replace(ONE_WORKER, max_policy_lag_steps=1)) == pytest.approx([1.25, 2.25, 3.25])


def test_a_step_takes_longer_for_more_tokens():
    # 0.05 + 10 * (0.015 + 0.005) = 0.25
    step = Step(constant_s=0.05, token_s=0.015, host_token_s=0.005)
    assert ends(replace(ONE_WORKER, step=step)) == pytest.approx([1.25, 2.5, 3.75])
    assert figures(replace(ONE_WORKER, step=step)).learner_host == pytest.approx(0.05 / 1.25)


@pytest.mark.parametrize(
    ("swaps_in_flight", "lag"),
    [
        # The second response runs from 1.0 to 2.0. Version 1 is there at 1.25, after three tokens
        # were begun, at 1.0, 1.1 and 1.2. All are trained on as the second step.
        pytest.param(True, 0.3, id="three of ten tokens are of version 0"),
        pytest.param(False, 1.0, id="all tokens have the version of the start"),
    ],
)
def test_a_token_has_the_version_that_was_in_use_when_it_was_begun(swaps_in_flight, lag):
    generation = replace(ONE_SECOND, swaps_in_flight=swaps_in_flight)
    steps = Simulation(
        replace(ONE_WORKER, generation=generation, max_policy_lag_steps=1), seed=0
    ).run(2)
    assert [step.lag_mean for step in steps] == pytest.approx([0.0, lag])
    assert [step.lag_max for step in steps] == [0, 1]


def test_a_pause_delays_what_runs():
    paused = replace(ONE_WORKER, max_policy_lag_steps=1, versions=Versions(pause_s=0.5))
    # The pause is from 1.25 to 1.75, so the second response ends at 2.5.
    assert ends(paused, 2) == pytest.approx([1.25, 2.75])


def test_a_group_that_begins_in_a_pause_begins_with_the_new_version():
    worker = Worker("worker", ONE_SECOND)
    worker.swap(1, 1.0, 0.5)
    group = worker.start(0, [10], 1.2)
    assert group.ends_s - worker.decoding_time_s(1.5) == pytest.approx(1.0)
    assert worker.generated(group).spans == ((1, 10),)


def test_responses_may_have_tokens_of_many_versions():
    worker = Worker("worker", ONE_SECOND)
    group = worker.start(0, [10, 4], 0.0)
    worker.swap(1, 0.2, 0.0)
    worker.swap(2, 0.75, 0.0)
    # The long one has 2, 6 and 2 tokens of the versions, the short one 2 and 2.
    assert worker.generated(group).spans == ((0, 4), (1, 8), (2, 2))


def test_where_the_learner_is_slower_every_batch_is_as_old_as_the_limit_allows():
    generation = replace(ONE_SECOND, swaps_in_flight=False)
    system = replace(ONE_WORKER, workers=4, generation=generation, max_policy_lag_steps=5)
    steps = Simulation(replace(system, step=Step(constant_s=2.0)), seed=0).run(20)
    assert steps[-1].lag_mean == 5.0
    assert max(step.lag_max for step in steps) == 5
    assert steps[-1].ended_s - steps[-2].ended_s == pytest.approx(2.0)


def test_a_publication_that_is_slower_than_a_step_sets_the_time_of_a_step():
    versions = Versions(copied_s=0.5, announced_s=3.0)
    found = figures(replace(ONE_WORKER, max_policy_lag_steps=8, workers=8, versions=versions))
    assert found.step_s == pytest.approx(3.5)
    assert found.publication_wait == pytest.approx(3.25 / 3.5)
    assert found.limit is Limit.PUBLICATION


@pytest.mark.parametrize(
    ("workers", "groups_per_s", "limit"),
    [
        # A worker generates for 1 s, and its group is taken in for 0.5 s: min(N / 1.5, 1 / 0.5).
        pytest.param(1, 2 / 3, Limit.WORKERS, id="one"),
        pytest.param(2, 4 / 3, Limit.WORKERS, id="two"),
        pytest.param(3, 2.0, Limit.EVENT_LOOP, id="three"),
        pytest.param(12, 2.0, Limit.EVENT_LOOP, id="twelve"),
    ],
)
def test_a_closed_queue_is_as_fast_as_its_workers_or_as_its_server(workers, groups_per_s, limit):
    loop = EventLoop(group_s=0.5)
    system = replace(
        ONE_WORKER, workers=workers, step=Step(), event_loop=loop, max_policy_lag_steps=40
    )
    found = figures(system)
    assert found.tokens_per_s == pytest.approx(10 * groups_per_s)
    assert found.event_loop_busy == pytest.approx(0.5 * groups_per_s)  # the utilization law
    assert found.limit is limit


def test_workers_that_wait_cost_the_event_loop_its_time():
    # Without lag one group is in flight, so of 101 workers 100 wait, for 0.002 s a second each.
    loop = EventLoop(waiting_s=0.002)
    end = Simulation(replace(ONE_WORKER, workers=101, event_loop=loop), seed=0).run(80)[-1]
    assert end.loop_s / end.ended_s == pytest.approx(0.2, rel=0.02)


def test_every_worker_costs_the_event_loop_time_for_every_version():
    loop = EventLoop(version_s=0.01)
    found = figures(replace(ONE_WORKER, workers=5, event_loop=loop, max_policy_lag_steps=1))
    assert found.event_loop_busy == pytest.approx(5 * 0.01 / found.step_s)


LONG_TAIL = paced_system(Setting(lag=64, workers=2, steps=0, seed=0), REFERENCE)


def test_a_synchronous_step_waits_for_the_longest_response_of_its_batch():
    step_s = ends(replace(LONG_TAIL, max_policy_lag_steps=0), 200)[-1] / 200
    assert step_s == pytest.approx(REFERENCE.synchronous_step_s(), rel=0.05)


def test_without_a_lag_limit_the_places_set_the_time_of_a_step_and_littles_law_holds():
    steps = Simulation(LONG_TAIL, seed=0).run(600)
    step_s = (steps[-1].ended_s - steps[99].ended_s) / 500
    assert step_s == pytest.approx(REFERENCE.asynchronous_step_s(2), rel=0.03)
    # Little: places in use = responses a second x seconds for which one holds its place.
    held_s = REFERENCE.longest_s(8)
    in_use = (steps[-1].place_s - steps[99].place_s) / (500 * step_s)
    assert in_use == pytest.approx(32 / step_s * held_s, rel=0.03)
    assert in_use == pytest.approx(48, rel=0.02)
    assert steps[-1].dropped == 0


@pytest.mark.parametrize(
    ("workers", "lag", "step_s", "lag_mean"),
    [
        (2, 0, 2.85, 0.0),
        (2, 1, 1.38, 0.7),
        (2, 2, 1.06, 1.4),
        (2, 8, 0.90, 2.2),
        (6, 0, 2.85, 0.0),
        (6, 1, 1.46, 0.6),
        (6, 2, 0.94, 1.4),
        (6, 8, 0.65, 7.6),
    ],
)
def test_the_model_gives_what_real_runs_showed(workers, lag, step_s, lag_mean):
    """Runs of `python -m benchmarks.async_speedup` on two cores, of one seed each."""
    setting = Setting(workers=workers, lag=lag, steps=96, seed=0)
    found = simulated_course(setting, REFERENCE.faster(40), num_runs=4)
    assert found.seconds_per_step == pytest.approx(step_s, rel=0.15)
    assert found.lag_mean == pytest.approx(lag_mean, abs=0.25)


def fetched(
    held: Mapping[str, int], newest: int, versions: Versions, sent_byte_s: float = 0.0
) -> tuple[list[float], int]:
    """When each worker has the newest version if all ask at once, and what the learner sent."""
    environment, arrived = Environment(), []
    versions = replace(versions, sent_byte_s=sent_byte_s)
    system = replace(ONE_WORKER, workers=len(held), versions=versions)
    fan_out = FanOut(environment, system)

    def fetch(name, version):
        worker = Worker(name, ONE_SECOND)
        worker.swap(version, 0.0, 0.0)
        yield from fan_out.fetch(worker, newest)
        arrived.append(environment.now)

    for name, version in held.items():
        environment.process(fetch(name, version))
    environment.run()
    return sorted(arrived), fan_out.sent_bytes


# A host sends 100 B/s, so a delta takes 1 s.
SMALL = Versions(full_bytes=1600, delta_bytes=100, link_bytes_per_s=100.0)


def test_workers_share_the_link_of_the_learner():
    arrived, sent_bytes = fetched(dict.fromkeys("abcd", 0), 1, SMALL)
    # 64 pieces of each, by turns: the last pieces are sent one after the other.
    assert arrived == pytest.approx([4.0 - 3 / 64, 4.0 - 2 / 64, 4.0 - 1 / 64, 4.0])
    assert sent_bytes == 400


def test_a_store_serves_each_worker_over_its_own_link_and_is_written_once():
    arrived, sent_bytes = fetched(dict.fromkeys("abcd", 0), 1, replace(SMALL, are_stored=True))
    assert arrived == pytest.approx([1.0] * 4)
    # A full set for every four deltas of a sixteenth of it.
    assert sent_bytes == 100 + 1600 / 4


def test_a_worker_that_is_behind_fetches_deltas_up_to_a_quarter_of_the_full_set():
    # Three deltas have 300 bytes and four 400; a quarter of the full set is 400.
    assert fetched({"a": 0}, 3, SMALL) == ([pytest.approx(3.0)], 300)
    assert fetched({"a": 0}, 4, SMALL) == ([pytest.approx(16.0)], 1600)


def test_a_sender_without_cpu_time_sends_slower_than_its_link():
    assert fetched({"a": 0}, 1, SMALL, sent_byte_s=0.05)[0] == [pytest.approx(5.0)]


def test_two_workers_share_the_core_of_the_sender():
    # 64 pieces of each, by turns: the last piece of the first is sent before that of the second.
    arrived, _ = fetched({"a": 0, "b": 0}, 1, SMALL, sent_byte_s=0.05)
    assert arrived == pytest.approx([10.0 - 5.0 / 64, 10.0])


def busy_system(workers: int) -> System:
    """A system whose learner takes ten groups a second; a worker generates one."""
    return replace(ONE_WORKER, workers=workers, step=Step(constant_s=0.1), max_policy_lag_steps=40)


def test_the_bottleneck_is_where_throughput_falls_below_nine_tenths_of_linear():
    # 11 workers: 10 / 11 = 0.91; 12 workers: 10 / 12 = 0.83.
    found = scaling.bottleneck(busy_system, start=1)
    assert found == scaling.Bottleneck(workers=12, limit=Limit.LEARNER)


def test_a_bottleneck_moves_with_its_cause_and_with_nothing_else():
    def workers(lever) -> int | None:
        found = scaling.bottleneck(lambda number: lever(busy_system(number)), start=1)
        return found and found.workers

    # The step takes as long for a batch of any size: twice the groups are twice as many a second.
    moved = {name: workers(lever) for name, lever in scaling.LEVERS.items()}
    assert moved["batch_twice_as_large"] == pytest.approx(23, rel=0.1)
    assert moved["lag_limit_twice_as_high"] == moved["receivers_four_times_as_fast"] == 12


def test_a_system_without_a_bottleneck_has_none(monkeypatch):
    monkeypatch.setattr(scaling, "MOST_WORKERS", 48)

    def system(workers: int) -> System:
        return replace(busy_system(workers), step=Step(), prompts_per_step=workers)

    assert scaling.bottleneck(system, start=1) is None


def test_without_a_tail_asynchrony_overlaps_a_step_and_the_generation_of_a_batch():
    assert scaling.async_over_sync(0.1, 1) == pytest.approx(2.0, abs=0.1)


def test_a_long_tail_makes_asynchrony_worth_more_and_a_larger_lag_limit_too():
    gain = {(sigma, k): scaling.async_over_sync(sigma, k) for sigma in (0.1, 1.0) for k in (1, 4)}
    assert gain[1.0, 4] > gain[1.0, 1] > gain[0.1, 1]
    assert gain[1.0, 4] > 1.2 * gain[0.1, 4]


def test_the_learners_share_of_a_synchronous_step_limits_what_asynchrony_gains():
    assert scaling.paper_gain(0.55) == pytest.approx(1 / 0.55, rel=0.01)
    assert scaling.paper_gain(0.6) == pytest.approx(1 / 0.6, rel=0.01)


def test_a_worker_reads_its_weights_and_contexts_for_every_token():
    seven, seventy = (
        Cluster(model=model, workers=1, learner_gpus=model.learner_gpus) for model in MODELS
    )
    # 15.2 GB and 64 x 2,048 x 57,344 B at 2.01 TB/s; 141.2 GB and 42.9 GB at four times that.
    assert seven.decoding_token_s() == pytest.approx(0.01130, rel=0.001)
    assert seventy.decoding_token_s() == pytest.approx(0.02291, rel=0.001)


def test_a_learner_multiplies_eight_times_for_each_parameter_and_token():
    (seven, _) = MODELS
    two = Cluster(model=seven, workers=1, learner_gpus=2)
    # 8 x 7.6e9 / (2 x 0.4 x 989e12) = 76.8 us
    assert two.learner_token_s() == pytest.approx(76.8e-6, rel=0.001)


@pytest.mark.parametrize(
    ("context_tokens", "seven_s", "seventy_s"),
    # 64 contexts, 2 operations for each parameter and 2 L H c for the keys and values before a
    # token: 131,072 x 15.61e9 / 395.6e12, and 131,072 x 143.9e9 / (4 x 395.6e12); then at 16,384
    # 1,048,576 x 18.49e9 / 395.6e12, and 1,048,576 x 162.7e9 / (4 x 395.6e12).
    [(2048, 5.17, 11.92), (16_384, 49.0, 107.8)],
)
def test_a_version_makes_a_worker_read_its_contexts_again(context_tokens, seven_s, seventy_s):
    workload = Workload(context_tokens=context_tokens)
    for model, expected_s in zip(MODELS, (seven_s, seventy_s), strict=True):
        one = Cluster(model=model, workers=1, learner_gpus=8, workload=workload)
        assert one.rereading_s() == pytest.approx(expected_s, rel=0.002)
        assert one.system().versions.pause_s == one.rereading_s()
        assert scaling.with_kept_keys(one.system()).versions.pause_s == 0.0


@pytest.mark.parametrize(
    ("link_bytes_per_s", "waited_for_s", "beside_s", "two_passes_s"),
    [(2e9, 6.0, 4.0, 8.0), (1e9, 8.0, 6.0, 8.0), (0.5e9, 12.0, 12.0, 12.0)],
)
def test_sums_sent_beside_a_backward_pass_cost_what_the_link_needs_longer(
    link_bytes_per_s, waited_for_s, beside_s, two_passes_s
):
    # A pass of 4 s; half of 1e9 parameters goes to the other rank: 2 sums of 4 bytes are 4e9 bytes,
    # one is 2e9, and gathering for forward and backward is 2e9.
    model = replace(MODELS[0], parameters=1e9, learner_gpus=2)
    tokens = 4.0 * FLOPS.value / 8e9
    step = MicroStep(model=model, link_bytes_per_s=link_bytes_per_s, num_groups=1, tokens=tokens)
    assert step.one_pass_s(is_waited_for=True) == pytest.approx(waited_for_s)
    assert step.one_pass_s(is_waited_for=False) == pytest.approx(beside_s)
    assert step.two_passes_s() == pytest.approx(two_passes_s)


def test_a_learner_grows_with_its_workers():
    (seven, _) = MODELS
    system_of = scaling.grown_learner(seven, Workload(), fed_by=10)
    ten, hundred = system_of(10), system_of(100)
    assert (ten.prompts_per_step, hundred.prompts_per_step) == (256, 2560)
    assert hundred.versions.copied_s == pytest.approx(ten.versions.copied_s / 10)


def test_errors_are_relative_to_the_real_run_and_in_steps_per_second():
    real = Course(seconds_per_step=1.1, lag_mean=2.0, dropped_ratio=0.25)
    simulated = Course(seconds_per_step=1.0, lag_mean=2.2, dropped_ratio=0.2)
    setting = Setting(lag=4, workers=2, steps=64, seed=1)
    found = Comparison(setting=setting, real=real, simulated=simulated)
    assert (found.throughput_error, found.lag_error) == (pytest.approx(0.1), pytest.approx(0.1))
    assert "1.100 s a step, simulated 1.000; mean lag 2.00, simulated 2.20" in found.line()
