"""Reading and writing of run files, and reading of other files by the same rules.

YAML is read as YAML 1.2: `1e-6` is a number, `yes` is text. Values are not converted, as in a
cluster: `steps: "10"` is refused.
"""

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from vcpo.api.errors import FILE, FIXES, FieldProblem, SpecError, field_path, problems_of
from vcpo.api.run import VCPORun, json_schema

_MAX_FILE_BYTES = 1 << 20
_SECTION: Final = "spec"
_TOP: Final = frozenset({_SECTION, "metadata", "apiVersion", "kind"})
_PART: Final = re.compile(r"(\w+)((?:\[\d+\])*)")
_EXAMPLE: Final = "algorithm.maxPolicyLagSteps=12"
_Document = TypeVar("_Document", bound=BaseModel)


def load_run(path: Path, changes: Sequence[str] = (), *, layers: Sequence[Path] = ()) -> VCPORun:
    """Read and check a run file.

    changes: `FIELD=VALUE` each, with a value in YAML; a later one may change what an earlier set.
    layers: files whose fields replace the first one's, each over those before it: sections are
        merged, a list replaces a list, and null takes a field away (RFC 7386).
    """
    document = _mapping(_read(path), str(path))
    for layer in layers:
        document = _merged(document, _mapping(_read(layer), str(layer)))
    source = " + ".join(map(str, (path, *layers)))
    return _validate_document(_apply_changes(document, changes), VCPORun, source)


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(above, dict):
        return above
    merged = dict(below) if isinstance(below, dict) else {}
    for key, value in above.items():
        merged[key] = _merged(merged.get(key), value)
        if value is None:
            del merged[key]
    return merged


def load_document(path: Path, model: type[_Document]) -> _Document:
    """Read and check a file of any kind, as `load_run` does for runs."""
    return parse_document(_read(path), model, source=str(path))


def parse_run(text: str, *, source: str = "run") -> VCPORun:
    """Parse and check a run given as YAML (or JSON) text.

    Rules between fields are checked after the fields themselves.
    """
    return parse_document(text, VCPORun, source=source)


def parse_document(text: str, model: type[_Document], *, source: str) -> _Document:
    """Parse and check a document of any kind given as YAML (or JSON) text; see `parse_run`."""
    return _validate_document(_mapping(text, source), model, source)


def _validate_document(document: dict[Any, Any], model: type[_Document], source: str) -> _Document:
    text = _as_json(document, source)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        problems = problems_of(error)
        if model is VCPORun:
            problems = [_with_meant_field(each) for each in problems]
        raise SpecError(source, problems) from error


def _with_meant_field(problem: FieldProblem) -> FieldProblem:
    if problem.message != FIXES["extra_forbidden"] or not (field := meant(problem.path)):
        return problem
    return replace(problem, message=f"unknown field; did you mean {field}?")


def run_to_yaml(run: VCPORun) -> str:
    """Return a run as YAML with all defaults filled in; `parse_run` reads it back equal."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = False  # else U+0085 is written bare and read back as a line break
    yaml.width = sys.maxsize  # else a text of two lines can gain a space at the break
    yaml.dump(run.model_dump(mode="json", by_alias=True), stream)
    return stream.getvalue()


def _apply_changes(document: dict[Any, Any], changes: Sequence[str]) -> dict[Any, Any]:
    for change in changes:
        try:
            field, text = _split_change(change)
            _change_field(document, field, _document(text, f"--set {field}"))
        except SpecError:
            raise
        except ValueError as error:
            raise SpecError(f"--set {change}", [_file_problem(str(error))]) from error
    return document


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)  # a device has no end, and no size
    except OSError as error:
        raise SpecError(str(path), [_file_problem(f"cannot be read: {error.strerror}")]) from error
    if len(data) > _MAX_FILE_BYTES:
        raise SpecError(str(path), [_file_problem("is larger than 1 MiB; give a run file")])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(str(path), [_file_problem("is not UTF-8 text")]) from error


def _document(text: str, source: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        message = f"is not YAML: {where}{error.problem or error.context}"
        if error.problem == "but found another document":
            message = f"has a second document at line {mark.line + 1}; give one run a file"
        raise SpecError(source, [_file_problem(message)]) from error
    except (YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise SpecError(source, [_file_problem(f"is not YAML: {error}")]) from error
    except (LookupError, TypeError) as error:  # `!!bool 3`, `{[{}]: 1}`: the parser lets them out
        message = f"is not YAML: a tag does not fit its value, or a key is not text ({error})"
        raise SpecError(source, [_file_problem(message)]) from error
    except RecursionError as error:
        raise SpecError(source, [_file_problem("is nested too deeply")]) from error


def _mapping(text: str, source: str) -> dict[Any, Any]:
    document = _document(text, source)
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise SpecError(source, [_file_problem(f"is {kind}; give a run file, with `spec`")])
    return document


def _as_json(document: dict[Any, Any], source: str) -> str:
    try:
        return json.dumps(document)
    except (TypeError, ValueError) as error:
        message = f"has a value that JSON cannot represent ({error}); put dates in quotes"
        raise SpecError(source, [_file_problem(message)]) from error
    except RecursionError as error:
        raise SpecError(source, [_file_problem("is nested too deeply")]) from error


def _file_problem(message: str) -> FieldProblem:
    return FieldProblem(path=FILE, value="", message=message)


def _change_field(document: dict[Any, Any], path: str, value: object) -> None:
    """Set one field of a parsed run file; sections that it lacks are made.

    path: as errors write it, `spec.rollouts[0].maxReplicas`, with or without `spec.`. A field that
        no run has is refused when the document is checked.
    """
    *above, last = _keys(path)
    node: Any = document
    for place, key in enumerate(above):
        _require_place(node, key, above[:place])
        if isinstance(key, str) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    _require_place(node, last, above)
    node[last] = value


def _require_place(node: object, key: str | int, above: Sequence[str | int]) -> None:
    name = field_path(above)
    if isinstance(key, int):
        if not isinstance(node, list) or key >= len(node):
            count = len(node) if isinstance(node, list) else "no"
            items = f"{count} item{'s' * (count != 1)}"
            raise ValueError(f"{name} has {items} in the file, so there is no item {key}")
    elif not isinstance(node, dict):
        item = f"{name}[{key}]" if key.isdigit() else f"{name}[0].{key}"
        fix = f"; name an item, such as {item}" if isinstance(node, list) else ""
        raise ValueError(f"{name} is not a section in the file, so it has no {key}{fix}")  # noqa: TRY004 - of a text that the user gave


def _split_change(text: str) -> tuple[str, str]:
    """Return the path and the text of the value of `FIELD=VALUE`."""
    path, mark, value = text.partition("=")
    if not mark or not path.strip():
        raise ValueError(f"{text!r} must be FIELD=VALUE, such as {_EXAMPLE}")
    return path.strip(), value


def _keys(path: str) -> list[str | int]:
    keys: list[str | int] = []
    for part in path.split("."):
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{path!r} names no field; write it as errors do, such as {_EXAMPLE}")
        keys += [found[1], *map(int, re.findall(r"\d+", found[2]))]
    return keys if keys[0] in _TOP else [_SECTION, *keys]


_ELSEWHERE: Final = {
    "batch.promptsPerStep": "train_batch_size per_device_train_batch_size",
    "batch.trajectoriesPerPrompt": "num_generations rollout_n group_size n",
    "sampling.maxNewTokens": "max_completion_length max_response_length max_new_tokens max_tokens",
    "optimizer.learningRate": "lr",
    "optimizer.maxGradientNorm": "max_grad_norm grad_clip",
    "steps": "max_steps total_training_steps",
    "model.name": "model_name_or_path model_path path",
    "model.lora": "peft_config lora_rank lora_alpha",
    "environment.parameters": "train_dataset train_files dataset_name",
    "environment.rewards": "reward_funcs reward_function",
    "algorithm.method": "loss_type adv_estimator",
    "algorithm.settings": "beta epsilon epsilon_high clip_ratio",
    "algorithm.maxPolicyLagSteps": "num_iterations steps_per_generation staleness_threshold",
    "evaluation.everySteps": "eval_steps test_freq",
    "checkpoint.everySteps": "save_steps save_freq",
    "tracking.sinks": "report_to logger",
}
"""Names of TRL and verl, by field."""


def meant(path: str) -> str:
    """Return the path of the field that an unknown one may stand for; empty if none is alike."""
    section, _, last = re.sub(r"\[\d+\]", "[0]", path).rpartition(".")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()
    for field, names in _ELSEWHERE.items():
        if name in names.split():
            return f"spec.{field}"
    by_name = {}
    for field in sorted(_fields(), key=lambda each: each.rpartition(".")[0] == section):
        by_name[field.rpartition(".")[2]] = field  # one of the same section comes last, and stays
    camel = re.sub(r"_(\w)", lambda found: found[1].upper(), name)
    close = get_close_matches(camel, by_name, n=1, cutoff=0.75)
    return by_name[close[0]] if close else ""


@cache
def _fields() -> tuple[str, ...]:
    schema = json_schema()
    return tuple(_below(schema, schema, ""))


def _below(schema: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[str]:
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    for name, field in node.get("properties", {}).items():
        yield (inner := f"{path}.{name}" if path else name)
        yield from _below(schema, field, inner)
    for choice in (*node.get("anyOf", ()), *node.get("allOf", ())):
        yield from _below(schema, choice, path)
    if isinstance(items := node.get("items"), dict):
        yield from _below(schema, items, f"{path}[0]")
