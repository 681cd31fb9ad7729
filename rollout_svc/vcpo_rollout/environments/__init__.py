"""Tasks that make prompts and judge responses: free of torch, tokens and clocks."""

from vcpo_rollout.environments.environment import Environment, Prompt, Split, make_environment

__all__ = ["Environment", "Prompt", "Split", "make_environment"]
