"""Turns of the runs whose pods an upgrade of the operator replaces: one run after another."""

from __future__ import annotations

from typing import Final

from vcpo_operator.names import RunKey

LONGEST_TURN_S: Final = 900.0
"""Time after which the next run has its turn, even if the learner has not started again."""


class UpgradeTurns:
    """At most one run at a time. One owner: the reconciler.

    Learners that start together would load their models and checkpoints from the same storage. An
    operator that starts without this memory begins the turn of one more run.
    """

    def __init__(self) -> None:
        self._run: RunKey | None = None
        self._since_s = 0.0

    def take(self, key: RunKey, now_s: float) -> bool:
        """Whether a run has its turn; the turn begins if no other run has it."""
        if self._run not in {None, key} and now_s < self._since_s + LONGEST_TURN_S:
            return False
        if self._run != key:
            self._run, self._since_s = key, now_s
        return True

    def end(self, key: RunKey) -> None:
        """End the turn of a run, if it has it."""
        if self._run == key:
            self._run = None
