import pytest

from vcpo_rollout.environments import Split
from vcpo_rollout.environments.draws import draw_item, split_of


def draw(split, index, *, seed=0, propose=lambda random: random.randrange(10**9), **limits):
    return draw_item(seed=seed, split=split, index=index, propose=propose, key=str, **limits)


def test_same_seed_split_and_index_give_the_same_item():
    assert draw(Split.TRAIN, 7, seed=3) == draw(Split.TRAIN, 7, seed=3)


def test_seeds_indices_and_splits_give_different_items():
    items = {
        draw(Split.TRAIN, 0),
        draw(Split.TRAIN, 1),
        draw(Split.TRAIN, 0, seed=1),
        draw(Split.EVALUATION, 0),
    }
    assert len(items) == 4


@pytest.mark.parametrize("split", list(Split))
def test_drawn_items_belong_to_the_split_whatever_the_seed(split):
    items = [draw(split, index, seed=seed) for index in range(50) for seed in range(3)]
    assert {split_of(str(item)) for item in items} == {split}


def test_about_a_tenth_of_all_items_is_kept_for_evaluation():
    # 10,000 fair draws at 0.1 stay within five standard deviations (0.003 each) of it.
    kept = sum(split_of(str(item)) is Split.EVALUATION for item in range(10_000))
    assert 850 <= kept <= 1150


def test_failed_proposals_are_passed_over():
    proposals = iter([None, None, *range(100)])
    assert split_of(str(draw(Split.TRAIN, 0, propose=lambda _: next(proposals)))) is Split.TRAIN


def test_a_draw_without_any_item_gives_up_and_says_so():
    with pytest.raises(ValueError, match="no train item was found in 10 attempts; widen"):
        draw(Split.TRAIN, 0, propose=lambda _: None, max_proposals=10)


def test_negative_index_is_refused():
    with pytest.raises(ValueError, match="index: -1 is negative"):
        draw(Split.TRAIN, -1)
