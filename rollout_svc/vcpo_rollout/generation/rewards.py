"""Functions that judge responses in place of the environment: `environment.rewards` of a run.

A function is found as an environment's class is, `package.module:function`, and is called with
`prompt` and `response`. A class is made once, with the parameters, and its object is called. An
`async def` is awaited. A function that returns None leaves the response to the others.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from vcpo.api.environments import OWN_REWARD
from vcpo.api.workloads import Environment as EnvironmentSettings
from vcpo.api.workloads import Reward
from vcpo.service.plugins import beside_or_in, import_named
from vcpo_rollout.environments.environment import (
    Environment,
    MultiTurnEnvironment,
    Prompt,
    Split,
    make_environment,
)
from vcpo_rollout.generation.environment_pool import SCORE, awaited, check_judgement


def make_task(settings: EnvironmentSettings, seed: int) -> Environment:
    """Make a run's environment; its reward functions judge if it has any."""
    environment = make_environment(settings.name, settings.parameters, seed)
    if not settings.rewards:
        return environment
    if isinstance(environment, MultiTurnEnvironment):
        raise ValueError(  # noqa: TRY004 - a user wrote it
            f"environment.rewards: {settings.name!r} has multi-turn responses, and these functions"
            " score a single turn; remove them, and score in the conversation's own `reward`"
        )
    return JudgedEnvironment(environment, settings.rewards)


class JudgedEnvironment:
    """An environment's prompts, judged by other functions.

    Raises ValueError, naming the field, when a function cannot be used.
    """

    def __init__(self, environment: Environment, rewards: Sequence[Reward]) -> None:
        self.environment = environment
        self.prompt: Callable[[Split, int], Prompt] = environment.prompt
        self._judges = tuple(_judges(environment, rewards))

    def reward(self, prompt: Prompt, response: str) -> Mapping[str, float]:
        """Return the parts and the score of all functions that returned no None."""
        parts: dict[str, float] = {}
        total = 0.0
        for judge in self._judges:
            if (told := awaited(judge.call(prompt=prompt, response=response))) is None:
                continue
            judgement = check_judgement(told, judge.code)
            total += judge.weight * judgement.reward
            for part, value in (judgement.parts or {"": judgement.reward}).items():
                parts[f"{judge.label}.{part}".strip(".")] = judge.weight * value
        if not parts:
            check_judgement(None, self._judges[-1].code)  # refuses it
        return {**parts, SCORE: total}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """One function with its weight."""

    label: str
    """Its name among the parts of the reward."""
    weight: float
    call: Callable[..., object]
    code: Callable[..., object]
    """What to name in errors; `call` without the parameters."""


def _judges(environment: Environment, rewards: Sequence[Reward]) -> Iterator[_Judge]:
    labels: list[str] = []
    for number, reward in enumerate(rewards):
        label = reward.name.rpartition(":")[2]
        labels.append(label)
        same = labels.count(label)
        call, code = (
            (environment.reward, environment.reward)
            if reward.name == OWN_REWARD
            else _found(reward, f"environment.rewards[{number}]")
        )
        label = label if same == 1 and label != SCORE else f"{label} {same}"
        yield _Judge(label=label, weight=reward.weight, call=call, code=code)


def _found(reward: Reward, field: str) -> tuple[Callable[..., object], Callable[..., object]]:
    """Return a function with its parameters bound, and the function itself."""
    name, parameters = reward.name, reward.parameters
    found = import_named(name, field=f"{field}.name", fix=beside_or_in("rollout"))
    if not callable(found) or (inspect.isclass(found) and not issubclass(found, Callable)):  # type: ignore[arg-type]
        raise ValueError(
            f"{field}.name: {name!r} is neither a function nor a class with `__call__`; name one"
            " such as `def judge(prompt, response)`"
        )
    if not inspect.isclass(found):
        return partial(found, **parameters), found
    try:
        return cast("Callable[..., object]", found(**parameters)), found.__call__
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ValueError(
            f"{field}.parameters: {name!r} cannot be made with {dict(parameters)!r}"
            f" ({type(error).__name__}: {error}); correct the parameters or the class"
        ) from error
