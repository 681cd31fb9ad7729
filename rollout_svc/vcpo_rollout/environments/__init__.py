"""Environments, which make prompts and judge responses, without torch and tokens."""

from vcpo_rollout.environments.environment import (
    Environment,
    Message,
    Prompt,
    Split,
    make_environment,
)

__all__ = ["Environment", "Message", "Prompt", "Split", "make_environment"]
