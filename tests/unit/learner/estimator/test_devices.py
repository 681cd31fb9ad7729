"""A record lies on the learner's device, which is a GPU in most runs: its tensors stay there.

With "meta" as the default device, a tensor that is made without the record's device fails at the
first operation with one of the record's tensors, as a tensor of the CPU does on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from tests.unit.learner.estimator.batches import random_batch
from vcpo.algo.methods import LOSS_CONFIGS
from vcpo_learner.estimator.clipping import second_moment_mask
from vcpo_learner.estimator.loss import regularized_rewards, shaped_rewards, token_coefficients
from vcpo_learner.update.batch_statistics import block_moments, token_sums


@pytest.mark.parametrize("config", LOSS_CONFIGS.values(), ids=map(str, LOSS_CONFIGS))
def test_every_loss_computes_on_the_device_of_the_record(config):
    record, advantages = random_batch()
    if config.has_critic:
        record = replace(record, advantages=record.spread(record.rewards.new_tensor(advantages)))
    with torch.device("meta"):
        regularized_rewards(shaped_rewards(record, config), record, config)
        found = token_coefficients(record, advantages, config)
    assert found.values.device == record.learner_logprobs.device


def test_no_token_to_drop_is_on_the_device_of_the_record_too():
    log_ratios = torch.zeros(0)
    with torch.device("meta"):
        assert second_moment_mask(log_ratios, 0.04).device == log_ratios.device


def test_statistics_of_tokens_compute_on_the_device_of_the_record():
    record, _ = random_batch()
    with torch.device("meta"):
        assert token_sums(record.log_ratios).weights.count == record.size.tokens
        blocks = [[length] for length in record.num_tokens]
        assert block_moments(record.log_ratios, blocks).count == record.size.trajectories
