"""`python -m vcpo_learner`, but each gradient and each publication take at least a given time.

The times stand for the forward and backward passes of a large model, and for the checksums and the
delta of its weights; those of the tiny model are part of them. They pass in the threads that
compute and publish, so the learner goes on to serve its workers. A step whose update is skipped,
because all of its rewards are equal, takes its time as well.
"""

import functools
import os
import time
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from vcpo_learner.command import main
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_learner.weights.store import PolicyStore

STEP_SECONDS_VARIABLE: Final = "VCPO_BENCHMARK_LEARNER_STEP_SECONDS"
PUBLICATION_SECONDS_VARIABLE: Final = "VCPO_BENCHMARK_PUBLICATION_SECONDS"
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def lasting(
    duration_s: float,
    work: Callable[_Arguments, _Result],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[_Arguments, _Result]:
    """Return a function that does some work and returns `duration_s` after its start or later."""

    @functools.wraps(work)
    def paced(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        due_s = clock() + duration_s
        result = work(*args, **kwargs)
        sleep(max(0.0, due_s - clock()))
        return result

    return paced


if __name__ == "__main__":
    step_s = float(os.environ[STEP_SECONDS_VARIABLE])
    publication_s = float(os.environ[PUBLICATION_SECONDS_VARIABLE])
    PolicyUpdate.begin = lasting(step_s, PolicyUpdate.begin)  # type: ignore[method-assign]
    PolicyStore.prepare = lasting(publication_s, PolicyStore.prepare)  # type: ignore[method-assign]
    raise SystemExit(main())
