"""All children of a run, in the order in which they are created."""

from __future__ import annotations

from vcpo_operator.children.account import service_account
from vcpo_operator.children.config import run_config_map
from vcpo_operator.children.credential import certificates_secret, keys_secret
from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.disruption import learner_budget, rollout_budget
from vcpo_operator.children.learner import learner_stateful_set
from vcpo_operator.children.manifest import Child, Parent
from vcpo_operator.children.monitor import pod_monitor
from vcpo_operator.children.network import network_policy
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.children.service import learner_service, ranks_service
from vcpo_operator.children.storage import checkpoint_claim


def build_children(
    parent: Parent,
    defaults: OperatorDefaults,
    *,
    with_learner: bool = True,
    with_rollouts: bool = True,
    running: bool = True,
) -> tuple[Child, ...]:
    """Build every child.

    What pods need comes before the pods; isolation and budgets come before what they protect.
    with_learner, with_rollouts: False when the run's clean-up policy has removed them.
    running: False while the run is suspended.
    Raises: ValueError when a user's template cannot be merged.
    """
    if not with_learner and not with_rollouts:
        return (checkpoint_claim(parent),)
    spec = parent.run.spec
    budgets: list[Child] = []
    workloads: list[Child] = []
    if with_learner:
        budgets.append(learner_budget(parent))
        workloads.append(learner_stateful_set(parent, defaults, running=running))
    if with_rollouts:
        budgets += [rollout_budget(parent, group.name) for group in spec.rollouts]
        workloads += [rollout_deployment(parent, group, defaults) for group in spec.rollouts]
    children = (
        certificates_secret(parent),
        keys_secret(parent),
        run_config_map(parent),
        checkpoint_claim(parent),
        learner_service(parent),
        ranks_service(parent),
        service_account(parent),
        network_policy(parent, defaults.ingress_sources),
        pod_monitor(parent, defaults),
        *(budgets if spec.pods.disruption_budgets else ()),
        *workloads,
    )
    return tuple(child for child in children if child is not None)
