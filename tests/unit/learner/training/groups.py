"""Groups of two trajectories, as the ledger hands them to a step."""

from dataclasses import replace

from tests.fixtures.learner.dispatcher import make_trajectory
from vcpo_learner.ledger.lease import Lease


def make_group(number, **changes):
    lease_id = f"train-now-{number}"
    members = tuple(replace(make_trajectory(lease_id, at), **changes) for at in range(2))
    return Lease(
        grant_number=number,
        group_number=number,
        lease_id=lease_id,
        worker_id="w",
        prompt_index=10 + number,
        accepted=dict(enumerate(members)),
    )
