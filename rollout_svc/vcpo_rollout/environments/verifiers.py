"""Single-turn tasks of the `verifiers` library.

A run names them `verifiers:PACKAGE`: an installed package that exports a `Taskset` (verifiers 0.4,
interface v1). This module uses its prompts and reward functions. It does not use its harnesses,
which call a model over HTTP, because their samples have no exact tokens and versions. It therefore
refuses tasks that need tools, a container or a simulated user.
"""

import asyncio
from typing import Any

from vcpo_rollout.environments.data_sets import Questions
from vcpo_rollout.environments.draws import split_of
from vcpo_rollout.environments.environment import Message, Prompt, Split
from vcpo_rollout.environments.parameters import parse_integer


class VerifiersTasks:
    """The tasks of one task set; the reward is the weighted sum of its reward functions.

    package: Name of the installed package, as `verifiers` finds it.
    max_tasks: Largest number of tasks to read, 1 to 10,000,000.
    config: Settings of the task set.

    A tenth of the tasks is for evaluation, by a hash of the task's key. Raises ValueError, naming
    the parameter, when the task set cannot be loaded or needs more than one turn.
    """

    def __init__(
        self, *, seed: int, package: str, max_tasks: int = 100_000, config: Any = None
    ) -> None:
        parse_integer("max_tasks", max_tasks, lowest=1, highest=10_000_000)
        self._tasks = _load(package, config or {}, max_tasks)
        items: dict[Split, list[Prompt]] = {split: [] for split in Split}
        for position, task in enumerate(self._tasks):
            _require_single_turn(package, position, task)
            messages = [Message(role="user", content=task.data.prompt_text)]
            if task.data.system_prompt:
                messages.insert(0, Message(role="system", content=task.data.system_prompt))
            prompt = Prompt(messages=tuple(messages), answer=str(position))
            items[split_of(task.key)].append(prompt)
        self._questions = Questions(items, seed=seed)

    def prompt(self, split: Split, index: int) -> Prompt:
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        task = self._tasks[int(prompt.answer)]
        trace = _trace(task, prompt.text, response)
        asyncio.run(task.score(trace))
        return float(trace.reward)


def _load(taskset: str, config: Any, max_tasks: int) -> list[Any]:
    try:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type
    except ImportError as error:
        fix = "install it in the rollout image: pip install 'vcpo[verifiers]'"
        needed = f"'verifiers:{taskset}' needs the package verifiers ({error})"
        raise ValueError(f"environment.name: {needed}; {fix}") from error
    try:
        tasks = load_taskset(taskset_config_type(taskset)(id=taskset, **config))
        return list(tasks.take(max_tasks))
    except Exception as error:  # a third-party package may raise anything
        told = f"cannot be loaded ({type(error).__name__}: {error})"
        fix = "install its package in the rollout image"
        raise ValueError(f"environment.name: the task set {taskset!r} {told}; {fix}") from error


def _require_single_turn(taskset: str, position: int, task: Any) -> None:
    needs = {
        "a container": task.NEEDS_CONTAINER,
        "tools": bool(type(task).toolsets(task.config)),
        "a simulated user": task.data.prompt is None,
    }
    if unsupported := " and ".join(name for name, is_needed in needs.items() if is_needed):
        raise ValueError(
            f"environment.name: task {position} of {taskset!r} needs {unsupported}; only"
            " single-turn tasks are supported"
        )


def _trace(task: Any, prompt: str, response: str) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    question = vf.MessageNode(message=vf.UserMessage(content=prompt))
    answer = vf.MessageNode(parent=0, message=vf.AssistantMessage(content=response), sampled=True)
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[question, answer],
        is_completed=True,
        ok=True,
    )
