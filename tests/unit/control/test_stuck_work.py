"""How long a piece of work may run until it counts as stuck."""

import pytest

from vcpo.control.supervision import LEAST_LIMIT_S, work_limit_s


@pytest.mark.parametrize(
    ("durations_s", "limit_s"),
    [
        ([], 1800.0),
        ([30.0, 20.0], 300.0),  # ten times the longest
        ([0.7], 120.0),
        ([600.0, *[20.0] * 31], 6000.0),
        ([600.0, *[20.0] * 32], 200.0),  # one odd piece is forgotten
    ],
)
def test_the_limit_follows_the_last_durations(durations_s, limit_s):
    assert work_limit_s(durations_s, first_s=1800.0, least_s=LEAST_LIMIT_S) == limit_s


@pytest.mark.parametrize("durations_s", [[], [3.0]])
def test_no_limit_is_below_the_deadlines_of_the_work_itself(durations_s):
    assert work_limit_s(durations_s, first_s=60.0, least_s=660.0) == 660.0
