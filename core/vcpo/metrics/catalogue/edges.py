"""Bucket edges that depend on a run's spec, so that no quantile exceeds what the spec allows.

Prometheus interpolates within a bucket. An edge at the largest possible value keeps every computed
quantile at or below it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

_MOST_EDGES: Final = 12


def lag_edges(max_policy_lag_steps: int) -> tuple[float, ...]:
    """Return up to 12 whole numbers from 0 to the largest lag, ascending.

    All whole numbers where they are few. Else each limit that the throttle reaches by halving, and
    the middles of the widest gaps between them.
    """
    if max_policy_lag_steps < _MOST_EDGES:
        return tuple(float(lag) for lag in range(max_policy_lag_steps + 1))
    edges = [max_policy_lag_steps]
    while edges[0] > 0:
        edges.insert(0, edges[0] // 2)
    while len(edges) < _MOST_EDGES:
        below, above = max(pairwise(edges), key=lambda gap: (gap[1] - gap[0], -gap[0]))
        edges.insert(edges.index(above), (below + above) // 2)
    return tuple(float(edge) for edge in edges)


def response_token_edges(max_new_tokens: int) -> tuple[float, ...]:
    """Return the longest response's length, and up to 11 powers of two below it, ascending."""
    powers = [2**exponent for exponent in range(max_new_tokens.bit_length())]
    below = [power for power in powers if power < max_new_tokens]
    return tuple(float(edge) for edge in (*below[1 - _MOST_EDGES :], max_new_tokens))
