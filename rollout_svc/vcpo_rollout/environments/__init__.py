"""Tasks that make prompts and judge responses: free of torch, tokens and clocks."""

from vcpo_rollout.environments.environment import (
    Environment,
    Message,
    Prompt,
    Split,
    make_environment,
)

__all__ = ["Environment", "Message", "Prompt", "Split", "make_environment"]
