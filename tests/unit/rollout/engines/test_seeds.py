"""Seeds of responses and tokens."""

from vcpo.wire.v1 import work_pb2
from vcpo_rollout.engines.seeds import response_seed, token_seed


def test_seeds_differ_between_leases_responses_and_tokens():
    leases = [work_pb2.Lease(sampling=work_pb2.Sampling(seed=seed)) for seed in (0, 1, 2**64 - 1)]
    responses = [response_seed(lease, number) for lease in leases for number in range(8)]
    tokens = {token_seed(response, at) for response in responses for at in range(64)}
    assert len(tokens) == 3 * 8 * 64
    assert all(0 <= seed < 2**63 for seed in tokens)


def test_a_lease_without_a_seed_leaves_the_draw_to_the_engine():
    assert response_seed(work_pb2.Lease(), 0) is None
