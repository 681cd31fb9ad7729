"""Do two computations of the same log-probabilities differ by rounding alone?

They are of one model: a sequence alone and beside others, or read at once and token by token. What
the model does to the sequence is the same, so its numbers may differ in their last digits only.

    float32    1e-6 of the size of the numbers, 1e-4 with TF32
    bfloat16   about 1e-2
    a wrong state, mask or position changes them by 5e-2 to 1

Measured with `root mean square of the difference / root mean square of the log-probabilities`, on
small models of 80 families and on one of 135 M parameters.
"""

from typing import Final

_PRECISE: Final = 1e-3
_HALF: Final = 0.03


def is_rounding(gap: float, size: float, *, is_half: bool) -> bool:
    """Return whether a gap is rounding.

    gap: root mean square of the differences, nats, at least 0.
    size: root mean square of the log-probabilities, nats, at least 0.
    is_half: whether they were computed in a format of 16 bits.
    """
    return gap <= (_HALF if is_half else _PRECISE) * size
