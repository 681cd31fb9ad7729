import json
import math

import pytest

from vcpo.algo import EssWindow, WeightMoments


def batch(*weights):
    return WeightMoments.of([math.log(weight) for weight in weights])


def test_the_window_pools_the_weights_of_its_batches():
    # 1, 1 and 1, 3 together: 36 / (4 * 12)
    window = EssWindow().observe(batch(1, 1)).observe(batch(1, 3))
    assert window.ess_ratio == pytest.approx(0.75, rel=1e-12)


def test_the_oldest_batch_leaves_a_full_window():
    window = EssWindow(size=2).observe(batch(1, 100)).observe(batch(1, 1)).observe(batch(1, 1))
    assert window.ess_ratio == pytest.approx(1.0, rel=1e-12)


def test_a_pool_can_show_less_than_a_batch_can():
    window = EssWindow(size=4)
    for weights in [(1e6, 1), (1, 1), (1, 1), (1, 1)]:
        window = window.observe(batch(*weights))
    assert window.ess_ratio == pytest.approx(1 / 8, rel=1e-4)


def test_nothing_is_said_before_the_first_batch():
    assert (EssWindow().ess_ratio, EssWindow().pooled) == (None, None)


def test_observing_leaves_the_earlier_window_as_it_was():
    before = EssWindow().observe(batch(1, 2))
    before.observe(batch(5, 5))
    assert before == EssWindow().observe(batch(1, 2))


def test_batches_survive_a_checkpoint():
    before = EssWindow().observe(batch(1, 2)).observe(batch(3, 7, 2))
    assert EssWindow().restored(json.loads(json.dumps(before.to_dict()))) == before


def test_a_smaller_window_keeps_the_newest_batches_of_a_checkpoint():
    state = EssWindow().observe(batch(1, 100)).observe(batch(1, 1)).to_dict()
    assert EssWindow(size=1).restored(state).batches == (batch(1, 1),)


def test_a_state_of_another_form_is_refused():
    with pytest.raises(ValueError, match="with 'batches'"):
        EssWindow().restored({})


def test_a_window_of_no_batches_is_refused():
    with pytest.raises(ValueError, match="size is 0"):
        EssWindow(size=0)
