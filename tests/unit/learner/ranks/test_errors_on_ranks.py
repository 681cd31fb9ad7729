"""Steps that rank 0 leads, and a step after one that failed, against the same steps alone."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.ranks import run_ranks
from vcpo.api import VCPORunSpec
from vcpo_learner.forward.policy_network import PolicyNetwork
from vcpo_learner.ranks.commands import Commands
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.ranks.sharding import place_model, whole
from vcpo_learner.update.policy_update import PolicyUpdate

CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
SPEC = VCPORunSpec.model_validate(
    {"model": {"name": "tiny"}, "environment": {"name": "countdown"}, "steps": 9}
)


def test_what_rank_0_calls_is_done_on_every_rank():
    groups = sampled_groups(seeded_model(llama))

    def parameters(ranks):
        network = PolicyNetwork(seeded_model(llama))
        place_model(network, ranks, SPEC.learner.number_format)
        commands = Commands(ranks)
        update = PolicyUpdate(network, SPEC, PAD, ranks=ranks, commands=commands)
        if ranks.is_leader:
            state = update.state_dict()
            update.begin(groups, policy_version=0)
            assert update.finish(groups[-1]).skipped is None
            update.load_state_dict(state)
            commands.stop()
        else:
            commands.follow()
        assert update.is_whole
        return {name: whole(each.detach()) for name, each in network.model.named_parameters()}

    expected = parameters(Ranks(device=torch.device("cpu")))
    first, second = run_ranks(2, parameters)
    for name, each in expected.items():
        torch.testing.assert_close(first[name], each, rtol=1e-4, atol=1e-6)
        assert torch.equal(first[name], second[name])


def fail(*_):
    raise torch.OutOfMemoryError("the backward pass")


def failed_update(ranks, groups):
    """An update, and its network, after an error in its first backward pass."""
    network = PolicyNetwork(seeded_model(llama))
    place_model(network, ranks, SPEC.learner.number_format)
    update = PolicyUpdate(network, SPEC, PAD, ranks=ranks)
    handle = network.model.model.layers[0].mlp.register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="the backward pass"):
        update.begin(groups, policy_version=0)
    handle.remove()
    return update, network


@pytest.mark.skipif(not CAN_RESET, reason="PyTorch before 2.13 cannot reset FSDP")
def test_a_step_after_an_error_in_a_backward_pass_has_the_right_gradient():
    groups = sampled_groups(seeded_model(llama))

    def gradient(ranks):
        update, network = failed_update(ranks, groups)
        assert update.is_whole
        update.begin(groups, policy_version=0)
        return {name: whole(each.grad) for name, each in network.model.named_parameters()}

    network = PolicyNetwork(seeded_model(llama))
    PolicyUpdate(network, SPEC, PAD).begin(groups, policy_version=0)
    for found in run_ranks(2, gradient):
        for name, each in network.model.named_parameters():
            torch.testing.assert_close(found[name], each.grad, rtol=1e-4, atol=1e-7)


def test_an_update_that_cannot_be_reset_raises_its_error_and_is_not_whole():
    groups = sampled_groups(seeded_model(llama))

    def is_whole(ranks):
        if CAN_RESET:
            del FSDPModule.reset_iter_state  # as PyTorch before 2.13, in this process
        return failed_update(ranks, groups)[0].is_whole

    assert run_ranks(2, is_whole) == [False, False]
