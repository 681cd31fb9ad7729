"""Prompts of the user's own data set, with the columns that the run names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from vcpo_rollout.environments.answers import extract_answer, final_answer
from vcpo_rollout.environments.data_sets import DataSet, as_text, column_of, load_questions
from vcpo_rollout.environments.environment import Message, Prompt, Split
from vcpo_rollout.environments.parameters import parse_integer, parse_path

_MOST_EXAMPLES: Final = 64
_Row = Mapping[str, Any]


class OwnDataSet:
    """One prompt a row; other columns are the prompt's metadata, for the functions that judge.

    path: A `.jsonl` or `.parquet` file, or a folder of them.
    hub, config: Name of a data set on the hub, and of its configuration, in place of `path`.
    prompt: Column with the question, a text or a list of messages; `a.b` is `b` within column `a`.
    answer: Column with the ground truth, a text or a number; None: there is none.
    instruction: Follows each question, after an empty line.
    examples: How many rows stand solved before each question, as earlier turns: the first ones for
        training, which no prompt asks then.

    Its own reward is 1.0 if the answer that a response marks, or else the whole response, is the
    ground truth. Raises ValueError, naming the parameter, the row and the column.
    """

    marked_answer = staticmethod(extract_answer)

    def __init__(
        self,
        *,
        seed: int,
        path: str | None = None,
        hub: str | None = None,
        config: str | None = None,
        prompt: str = "prompt",
        answer: str | None = "answer",
        instruction: str = "",
        examples: int = 0,
    ) -> None:
        if (parse_path(path) is None) == (hub is None):
            both = f"environment.parameters.path: {path!r} and `hub` {hub!r}"
            raise ValueError(f"{both}: give one of them, a path, or the name of a data set")
        num_examples = parse_integer("examples", examples, lowest=0, highest=_MOST_EXAMPLES)
        if num_examples and answer is None:
            field = f"environment.parameters.examples: {examples!r}"
            raise ValueError(f"{field} needs solved rows; name the column `answer`")
        self._prompt, self._answer, self._instruction = prompt, answer, instruction
        data_set = DataSet(
            hub_name=hub or "",
            hub_config=config,
            columns=(prompt,) if answer is None else (prompt, answer),
            kinds=((str, int, float, list), (str, int, float)),
            fix=" (parameters `prompt` and `answer`)",
        )
        self._questions = load_questions(
            data_set, path, self._make_prompt, seed=seed, num_apart=num_examples
        )
        self._examples = tuple(
            message
            for each in self._questions.apart
            for message in (
                *_divide_prompt(each)[1],
                Message(role="assistant", content=each.answer),
            )
        )

    def prompt(self, split: Split, index: int) -> Prompt:
        prompt = self._questions.at(split, index)
        if not self._examples:
            return prompt
        system, turns = _divide_prompt(prompt)
        return replace(prompt, text="", messages=(*system, *self._examples, *turns))

    def reward(self, prompt: Prompt, response: str) -> float:
        return float(final_answer(response) == prompt.answer.strip())

    def _make_prompt(self, row: _Row) -> Prompt | None:
        question = column_of(row, self._prompt)
        answer = "" if self._answer is None else as_text(column_of(row, self._answer))
        messages = _messages(question)
        if self._instruction:
            last = messages[-1]
            text = f"{last['content']}\n\n{self._instruction}"
            messages = (*messages[:-1], Message(role=last["role"], content=text))
        if isinstance(question, list):
            return Prompt(messages=messages, answer=answer, metadata=row)
        return Prompt(text=messages[0]["content"], answer=answer, metadata=row)


def _messages(question: object) -> tuple[Message, ...]:
    if not isinstance(question, list):
        return (Message(role="user", content=as_text(question)),)
    Prompt(messages=tuple(question))  # checks them
    return tuple(Message(role=each["role"], content=each["content"]) for each in question)


def _divide_prompt(prompt: Prompt) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    messages = prompt.messages or (Message(role="user", content=prompt.text),)
    count = next(n for n, each in enumerate(messages) if each["role"] != "system")
    return messages[:count], messages[count:]
