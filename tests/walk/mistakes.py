"""Mistakes of a first day: what somebody does, and what the command must say of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODEL = "model"
"""Folder of the model, beside the run's file."""
FILE = "run.yaml"
RUN = """\
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {name: walk}
spec:
  model: {name: model}
  environment:
    name: data_set
    parameters: {path: rows.jsonl}
    rewards: [{name: "judging:reward"}]
  steps: 3
  batch: {promptsPerStep: 2, trajectoriesPerPrompt: 4}
  sampling: {maxNewTokens: 4}
  algorithm: {maxPolicyLagSteps: 2}
  evaluation: {everySteps: 100, prompts: 2}
  learner: {threads: 1}
  rollouts: [{name: main, maxReplicas: 1, maxConcurrentSequences: 8, threads: 1}]
"""
ROWS = "".join(
    f"{json.dumps({'prompt': f'{number}?', 'answer': f'{number}'})}\n" for number in range(40)
)
JUDGING = "def reward(prompt, response):\n    return len(response) / 10\n"
USER_ERROR = 2
_VALIDATE = ("validate", FILE)
_RUN = ("run", FILE)
_BUSY_PORT = "{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake."""

    name: str
    says: tuple[str, ...]
    """Field, value and fix: each stands in what the command prints."""
    command: tuple[str, ...] = _VALIDATE
    """Arguments of `vcpo`; `{port}` is one on which somebody listens."""
    sets: tuple[str, ...] = ()
    """Fields that `--set` changes."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files in place of the right ones, or beside them."""
    prepare: Callable[[Path], None] | None = None
    """What else is done to the folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    status: int = USER_ERROR
    largest_file_bytes: int | None = None
    """Stands for a full disk."""
    interrupts: int = 0
    """Ctrl-C so often, from the first step on."""
    leaves: tuple[str, ...] = ()
    """Entries of the folder that may be new."""


def _reward(body: str) -> dict[str, str]:
    return {"judging.py": f"def reward(prompt, response):\n    {body}\n"}


def _environment(body: str) -> dict[str, str]:
    """The user's own environment with a method `prompt`."""
    text = (
        "from vcpo_rollout.environments import Prompt\n\n\nclass Task:\n"
        "    def __init__(self, *, seed):\n        self.seed = seed\n\n"
        f"    def prompt(self, split, index):\n        {body}\n\n"
        "    def reward(self, prompt, response):\n        return 1.0\n"
    )
    return {"task.py": text, FILE: _with_task()}


def _with_task() -> str:
    first, rest = RUN.split("  environment:\n")
    _, last = rest.split("  steps: 3\n")
    return f'{first}  environment: {{name: "task:Task"}}\n  steps: 3\n{last}'


def _edit_json(name: str, **changes: object) -> Callable[[Path], None]:
    """Change keys of one of the model's files; None removes a key."""

    def edit(folder: Path) -> None:
        path = folder / MODEL / name
        known = json.loads(path.read_text())
        kept = {key: value for key, value in (known | changes).items() if value is not None}
        path.write_text(json.dumps(kept))

    return edit


def _without_end(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (folder / MODEL / name).exists():
            _edit_json(name, eos_token_id=None, eos_token=None)(folder)


def _broken_template(folder: Path) -> None:
    (folder / MODEL / "chat_template.jinja").write_text("{% for message in messages %}{{ ")
    _edit_json("tokenizer_config.json", chat_template="{% for message in messages %}{{ ")(folder)


def _used(folder: Path) -> None:
    (folder / "used").mkdir()
    (folder / "used" / "spec.yaml").write_text(RUN)


def _without_tokenizer(folder: Path) -> None:
    for path in (folder / MODEL).glob("token*"):
        path.unlink()


MISTAKES = (
    Mistake(
        name="a file that is not there",
        command=("validate", "runn.yaml"),
        says=("runn.yaml", "cannot be read: No such file"),
    ),
    Mistake(
        name="a field with a typing error",
        files={FILE: RUN.replace("  steps", "  stepps")},
        says=("spec.stepps: unknown field; did you mean spec.steps?", "spec.steps"),
    ),
    Mistake(
        name="a model folder that is not there",
        sets=("model.name=./modell",),
        says=("spec.model.name: is not a directory", "./modell"),
    ),
    Mistake(
        name="a hub that cannot be reached",
        command=_RUN,
        sets=("model.name=nobody/model",),
        environment={"HF_ENDPOINT": "http://127.0.0.1:9"},
        says=("spec.model.name", "nobody/model", "the hub does not answer", "HF_ENDPOINT"),
    ),
    Mistake(
        name="a model without a tokenizer",
        prepare=_without_tokenizer,
        command=("try", FILE),
        says=("spec.model.name", "tokenizer"),
    ),
    Mistake(
        name="a model without an end token",
        prepare=_without_end,
        command=("try", FILE),
        says=("spec.model.name", "names no end token", "set eos_token"),
    ),
    Mistake(
        name="a chat template that is not whole",
        prepare=_broken_template,
        command=("try", FILE),
        says=("spec.model.name: the chat template", "line 1", "promptFormat to 'plain'"),
    ),
    Mistake(
        name="answers longer than the model can read",
        sets=("sampling.maxNewTokens=100000",),
        says=("spec.sampling.maxNewTokens", "100000"),
    ),
    Mistake(
        name="prompts longer than the model can read",
        command=("try", FILE),
        files={"rows.jsonl": ROWS.replace("?", "?" * 20_000)},
        says=("prompt", "tokens"),
        status=1,
    ),
    Mistake(
        name="a task with a typing error",
        sets=("environment.name=cuontdown",),
        says=("spec.environment.name", "cuontdown", "use one of countdown"),
    ),
    Mistake(
        name="a module that is not there",
        sets=("environment.rewards[0].name=judgging:reward",),
        says=("spec.environment.rewards", "judgging"),
    ),
    Mistake(
        name="a function that the module does not have",
        sets=("environment.rewards[0].name=judging:rewrad",),
        says=("spec.environment.rewards", "rewrad"),
    ),
    Mistake(
        name="rows that are not there",
        sets=("environment.parameters.path=row.jsonl",),
        says=("environment.parameters.path", "row.jsonl"),
    ),
    Mistake(
        name="a column that the rows do not have",
        sets=("environment.parameters.prompt=question",),
        says=("question", "`prompt`"),
    ),
    Mistake(
        name="a row that is not JSON",
        files={"rows.jsonl": ROWS + "{'prompt': 'x'}\n"},
        says=("rows.jsonl", "41"),
    ),
    Mistake(
        name="a reward that is a tensor of several numbers",
        files=_reward("import torch; return torch.ones(2)"),
        says=("reward", "Tensor"),
    ),
    Mistake(
        name="a reward that is not a number",
        files=_reward("return float('nan')"),
        says=("reward", "nan"),
    ),
    Mistake(
        name="a reward that raises",
        files=_reward("return prompt.answr"),
        says=("spec.environment.rewards", "AttributeError", "judging.py:2)"),
    ),
    Mistake(
        name="a prompt that is a text",
        files=_environment("return f'{index}?'"),
        says=("Task.prompt", "str"),
    ),
    Mistake(
        name="prompts that change from call to call",
        files=_environment("import random; return Prompt(text=str(random.random()), answer='')"),
        says=("Task.prompt", "same"),
    ),
    Mistake(
        name="a port that is taken",
        command=(*_RUN, "--metrics-port", _BUSY_PORT),
        says=("--metrics-port: cannot listen on", "give another port, or 0 for a free one"),
    ),
    Mistake(
        name="a disk that is full",
        command=_RUN,
        largest_file_bytes=1_000,
        says=("--run-dir: runs/walk-001 cannot be written", "give a writable directory"),
    ),
    Mistake(
        name="a resume of another run",
        command=(*_RUN, "--run-dir", "used", "--resume", "--set", "model.name=./model"),
        prepare=_used,
        files={FILE: RUN.replace("trajectoriesPerPrompt: 4", "trajectoriesPerPrompt: 8")},
        says=("--resume: these changes are not possible", "trajectoriesPerPrompt"),
    ),
    Mistake(
        name="a folder that has a run",
        command=(*_RUN, "--run-dir", "used"),
        prepare=_used,
        says=("--run-dir: used already has a run; add --resume, or give another directory",),
    ),
    Mistake(
        name="a task with the name of a module",
        command=("init", "random"),
        says=("TASK: 'random' is the name of an installed module",),
    ),
    Mistake(
        name="rewards that are all equal",
        command=_RUN,
        files=_reward("return 1.0"),
        says=("skipped", "equal"),
        status=3,
        leaves=("runs",),
    ),
    Mistake(
        name="Ctrl-C three times",
        command=_RUN,
        sets=("steps=100000",),
        interrupts=3,
        says=("interrupted", "--resume"),
        status=130,
        leaves=("runs",),
    ),
)
