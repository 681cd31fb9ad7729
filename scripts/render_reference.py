"""The page of all fields of a run, made of the fields' own texts; `make site` shows it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from vcpo.api.run import json_schema

FIRST: Final = (
    *("model.name", "model.lora.rank", "environment.name", "environment.parameters"),
    *("environment.rewards", "environment.systemPrompt", "steps", "batch.promptsPerStep"),
    *("batch.trajectoriesPerPrompt", "sampling.maxNewTokens", "sampling.temperature"),
    *("algorithm.method", "algorithm.maxPolicyLagSteps", "optimizer.learningRate"),
    *("evaluation.everySteps", "evaluation.prompts", "checkpoint.everySteps"),
    *("rollouts[].maxReplicas", "rollouts[].maxConcurrentSequences", "rollouts[].engine"),
)
"""The twenty fields that people set first; the page begins with them."""

_HEADER: Final = """\
# Fields of a run

Paths are below `spec`; `[]` is an item of a list. `vcpo run FILE --set PATH=VALUE` sets one field
for one run, `vcpo validate FILE` checks all, and `vcpo schema` prints the same as a JSON schema.
"""
_COLUMNS: Final = "| field | value | default | meaning |\n|---|---|---|---|\n"
_Node = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field that a file can set."""

    path: str
    section: str
    """Path of the section that holds it; empty at the top."""
    node: _Node
    is_required: bool


def rendered_page() -> str:
    """Return the page: the fields that people set first, then the others by section."""
    schema = json_schema()
    sections: dict[str, tuple[str, list[_Field]]] = {}
    spec = _follow_reference(schema["properties"]["spec"], schema)
    for section, text, fields in _sections(spec, schema, "", spec.get("description", "")):
        sections[section] = (text, fields)
    known = {each.path: each for _, fields in sections.values() for each in fields}
    parts = [_HEADER, "## Set first\n", _table([known[path] for path in FIRST], schema)]
    parts.append("## All others\n")
    for section, (text, fields) in sections.items():
        others = [each for each in fields if each.path not in FIRST]
        if others:
            title, words = (f"`{section}`", " ".join(text.split())) if section else ("Top", "")
            parts += [f"### {title}\n", *([f"{words}\n"] if words else ()), _table(others, schema)]
    return "\n".join(parts)


def _sections(
    node: _Node, schema: _Node, path: str, text: str
) -> Iterator[tuple[str, str, list[_Field]]]:
    """Yield each section below a node, itself first: its path, its text, its own fields."""
    own: list[_Field] = []
    below: list[tuple[str, _Node, str]] = []
    for name, value in node.get("properties", {}).items():
        inner = f"{path}.{name}".strip(".")
        field = _follow_reference(value, schema)
        item, suffix = _section_in(field, schema)
        is_required = name in node.get("required", ())
        if item is None or suffix or _may_be_unset(field):
            own.append(_Field(path=inner, section=path, node=field, is_required=is_required))
        if item is not None:
            below.append((f"{inner}{suffix}", item, item.get("description", "")))
    yield path, text, own
    for inner, item, words in below:
        yield from _sections(item, schema, inner, words)


def _section_in(field: _Node, schema: _Node) -> tuple[_Node | None, str]:
    """Return the section that a field holds, if it holds one, and `[]` for a list of them."""
    for each in (field, *field.get("anyOf", ())):
        found = _follow_reference(each, schema)
        if "properties" in found:
            return found, ""
        items = _follow_reference(found.get("items", {}), schema)
        if "properties" in items:
            return items, "[]"
    return None, ""


def _follow_reference(node: _Node, schema: _Node) -> _Node:
    name = str(node.get("$ref", "")).removeprefix("#/$defs/")
    return {**schema["$defs"][name], **node} if name else node


def _may_be_unset(field: _Node) -> bool:
    return any(each.get("type") == "null" for each in field.get("anyOf", ()))


def _table(fields: list[_Field], schema: _Node) -> str:
    rows = [
        f"| `{each.path}` | {_value(each.node, schema)} | {_default(each)} |"
        f" {_cell(each.node.get('description', ''))} |"
        for each in fields
    ]
    return _COLUMNS + "".join(f"{row}\n" for row in rows)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: _Field) -> str:
    if field.is_required:
        return "must be set"
    value = field.node.get("default")
    if value is None:
        return "unset"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"one, `{value[0]['name']}`"
    return f"`{_cell(value if isinstance(value, str) else json.dumps(value))}`"


def _value(node: _Node, schema: _Node) -> str:
    """Return in words what a field takes."""
    node = _follow_reference(node, schema)
    if "anyOf" in node:
        kinds = [_value(each, schema) for each in node["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in node:
        return ", ".join(f"`{each}`" for each in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    match node.get("type"):
        case "integer" | "number" as kind:
            return f"{kind}{_range(node)}"
        case "boolean":
            return "`true`, `false`"
        case "array":
            return f"list: {_value(node.get('items', {}), schema)}"
        case "object":
            return "section" if "properties" in node else "map"
    return "text"


def _range(node: _Node) -> str:
    """Return the bounds of a number."""
    words = {
        "minimum": "",
        "exclusiveMinimum": "above ",
        "maximum": "",
        "exclusiveMaximum": "below ",
    }
    ends = [f"{word}{node[key]:,}".removesuffix(".0") for key, word in words.items() if key in node]
    return f", {' to '.join(ends)}"
