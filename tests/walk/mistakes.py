"""Mistakes of a first day: what somebody does, and what the command must say of it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One mistake."""

    name: str
    says: tuple[str, ...]
    """Field, value and fix: each stands in what the command prints."""
    command: tuple[str, ...] = ("validate", FILE)
    """Arguments of `vcpo`; `{port}` is one on which somebody listens."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files in place of the right ones, or beside them."""
    prepare: Callable[[Path], None] | None = None
    """What else is done to the folder."""
    status: int = USER_ERROR
    largest_file_bytes: int | None = None
    """Stands for a full disk."""
    interrupts: int = 0
    """Ctrl-C so often, from the first step on."""


Made = Mapping[str, str] | Callable[[Path], None] | None
"""Texts of files, or what is done to the folder."""


def _told(
    name: str, says: str, made: Made = None, command: str = f"validate {FILE}", **more: Any
) -> Mistake:
    """Return a mistake; `says` has ` ... ` between what is said."""
    files, prepare = ({}, made) if callable(made) else (made or {}, None)
    words, told = tuple(command.split()), tuple(says.split(" ... "))
    return Mistake(name=name, says=told, command=words, files=files, prepare=prepare, **more)


def _set(change: str, says: str, made: Made = None) -> Mistake:
    return _told(change, says, made, f"validate {FILE} --set={change}")


def _tried(name: str, says: str, made: Made, **more: Any) -> Mistake:
    return _told(name, says, made, f"try {FILE}", **more)


def _ran(name: str, options: str, says: str, made: Made = None, **more: Any) -> Mistake:
    return _told(name, says, made, f"run {FILE} {options}", **more)


def _rows(text: str) -> dict[str, str]:
    return {"rows.jsonl": text}


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
    first, rest = RUN.split("  environment:\n")
    last = rest[rest.index("  steps:") :]
    return {"task.py": text, FILE: f'{first}  environment: {{name: "task:Task"}}\n{last}'}


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


def _cut(name: str) -> Callable[[Path], None]:
    return _bytes(f"{MODEL}/{name}", b"{")


def _bytes(name: str, content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return write


_OWN = {
    "own.py": """\
from vcpo_rollout.engines.hf.engine import HfEngine


def raises(record, advantages, config):
    raise ValueError("no")


def shape(record, advantages, config):
    return advantages


def short(rewards):
    return rewards[1:]


class Bare:
    pass


class Closed(HfEngine):
    @classmethod
    def load(cls, *given, **named):
        raise RuntimeError("no license")
"""
}
_HUB = "spec.model.name ... nobody/model ... the hub does not answer ... HF_ENDPOINT"
_OTHER = "--run-dir used --resume --set model.name=./model --set batch.trajectoriesPerPrompt=8"
_CLOSED = "--set rollouts[0].engine=own:Closed"
_LONG = ROWS.replace("?", "?" * 20_000)
_AT_RANDOM = "import random; return Prompt(text=str(random.random()), answer='')"


MISTAKES = (
    _told("a file that is not there", "no.yaml ... No such file", None, "validate no.yaml"),
    _told("a command that is not one", "Did you mean 'validate'?", None, "valdate run.yaml"),
    _told("a run that is not there", "runs/no has no run; give the", None, "report runs/no"),
    _told("an export without a checkpoint", "model", None, "export model"),
    _told("a task with the name of a module", "TASK: 'random' is the name", None, "init random"),
    _told("a task with a capital letter", "must be a Python module's name", None, "init Sums"),
    _told("an empty file", "run.yaml ... is empty; give a run file", {FILE: ""}),
    _told("two runs in a file", "run.yaml ... one run", {FILE: f"{RUN}---\n{RUN}"}),
    _told("a tab in YAML", "line 5, column 1 ... \\t", {FILE: RUN.replace("  model", "\tmodel")}),
    _told("a file that is no text", "run.yaml ... UTF-8", _bytes(FILE, b"\xff\xfe\x00")),
    _told("a field twice", 'line 17 ... duplicate key "steps"', {FILE: RUN + "  steps: 4\n"}),
    _told("a large Spec", "did you mean spec?", {FILE: RUN.replace("spec:", "Spec:")}),
    _told("no steps", "spec.steps: required field", {FILE: RUN.replace("  steps: 3\n", "")}),
    _set("stepps=3", "spec.stepps: unknown field; did you mean spec.steps?"),
    _set("optimizer.learning_rate=1", "did you mean spec.optimizer.learningRate? (got 1)"),
    _set("optimizer.lr=1", "did you mean spec.optimizer.learningRate? (got 1)"),
    _set("batch.num_generations=4", "did you mean spec.batch.trajectoriesPerPrompt? (got 4)"),
    _set("steps", "'steps' must be FIELD=VALUE, such as"),
    _set("steps=many", "spec.steps: Input should be a valid integer ... (got 'many')"),
    _set("steps=0", "spec.steps: Input should be greater than or equal to 1 (got 0)"),
    _set("model.lora=8", "spec.model.lora: must be a section (got 8)"),
    _set("model.name=", "spec.model.name: must be text (got None)"),
    _set("rollouts=[]", "spec.rollouts: must have at least 1 item(s) (got [])"),
    _set("rollouts[3].threads=1", "spec.rollouts has 1 item in the file ... no item 3"),
    _set("metadata.name=My_Run", "metadata.name: must be lower-case letters ... (got 'My_Run')"),
    _set("weights.storeUrl=x", "storeUrl: must be an absolute path, or a URL ... (got 'x')"),
    _set("algorithm.method=gppo", "method: did you mean ppo or gspo? ... (got 'gppo')"),
    _set("sampling.topP=0.9", "spec.sampling.topP: is not supported ... remove it ... 0.9"),
    _set("sampling.maxNewTokens=100000", "spec.sampling.maxNewTokens ... 100000"),
    _set("model.name=./modell", "spec.model.name: is not a directory ... ./modell"),
    _set("environment.name=cuontdown", "spec.environment.name ... use one of countdown"),
    _set("environment.rewards[0].name=judgging:reward", "spec.environment.rewards ... judgging"),
    _set("environment.rewards[0].name=judging:rewrad", "spec.environment.rewards ... rewrad"),
    _set("environment.parameters.path=row.jsonl", "environment.parameters.path ... row.jsonl"),
    _set("environment.parameters.path=a.parquet", "a.parquet", {"a.parquet": ""}),
    _set("environment.parameters.prompt=question", "question ... `prompt`"),
    _set("environment.parameters.paht=x", "paht: 'data_set' has no such parameter; it takes"),
    _set("rollouts[0].engine=vlm", "engine: is unknown; use one of hf, vllm ... (got 'vlm')"),
    _set("rollouts[0].engine=own:Bare", "'own:Bare' is not an engine ... must be a class", _OWN),
    _ran("an engine that raises", _CLOSED, "cannot be loaded ... no license", _OWN, status=1),
    _set("algorithm.loss=own:raises", "'own:raises' raised ValueError: no (own.py:5)", _OWN),
    _set("algorithm.loss=own:shape", "it must return TokenCoefficients(values=...)", _OWN),
    _set("algorithm.baseline=own:short", "2 numbers for 3 trajectories ... one for each", _OWN),
    _set("algorithm.baseline=mean", "spec.algorithm.baseline: is unknown; use one of opob"),
    _tried("a model without a tokenizer", "spec.model.name ... tokenizer", _without_tokenizer),
    _tried("a tokenizer that is cut", "spec.model.name ... tokenizer", _cut("tokenizer.json")),
    _tried("a model without an end token", "names no end token ... set eos_token", _without_end),
    _tried("a template that is cut", "template ... line 1 ... to 'plain'", _broken_template),
    _tried("weights that are cut", "spec.model.name ... safetensors", _cut("model.safetensors")),
    _tried(
        "weights of another shape",
        "spec.model.name ... shape",
        _edit_json("config.json", vocab_size=7),
    ),
    _told("an unknown family of models", "gpt9", _edit_json("config.json", model_type="gpt9")),
    _tried("prompts that are too long", "prompt ... tokens", _rows(_LONG), status=1),
    _told("a row that is not JSON", "rows.jsonl ... line 41", _rows(ROWS + "{'prompt': 1}\n")),
    _told("a row that is a list", "rows.jsonl ... 41", _rows(ROWS + "[1]\n")),
    _told("no rows", "environment.parameters: no item is left for train", _rows("")),
    _told(
        "equal rows", "no item is left ... of 1 in all", _rows('{"prompt": "", "answer": ""}\n' * 9)
    ),
    _told("rows in latin-1", "line 1 is not in UTF-8", _bytes("rows.jsonl", b'{"prompt": "\xe9"}')),
    _told("a reward of several numbers", "Tensor", _reward("import torch; return torch.ones(2)")),
    _told("a reward that is not a number", "reward ... nan", _reward("return float('nan')")),
    _told("a reward that is a text", "reward ... str ... a number", _reward("return '1'")),
    _told("a reward that raises", "AttributeError ... judging.py:2)", _reward("return prompt.a")),
    _told("a reward that exits", "SystemExit ... judging.py:2", _reward("raise SystemExit(3)")),
    _told("a prompt that is a text", "Task.prompt ... str", _environment("return str(index)")),
    _told("prompts that change", "Task.prompt ... same", _environment(_AT_RANDOM)),
    _ran("a port that is taken", "--metrics-port {port}", "cannot listen on ... or 0 for a free"),
    _ran("a folder that cannot be made", "--run-dir /proc/x", "/proc/x cannot be written"),
    _ran("a folder with a run", "--run-dir used", "already has a run; add --resume", _used),
    _ran("a resume of nothing", "--run-dir used --resume", "--resume: used does not exist"),
    _ran("a resume of another run", _OTHER, "--resume: these changes ... PerPrompt", _used),
    _ran("a full disk", "", "--run-dir: runs/walk-001 cannot be written", largest_file_bytes=1_000),
    _ran("a hub that is not there", "--set model.name=nobody/model", _HUB),
    _ran("equal rewards", "--steps 1", "skipped ... equal", _reward("return 1.0"), status=3),
    _ran("Ctrl-C", "--steps 9999", "interrupted ... --resume", interrupts=3, status=130),
)
