"""The time of an update by stage, on a clock that goes on by 1 s whenever it is read."""

from itertools import count

from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec, with_micro_batches
from vcpo_learner.update.policy_update import PolicyUpdate


def times(spec):
    model = seeded_model(llama)
    ticks = count()
    update = PolicyUpdate(model, spec, PAD, clock=lambda: float(next(ticks)))
    found = update.step(sampled_groups(model), policy_version=0).times
    return found.score_s, found.backward_s, found.optimizer_s


def test_a_batch_in_one_pass_is_all_backward_but_for_the_fresh_tokens():
    assert times(make_spec()) == (1.0, 2.0, 1.0)


def test_a_batch_in_two_passes_is_scored_first():
    spec = make_spec(method="m2po", learningRateRule="none")
    assert times(with_micro_batches(spec, 1)) == (2.0, 1.0, 1.0)
