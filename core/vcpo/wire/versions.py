"""Numbers of policy versions: which start of the learner made one, and after how many steps.

A run begins with version 0, and each optimizer step raises it by one. A learner that is started
again goes on from a checkpoint, and so takes steps a second time; its versions count from the next
billion: version 2,000,000,031 is that of step 31 since the second restart. So a number names one
policy for ever, later versions have larger numbers, and an age is a difference of steps.
"""

from typing import Final

_VERSIONS_OF_A_START: Final = 10**9
"""More than a run has steps."""


def version_of(restarts: int, step: int) -> int:
    """Return the version after so many steps, as the learner after so many restarts makes it."""
    return restarts * _VERSIONS_OF_A_START + step


def step_of(policy_version: int) -> int:
    """Return the optimizer steps behind a version."""
    return policy_version % _VERSIONS_OF_A_START


def age_steps(policy_version: int, newest: int) -> int:
    """Return how many steps a version is older than another one.

    0 if it has more steps behind it: then a restart has undone some of them.
    """
    return max(0, step_of(newest) - step_of(policy_version))
