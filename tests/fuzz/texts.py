"""Targets: what a model writes, read by environments and by the judge of expressions."""

import math
from functools import cache

from hypothesis import strategies as st

from examples.plugins.calculator.calculator import Calculator
from tests.fuzz.target import Target
from vcpo_rollout.environments.answers import extract_answer, extract_boxed
from vcpo_rollout.environments.arithmetic import calculate
from vcpo_rollout.environments.countdown import Countdown
from vcpo_rollout.environments.environment import Environment, MultiTurnEnvironment, Split
from vcpo_rollout.environments.mathematics.judge import MathJudge
from vcpo_rollout.environments.sort_digits import SortDigits

_WORDS = (
    *("\\boxed{", "\\boxed 5$", "\\fbox{", "}", "{", "<answer>", "</answer>", "\n", " ", "=", "."),
    *("<tool_call>", "</tool_call>", '{"name": "f"}', "[", "]", '"', "```python\n", "```", "\\"),
    *("1", "23", "007", "+", "-", "*", "/", "//", "**", "(", ")", "9" * 300, "\u0663", "\ud800"),
)
_RESPONSES = st.lists(st.sampled_from(_WORDS), max_size=12).map("".join) | st.text(max_size=30)


@cache
def _environments() -> tuple[Environment, ...]:
    return (Countdown(seed=0), Calculator(seed=0), SortDigits(seed=0))


def _check_response(data: bytes) -> None:
    """A response has a finite reward in each environment, and a reply or none."""
    response = data.decode(errors="surrogateescape")
    for environment in _environments():
        prompt = environment.prompt(Split.TRAIN, 0)
        assert math.isfinite(environment.reward(prompt, response))
        if isinstance(environment, MultiTurnEnvironment):
            conversation = environment.converse(prompt)
            conversation.next_turn(response)
            assert math.isfinite(conversation.reward())
    answer = extract_answer(response)
    assert answer is None or answer in response
    boxed = extract_boxed(response)
    assert boxed is None or boxed in response
    calculation = calculate(response)
    assert calculation is None or calculation.numbers


_MATHEMATICS = (
    *("1", "2", "10", "0.5", "1,000", "x", "y", "\\pi", "e", "i", "\\infty", "=", "<", ",", ";"),
    *(
        "+",
        "-",
        "*",
        "/",
        "^",
        "_",
        "!",
        "%",
        "\\%",
        "$",
        "(",
        ")",
        "{",
        "}",
        "[",
        "]",
        "\\{",
        "\\}",
    ),
    *("\\frac", "\\sqrt", "\\sum", "\\int", "\\lim", "\\binom", "\\begin{pmatrix}", "\\\\", "&"),
    *("\\text{ cm}", "\\left(", "\\right)", "\\cup", "\\in", "\\mathbb{R}", "^\\circ", "99999"),
    *("__import__('os').system('exit 3')", "exit()", "lambda x: x", "'a'.join", "\ud800", "\n"),
)
_EXPRESSIONS = st.lists(st.sampled_from(_MATHEMATICS), max_size=8).map("".join)


@cache
def _judge() -> MathJudge:
    return MathJudge(limit_s=20.0)


def _check_expressions(data: bytes) -> None:
    reference, _, candidate = data.decode(errors="surrogateescape").partition("\0")
    assert isinstance(_judge().is_equal(reference, candidate), bool)
    assert _judge().is_equal("1/2", "0.5")


def _encoded(texts: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return texts.map(lambda text: text.encode(errors="surrogatepass"))


TARGETS = (
    Target(name="response", inputs=_encoded(_RESPONSES), check=_check_response),
    Target(
        name="expressions",
        inputs=_encoded(st.builds("{}\0{}".format, _EXPRESSIONS, _EXPRESSIONS)),
        check=_check_expressions,
        num_short_examples=10,
    ),
)
