"""All children that a run wants, in the order in which they are made."""

from __future__ import annotations

from dataclasses import dataclass, field

from vcpo.spec.cluster import Scaling
from vcpo_operator.children.account import service_account
from vcpo_operator.children.config import run_config_map
from vcpo_operator.children.credential import token_secret
from vcpo_operator.children.disruption import disruption_budgets
from vcpo_operator.children.learner import learner_stateful_set
from vcpo_operator.children.manifest import Child, Parent
from vcpo_operator.children.monitor import pod_monitor
from vcpo_operator.children.network import IngressSources, network_policy
from vcpo_operator.children.rollout import rollout_deployment
from vcpo_operator.children.scaler import rollout_scaler
from vcpo_operator.children.service import learner_service
from vcpo_operator.children.storage import checkpoint_claim


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDefaults:
    """What a run that says nothing gets from the operator's own settings."""

    learner_image: str
    rollout_image: str
    ingress_sources: IngressSources = field(default_factory=IngressSources)
    """Who is let in to runs by their network policies."""


def build_children(
    parent: Parent,
    defaults: OperatorDefaults,
    *,
    with_learner: bool = True,
    with_rollouts: bool = True,
    running: bool = True,
) -> tuple[Child, ...]:
    """Build every child.

    What pods need to start comes before the pods, isolation and budgets before what they protect.
    with_learner, with_rollouts: False once the run's clean-up policy has removed them.
    running: False while the run is suspended.
    Raises: ValueError when a user's template cannot be merged.
    """
    spec = parent.run.spec
    image = defaults.rollout_image
    workloads: list[Child] = []
    if with_learner:
        replicas = 1 if running else 0
        workloads.append(
            learner_stateful_set(parent, default_image=defaults.learner_image, replicas=replicas)
        )
    if with_rollouts:
        external = (group for group in spec.rollouts if group.scaling is Scaling.EXTERNAL)
        workloads += [rollout_scaler(parent, group) for group in external]
        workloads += [
            rollout_deployment(parent, group, default_image=image) for group in spec.rollouts
        ]
    guards = (
        service_account(parent),
        network_policy(parent, defaults.ingress_sources),
        pod_monitor(parent),
    )
    if not workloads:
        return (checkpoint_claim(parent),)
    secret = token_secret(parent)
    return (
        *([] if secret is None else [secret]),
        run_config_map(parent),
        checkpoint_claim(parent),
        learner_service(parent),
        *(guard for guard in guards if guard is not None),
        *_budgets(parent, with_learner=with_learner, with_rollouts=with_rollouts),
        *workloads,
    )


def _budgets(parent: Parent, *, with_learner: bool, with_rollouts: bool) -> list[Child]:
    first, *others = disruption_budgets(parent) or (None,)
    if first is None:
        return []
    return [*([first] if with_learner else []), *(others if with_rollouts else [])]
