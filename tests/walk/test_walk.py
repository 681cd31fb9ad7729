"""Mistakes of a first day, a few of them; `python -m tests.walk` makes all."""

from dataclasses import replace

from tests.walk.__main__ import sums
from tests.walk.mistakes import MISTAKES
from tests.walk.walk import walk


def test_a_mistake_is_clear_if_the_command_says_so_and_leaves_nothing(tmp_path):
    (mistake,) = (each for each in MISTAKES if each.name == "a file that is not there")
    walked = walk(mistake, tmp_path)
    assert (walked.unclear, walked.left) == ((), ())
    silent = replace(walked, said="Traceback (most recent call last):", status=1, left=("runs",))
    assert silent.unclear == (
        "says nothing of 'no.yaml'",
        "says nothing of 'No such file'",
        "has status 1, not 2",
        "shows a traceback",
    )
    amount = sums([walked, silent])
    assert (amount["mistakes"], amount["clear"], amount["left_behind"]) == (2, 1, 1)
