"""`python -m vcpo_learner`: train one run; as one of several ranks where torchrun starts it."""

from vcpo.service.process import run_service

if __name__ == "__main__":
    run_service("vcpo_learner.command")
