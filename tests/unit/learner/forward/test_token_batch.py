from dataclasses import replace

import pytest
import torch

from tests.fixtures.learner.models import trajectory
from vcpo.wire.trajectory import TokenSpan
from vcpo_learner.forward.token_batch import token_batch

CPU = torch.device("cpu")
SHORT = trajectory(0, prompt=(3,), response=(5,))
LONG = trajectory(1, prompt=(3, 4), response=(5, 6))


def test_prompt_and_response_stand_side_by_side_and_padding_right_of_them():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.input_ids.tolist() == [[3, 5, 9, 9], [3, 4, 5, 6]]


def test_padding_is_not_attended_to():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_only_response_tokens_are_trained_on():
    batch = token_batch([SHORT, LONG], 9, CPU)
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]


def test_tokens_that_the_environment_wrote_are_read_and_not_trained_on():
    sampled = trajectory(2, prompt=(3,), response=(5, 8, 9, 6), logprobs=(-1.0, -2.0))
    one = replace(sampled, inserted_spans=(TokenSpan(start=1, num_tokens=2),))
    batch = token_batch([one], 0, CPU)
    assert batch.input_ids.tolist() == [[3, 5, 8, 9, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1]]
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 0, 1]]
    assert batch.place_trained(torch.tensor([-1.0, -2.0])).tolist() == [[0.0, -1.0, 0.0, 0.0, -2.0]]
    assert batch.select_trained(batch.input_ids).tolist() == [5, 6]


def test_a_trajectory_without_prompt_is_named():
    with pytest.raises(ValueError, match="prompt_token_ids of trajectory 'lease/7' is empty"):
        token_batch([trajectory(7, prompt=())], 0, CPU)


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="trajectories is empty"):
        token_batch([], 0, CPU)
