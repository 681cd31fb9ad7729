"""Finds the final answer that a model marked in its response."""

import re
from typing import Final

_BOXED: Final = re.compile(r"\\boxed\{([^}]*)\}")
_TAGGED: Final = re.compile(r"<answer>([^<\n]*)</answer>")


def extract_answer(response: str) -> str | None:
    r"""Return the text of the last `\boxed{...}`, else of the last one-line `<answer>` pair.

    None when the response marks no answer. A box wins over a later tag, even when it is wrong.
    Source: the Countdown reward of mit-han-lab/vcpo, `verl/utils/reward_score/countdown.py`.
    Departure: the prompt is never searched, as the response alone is judged.
    """
    marked = _BOXED.findall(response) or _TAGGED.findall(response)
    return str(marked[-1]).strip() if marked else None
