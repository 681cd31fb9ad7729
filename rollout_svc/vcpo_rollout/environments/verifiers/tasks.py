"""Tasks of the `verifiers` library that ask once and judge the answer.

A run names them `verifiers:PACKAGE`: an installed package that exports a `Taskset` (verifiers 0.4,
interface v1). Its prompts and its reward functions are used; its harnesses, which drive a model
over HTTP by themselves, are not, since what they sample has no exact tokens and versions. Tasks
that need tools, a container or a simulated user are therefore refused.
"""

import asyncio
from typing import Any

from vcpo_rollout.environments.data_sets import Questions
from vcpo_rollout.environments.draws import split_of
from vcpo_rollout.environments.environment import Message, Prompt, Split
from vcpo_rollout.environments.parameters import parse_integer


class VerifiersTasks:
    """The tasks of one task set; the reward is the weighted sum of its own rewards.

    package: Name of the installed package, as `verifiers` finds it.
    max_tasks: So many of its tasks are read, 1 to 10,000,000.
    config: Settings of the task set.

    A tenth of the tasks is kept for evaluation, by a hash of the task's key. Raises ValueError,
    naming the parameter, when the task set cannot be loaded or asks for more than one turn.
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
        """Return a task's prompt, its system prompt before it; the answer names the task."""
        return self._questions.at(split, index)

    def reward(self, prompt: Prompt, response: str) -> float:
        """Return what the task's own functions say of the response."""
        task = self._tasks[int(prompt.answer)]
        trace = _trace(task, prompt.text, response)
        asyncio.run(task.score(trace))
        return float(trace.reward)


def _load(taskset: str, config: Any, max_tasks: int) -> list[Any]:
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

    try:
        made = load_taskset(taskset_config_type(taskset)(id=taskset, **config))
        return list(made.take(max_tasks))
    except Exception as error:  # the task set is somebody's package
        raise ValueError(
            f"environment.name: the task set {taskset!r} cannot be loaded "
            f"({type(error).__name__}: {error}); install its package in the rollout image"
        ) from error


def _require_single_turn(taskset: str, position: int, task: Any) -> None:
    wants = {
        "a container": task.NEEDS_CONTAINER,
        "tools": bool(type(task).toolsets(task.config)),
        "a simulated user": task.data.prompt is None,
    }
    missing = [name for name, is_wanted in wants.items() if is_wanted]
    if missing:
        raise ValueError(
            f"environment.name: task {position} of {taskset!r} needs {' and '.join(missing)}; "
            "only tasks that ask once and judge the answer can be used here"
        )


def _trace(task: Any, prompt: str, response: str) -> Any:
    """What `verifiers` would have recorded of one question and its answer."""
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
