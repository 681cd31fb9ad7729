"""The base learning rate of a step, before the scale by ESS and the backoff.

The rate is the set rate times two factors that count differently:

- The warm-up counts updates. It waits for the optimizer's moments, and a skipped step does not
  change them.
- The schedule counts the run's steps, skipped ones too. So it always ends at the last of `steps`,
  and a resumed run goes on where it was. A run whose `steps` was raised goes on along the longer
  course; its rate may rise at that moment.
"""

import math

from vcpo.api.optimizer import Optimizer, Schedule


def base_learning_rate(
    settings: Optimizer, *, total_steps: int, steps_taken: int, updates_taken: int
) -> float:
    """Return the base learning rate of the next step.

    total_steps: steps of the whole run.
    steps_taken: steps before this one, skipped ones included.
    updates_taken: those of them that changed the parameters.
    """
    rising = min(1.0, (updates_taken + 1) / max(1, settings.warmup_steps))
    return settings.learning_rate * rising * _schedule_ratio(settings, total_steps, steps_taken)


def _schedule_ratio(settings: Optimizer, total_steps: int, steps_taken: int) -> float:
    """Return the schedule's factor: 1 up to the step that ends the warm-up, least at the last."""
    whole_rate_step = max(1, settings.warmup_steps)
    falling_steps = total_steps - whole_rate_step
    if settings.schedule is Schedule.CONSTANT or falling_steps <= 0:
        return 1.0
    progress = min(1.0, max(0.0, (steps_taken + 1 - whole_rate_step) / falling_steps))
    final = settings.final_learning_rate_ratio
    if settings.schedule is Schedule.COSINE:
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 + (final - 1.0) * progress
