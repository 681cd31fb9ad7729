"""Runs and trajectories that benchmarks make up."""

from collections.abc import Sequence
from typing import Any

from vcpo.api import VCPORunSpec
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan


def run_spec(**sections: Any) -> VCPORunSpec:
    """Return a run that no model is loaded for; sections: by their names in a file."""
    base = {"model": {"name": "none"}, "environment": {"name": "countdown"}, "steps": 1_000_000}
    return VCPORunSpec.model_validate(base | sections)


def trajectory(
    name: object,
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[float],
    **others: Any,
) -> Trajectory:
    """Return a complete response of version 0, unless others say more."""
    spans = (VersionSpan(policy_version=0, num_tokens=len(response)),)
    return Trajectory(
        trajectory_id=str(name),
        prompt_token_ids=tuple(prompt),
        response_token_ids=tuple(response),
        rollout_logprobs=tuple(logprobs),
        **{"version_spans": spans, "reward": 0.0, "finish_reason": FinishReason.STOP, **others},
    )
