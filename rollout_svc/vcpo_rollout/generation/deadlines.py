"""When a worker cuts what it is answering, so that it is handed back before its lease expires."""

from __future__ import annotations

HAND_BACK_S = 10.0
"""Time to cut what is under way and hand it back; a pod has 30 s after its drain."""
_HAND_BACK_SHARE = 0.1
"""Of a short lease, so that most of it is left to answer."""


def interrupt_after_s(timeout_s: float) -> float:
    """Seconds from a lease's arrival until its answers are cut, below `timeout_s`.

    What is left then is for the decoding step under way, the call that hands back, and the lease's
    own way here, which the learner's clock counts and the worker's does not.

    timeout_s: seconds from the grant after which the lease expires, above 0.
    """
    return timeout_s - min(HAND_BACK_S, _HAND_BACK_SHARE * timeout_s)
