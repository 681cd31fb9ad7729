"""Compares mathematical expressions within a time limit; any thread may call it.

A candidate whose comparison takes too long counts as wrong.
"""

from typing import Final

from vcpo_rollout.environments.child_judge import ChildJudge

MAX_CHARACTERS: Final = 1024
"""Longest expression that is compared; a longer one is wrong."""

_CHILD: Final = "vcpo_rollout.environments.mathematics.judge_process"


class MathJudge:
    """Decides whether two expressions have the same meaning, in one process, one at a time.

    limit_s: Time for one comparison; after it the expressions count as different.
    """

    def __init__(self, limit_s: float = 10.0) -> None:
        self.child = ChildJudge(
            _CHILD,
            limit_s=limit_s,
            first={"reference": "0", "candidate": "0"},
            cure="install math-verify in the rollout image: pip install 'vcpo[rollout]'",
        )

    def is_equal(self, reference: str, candidate: str) -> bool:
        """Whether two expressions, in LaTeX or as plain numbers, have the same meaning.

        Raises:
            RuntimeError: when the process does not start because math-verify is missing.
        """
        if candidate == reference:
            return True
        if not 0 < len(candidate) <= MAX_CHARACTERS:
            return False
        return bool(self.child.ask({"reference": reference, "candidate": candidate}))
