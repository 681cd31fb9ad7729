"""Finds the final answer that a model marked in its response."""

import re
from typing import Final

_TAG, _TAG_END = "<answer>", "</answer>"
_MARKS: Final = re.compile(r"\\(?:boxed|fbox)(?:\s*\{| )|\\.|[{}]", re.DOTALL)
r"""A box, also without braces (`\boxed 5$`), an escaped character, or a brace."""


def said(response: str) -> str:
    """Return a response without its thinking, which ends at the last `</think>`."""
    return response.rpartition("</think>")[2].strip()


def final_answer(response: str) -> str:
    """Return the answer that a response marks, or else all that it says."""
    marked = extract_answer(response)
    return _without_bold(said(response)) if marked is None else marked


def extract_answer(response: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, else of the last pair of `<answer>` tags.

    Only what follows the thinking is searched. Returns None when the response marks no answer. A
    box has priority over a later tag, even if it is wrong.
    Source: the Countdown reward of mit-han-lab/vcpo, `verl/utils/reward_score/countdown.py`.
    Departures: only the response is searched, never the prompt; a box may hold braces, and a tag
    several lines and `<`.
    """
    text = said(response)
    boxed = extract_boxed(text)
    if boxed is not None:
        return _without_bold(boxed)
    start = text.rfind(_TAG, 0, text.rfind(_TAG_END) + 1)
    if start < 0:
        return None
    start += len(_TAG)
    return _without_bold(text[start : text.index(_TAG_END, start)])


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}` whose braces are balanced.

    `\boxed 5$`, which a few solutions use, counts as a box. Returns None without a box.
    Source: `last_boxed_only_string` of hendrycks/math, `modeling/dataset/util.py`.
    """
    opened: list[int] = []  # of each open brace, where the box begins; -1: it is no box
    start, end, last_dollar = -1, 0, text.rfind("$")
    for mark in _MARKS.finditer(text):
        if (found := mark[0]) == "}":
            begun = opened.pop() if opened else -1
            if begun > start:
                start, end = begun, mark.start()
        elif found.endswith(" "):
            if mark.end() <= last_dollar:
                start, end = mark.end(), -1
        elif found == "{" or len(found) > len("\\{"):
            opened.append(-1 if found == "{" else mark.end())
    if start < 0:
        return None
    return text[start : text.index("$", start) if end < 0 else end].strip()


def _without_bold(answer: str) -> str:
    answer = answer.strip()
    bare = answer.removeprefix("**").removesuffix("**")
    return bare.strip() if len(answer) - len(bare) == 4 and "**" not in bare else answer
