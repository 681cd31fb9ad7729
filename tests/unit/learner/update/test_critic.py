import io

import pytest
import torch

from vcpo_learner.update.token_inputs import LEARNING_RATE, Critic

CPU = torch.device("cpu")
ON_POLICY = [torch.zeros(2)]
STATES = [torch.tensor([[1.0, 3.0], [1.0, -1.0]])]
"""One response of two tokens, two features each."""


def as_lists(advantages):
    return [row.tolist() for row in advantages]


def weights(critic):
    head = critic.state_dict()["head"]
    return head["weight"].flatten().tolist(), head["bias"].item()


def fit_critic(steps, *, states, rewards):
    """A critic that saw the same responses of one token each, on policy, this many times."""
    critic = Critic(states[0].shape[1], CPU)
    for _ in range(steps):
        critic.advantages(states, [torch.zeros(1)] * len(states), rewards)
    return critic


def test_before_it_learned_every_token_of_a_response_is_worth_its_reward():
    assert as_lists(Critic(2, CPU).advantages(STATES, ON_POLICY, [0.75])) == [[0.75, 0.75]]


def test_a_token_half_as_likely_as_when_it_was_sampled_counts_half():
    log_ratios = [torch.tensor([1.0, 0.5], dtype=torch.float64).log()]
    found = Critic(2, CPU).advantages(STATES, log_ratios, [1.0])
    assert as_lists(found) == [pytest.approx([0.5, 0.5])]


def test_its_first_step_goes_up_where_the_features_go_with_the_targets():
    # The gradient is -mean(target * feature): -(1 + 1) / 2, -(3 - 1) / 2 and -1 for the bias;
    # Adam's first step has the size of the learning rate in each.
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    weight, bias = weights(critic)
    assert [*weight, bias] == pytest.approx([LEARNING_RATE] * 3, rel=1e-4)


def test_advantages_are_those_of_the_head_before_the_step():
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    # V = lr * (1 + 3 + 1) and lr * (1 - 1 + 1); on policy the advantage is the reward less V.
    (found,) = critic.advantages(STATES, ON_POLICY, [1.0])
    assert found.tolist() == pytest.approx([1.0 - 5 * LEARNING_RATE, 1.0 - LEARNING_RATE], rel=1e-6)


def test_a_reward_that_the_states_foretell_is_no_advantage():
    states = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    critic = fit_critic(2000, states=states, rewards=[1.0, 0.0])
    (good,), (bad,) = critic.advantages(states, [torch.zeros(1)] * 2, [1.0, 0.0])
    assert abs(good) < 0.05
    assert abs(bad) < 0.05


def test_no_gradient_reaches_the_policy():
    states = [STATES[0].clone().requires_grad_()]
    Critic(2, CPU).advantages(states, ON_POLICY, [1.0])
    assert states[0].grad is None


def test_states_of_half_precision_are_read():
    states = [STATES[0].to(torch.bfloat16)]
    assert as_lists(Critic(2, CPU).advantages(states, ON_POLICY, [1.0])) == [[1.0, 1.0]]


def test_responses_of_different_length_keep_their_rows():
    states = [torch.ones(1, 2), torch.ones(3, 2)]
    found = Critic(2, CPU).advantages(states, [torch.zeros(1), torch.zeros(3)], [0.25, 0.5])
    assert as_lists(found) == [[0.25], [0.5, 0.5, 0.5]]


def test_a_restored_critic_continues_like_the_saved_one():
    critic = Critic(2, CPU)
    critic.advantages(STATES, ON_POLICY, [1.0])
    file = io.BytesIO()
    torch.save(critic.state_dict(), file)
    file.seek(0)
    restored = Critic(2, CPU)
    restored.load_state_dict(torch.load(file, weights_only=True))
    for each in (critic, restored):
        each.advantages(STATES, ON_POLICY, [0.5])
    assert weights(restored) == weights(critic)
