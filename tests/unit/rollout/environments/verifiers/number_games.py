"""Environments of the verifiers library, as users' packages export them: games of numbers."""

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"Think of {number}.", "answer": str(number)} for number in range(1, 41)]


def last_words(completion):
    return completion[-1]["content"]


def is_right(completion, answer):
    """Whether the number is in the last turn."""
    return float(answer in last_words(completion).split())


def num_turns(state):
    return len(state["trajectory"])


class Guessing(vf.MultiTurnEnv):
    """Says whether a guess is too low or too high; ends when it is right."""

    async def setup_state(self, state, **kwargs):
        state["guesses"] = []
        return state

    async def env_response(self, messages, state, **kwargs):
        guess = int(messages[-1]["content"])
        state["guesses"].append(guess)
        if guess < 0:
            state["final_env_response"] = [{"role": "user", "content": "Enough."}]
        side = "low" if guess < int(state["answer"]) else "high"
        return [{"role": "user", "content": f"Too {side}, {len(state['guesses'])} so far."}]

    @vf.stop
    async def is_solved(self, state):
        return bool(state["trajectory"]) and is_right(
            state["trajectory"][-1]["completion"], state["answer"]
        )

    @vf.cleanup
    async def count_ends(self, state):
        state["ends"] = state.get("ends", 0) + 1


class Rewriting(Guessing):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages if len(messages) < 3 else messages[-1:]


class Asking(Guessing):
    async def env_response(self, messages, state, **kwargs):
        return await self.get_model_response(state, messages)


class OwnServer(Guessing):
    async def get_model_response(self, state, prompt, **kwargs):
        raise NotImplementedError


class SandboxEnv(Guessing):
    """Named as the library's, which cannot be made without a service."""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def together(completions):
    return [0.0] * len(completions)


def load_environment(kind="guessing", evaluation=0, few_shot=None, **settings):
    rows = Dataset.from_list(ROWS)
    sets = {"dataset": rows, "few_shot": few_shot}
    if evaluation:
        sets["eval_dataset"] = rows.select(range(evaluation))
    if kind == "group":
        sets["rubric"] = vf.Rubric(funcs=[together])
    else:
        # Twice for the right number, a quarter less for each turn.
        sets["rubric"] = vf.Rubric(funcs=[is_right, num_turns], weights=[2.0, -0.25])
    kinds = {
        "guessing": Guessing,
        "rewriting": Rewriting,
        "asking": Asking,
        "own_server": OwnServer,
        "sandbox": SandboxEnv,
        "group": vf.SingleTurnEnv,
        "single": vf.SingleTurnEnv,
        "tools": vf.ToolEnv,
    }
    if kind == "tools":
        settings["tools"] = [add]
    if kind == "mixture":
        return vf.EnvGroup([vf.SingleTurnEnv(dataset=rows, rubric=sets["rubric"])])
    system_prompt = settings.pop("system_prompt", "Play.")
    return kinds[kind](system_prompt=system_prompt, **sets, **settings)
