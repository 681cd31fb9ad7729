"""`python -m vcpo_rollout`: runs one rollout worker of a run."""

from vcpo.service.process import run_service

if __name__ == "__main__":
    run_service("vcpo_rollout.command")
