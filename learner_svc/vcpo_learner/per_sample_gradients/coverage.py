"""A check that no gradient of a trainable parameter was lost on its way."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.slots import Slot, Slots
from vcpo_learner.per_sample_gradients.taps import Recording

_NAMED = 3
"""Parameters that an error names; it counts the others."""


class LostGradientError(RuntimeError):
    """The gradient depends on trainable parameters whose part of it was not computed."""

    def __init__(self, names: Sequence[str], reason: str) -> None:
        rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        shown = ", ".join(repr(name) for name in names[:_NAMED])
        super().__init__(f"the gradient of {shown}{rest} was lost: {reason}")


def require_coverage(objective: Tensor, recording: Recording) -> None:
    """Check that every parameter that an objective depends on was used by a call or use on record.

    A parameter that the objective does not depend on has no gradient, such as that of an expert
    that no token was sent to; it passes.
    objective: of a recorded forward pass, with its graph; saved tensors may be gone.
    Raises: LostGradientError, naming the parameters.
    """
    on_record = recording.parameters
    lost = [each for each in parameter_leaves(objective) if id(each) not in on_record]
    if lost:
        names = {id(recording.slots.parameter(slot)): slot.name for slot in recording.slots}
        unnamed = "a parameter of shape {}"
        raise LostGradientError(
            sorted(names.get(id(each), unnamed.format(tuple(each.shape))) for each in lost),
            "it is used outside of the forward of the module that owns it; freeze it, or call that"
            " module",
        )


def require_gradients(slots: Slots, unused: Collection[Slot]) -> None:
    """Check that every trainable parameter but the unused ones has a `.grad`.

    Raises: LostGradientError, naming the parameters.
    """
    lost = [
        slot.name for slot in slots if slots.parameter(slot).grad is None and slot not in unused
    ]
    if lost:
        raise LostGradientError(lost, "it was computed, and did not get into `.grad`")


def parameter_leaves(objective: Tensor) -> list[nn.Parameter]:
    """Return the parameters in an objective's graph, each once."""
    leaves = (getattr(node, "variable", None) for node in _nodes(objective))
    return [each for each in leaves if isinstance(each, nn.Parameter)]


def _nodes(objective: Tensor) -> Iterator[Any]:
    """Yield the nodes of a graph, each once."""
    seen, waiting = set(), [objective.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
