"""Sort the digits of a string: a very small task, on which learning is visible."""

from dataclasses import dataclass
from typing import Final

from vcpo_rollout.environments.answers import extract_answer, final_answer
from vcpo_rollout.environments.draws import draw_item
from vcpo_rollout.environments.environment import Prompt, Split
from vcpo_rollout.environments.parameters import Style, parse_integer, parse_style

MAX_DIGITS: Final = 64

_INSTRUCT_TEXT: Final = (
    "Sort the digits of {digits} from smallest to largest, keeping repeated digits. "
    "Give the sorted digits in <answer> tags, for example <answer>01223</answer>."
)
_PLAIN_TEXT: Final = "sort {digits}="


@dataclass(frozen=True, slots=True, kw_only=True)
class SortDigits:
    """The sorting task; its reward is 1.0 for exactly the sorted digits and 0.0 otherwise.

    Raises ValueError, naming the parameter, when a setting is out of bounds.
    """

    seed: int
    digits: int = 5
    """Fewer than 3 give too few strings for two splits."""
    style: Style = Style.INSTRUCT
    marked_answer = staticmethod(extract_answer)

    def __post_init__(self) -> None:
        parse_integer("digits", self.digits, lowest=3, highest=MAX_DIGITS)
        object.__setattr__(self, "style", parse_style(self.style))

    def prompt(self, split: Split, index: int) -> Prompt:
        digits = draw_item(
            seed=self.seed,
            split=split,
            index=index,
            propose=lambda random: "".join(random.choices("0123456789", k=self.digits)),
            key="sort_digits/{}".format,
        )
        wording = _INSTRUCT_TEXT if self.style is Style.INSTRUCT else _PLAIN_TEXT
        return Prompt(text=wording.format(digits=digits), answer="".join(sorted(digits)))

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(final_answer(response) == prompt.answer)
