"""Time steps of Mamba-2 that a single step clamps as a whole pass does.

Transformers clamps them in its pass over chunks only. Zamba2 and Nemotron-H have a limit from the
start, so a token decoded by itself would be drawn from another policy than the one that is trained.
"""

import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional


def clamp_time_steps(model: nn.Module) -> None:
    """Let the files of a model's mixers clamp; the limits are those of the last model of a file."""
    step = "mamba2_selective_state_update"  # of one token, in transformers' files
    for mixer in model.modules():
        limit, names = getattr(mixer, "time_step_limit", None), vars(sys.modules[mixer.__module__])
        if limit is not None and step in names:
            own = getattr(names[step], "args", (names[step],))[0]
            names[step] = partial(_clamped, own, limit)


def _clamped(
    own: Any, limit: Any, states: Tensor, inputs: Tensor, dt: Tensor, *others: Any, **named: Any
) -> Any:
    clamped = functional.softplus(dt + named["dt_bias"].to(dt.dtype)).clamp(*limit)
    return own(states, inputs, clamped, *others, **named | {"dt_bias": None, "dt_softplus": False})
