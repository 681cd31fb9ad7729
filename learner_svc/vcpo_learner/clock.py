"""The type of an injected clock."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since an arbitrary start; never goes back."""
