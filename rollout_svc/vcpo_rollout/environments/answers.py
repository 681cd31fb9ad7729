"""Extracts the final answer that a model marked in its response."""

import re
from typing import Final

_BOXED: Final = re.compile(r"\\boxed\{([^}]*)\}")
_TAGGED: Final = re.compile(r"<answer>([^<\n]*)</answer>")


def extract_answer(response: str) -> str | None:
    r"""Return the text of the last `\boxed{...}`, else of the last one-line `<answer>` pair.

    Returns None when the response marks no answer. A box has priority over a later tag, even if it
    is wrong.
    Source: the Countdown reward of mit-han-lab/vcpo, `verl/utils/reward_score/countdown.py`.
    Departure: only the response is searched, never the prompt.
    """
    # Up to the last brace every box is closed, so the search passes the response once. A model that
    # repeats an open box ten thousand times would otherwise hold a thread for minutes.
    boxes = response[: response.rfind("}") + 1]
    marked = _BOXED.findall(boxes) or _TAGGED.findall(response)
    return str(marked[-1]).strip() if marked else None


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, in which braces are balanced.

    `\fbox{...}` and `\boxed 5$`, which a few solutions use, count as boxes. Returns None without a
    box, and when the last one is not closed.
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
