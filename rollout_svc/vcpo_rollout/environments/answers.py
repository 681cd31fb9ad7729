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


def extract_boxed(text: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}`, with braces in it balanced.

    `\fbox{...}` and `\boxed 5$`, as a few solutions write them, are boxes too. None without a box
    or with one left open.
    Source: `last_boxed_only_string` of hendrycks/math, `modeling/dataset/util.py`.
    """
    _, _, rest = text.rpartition(r"\boxed" if r"\boxed" in text else r"\fbox")
    if rest == text:
        return None
    if rest.startswith(" "):
        return rest.partition("$")[0].strip() or None
    if not rest.startswith("{"):
        return None
    depth = 0
    for place, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:place].strip()
    return None
