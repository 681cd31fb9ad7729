"""Reading and writing of run files, and reading of other files by the same rules.

YAML is read as YAML 1.2: `1e-6` is a number, `yes` is text. Values are not converted, as in a
cluster: `steps: "10"` is refused.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.tokens import (
    AliasToken,
    BlockEndToken,
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingEndToken,
    FlowMappingStartToken,
    FlowSequenceEndToken,
    FlowSequenceStartToken,
)

from vcpo.api.changes import change_field, split_change
from vcpo.api.errors import FILE, FieldProblem, SpecError, problems_of
from vcpo.api.run import VCPORun
from vcpo.api.valid_part import valid_part

_MAX_FILE_BYTES = 1 << 20
_MAX_DOCUMENT_CHARACTERS = 8 << 20
"""Largest document, with each alias replaced by what it names."""
_MAX_DEPTH = 32
_MAX_TOKENS = 20_000
"""Each key and each value has about two tokens; a run with every field has 800."""
_MAX_ALIASES = 100
_OPENING = (
    BlockMappingStartToken,
    BlockSequenceStartToken,
    FlowMappingStartToken,
    FlowSequenceStartToken,
)
_CLOSING = (BlockEndToken, FlowMappingEndToken, FlowSequenceEndToken)
_Document = TypeVar("_Document", bound=BaseModel)


def load_run(path: Path, changes: Sequence[str] = ()) -> VCPORun:
    """Read and check a run file.

    changes: `FIELD=VALUE` each, with a value in YAML; a later one may change what an earlier set.

    Raises:
        SpecError: with all problems of the file, if it cannot be read, parsed or accepted.
    """
    return _validate_document(_apply_changes(path, changes), VCPORun, str(path))


def load_document(path: Path, model: type[_Document]) -> _Document:
    """Read and check a file of any kind, as `load_run` does for runs.

    Raises:
        SpecError: with all problems of the file, if it cannot be read, parsed or accepted.
    """
    return parse_document(_read(path), model, source=str(path))


def load_valid_part(path: Path, changes: Sequence[str] = ()) -> VCPORun | None:
    """Read a run file with invalid fields, without these; as `valid_part`.

    changes: as in `load_run`.

    Raises:
        SpecError: if the file cannot be read or parsed.
    """
    return valid_part(_apply_changes(path, changes))


def parse_run(text: str, *, source: str = "run") -> VCPORun:
    """Parse and check a run given as YAML (or JSON) text.

    Rules between fields are checked after the fields themselves.

    Raises:
        SpecError: with all problems, each with its field path and value.
    """
    return parse_document(text, VCPORun, source=source)


def parse_document(text: str, model: type[_Document], *, source: str) -> _Document:
    """Parse and check a document of any kind given as YAML (or JSON) text; see `parse_run`.

    Raises:
        SpecError: with all problems, each with its field path and value.
    """
    return _validate_document(_mapping(text, source), model, source)


def _validate_document(document: dict[Any, Any], model: type[_Document], source: str) -> _Document:
    text = _as_json(document, source)
    try:
        return model.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise SpecError(source, problems_of(error)) from error


def run_to_yaml(run: VCPORun) -> str:
    """Return a run as YAML with all defaults filled in; `parse_run` reads it back equal."""
    stream = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = False  # else U+0085 is written bare and read back as a line break
    yaml.width = sys.maxsize  # else a text of two lines can gain a space at the break
    yaml.dump(run.model_dump(mode="json", by_alias=True), stream)
    return stream.getvalue()


def _apply_changes(path: Path, changes: Sequence[str]) -> dict[Any, Any]:
    """Return a run file's document with some fields set.

    Raises:
        SpecError: if the file or a change cannot be read, or a change has no place in the file.
    """
    document = _mapping(_read(path), str(path))
    for change in changes:
        try:
            field, text = split_change(change)
            change_field(document, field, _document(text, f"--set {field}"))
        except SpecError:
            raise
        except ValueError as error:
            raise SpecError(f"--set {change}", [_file_problem(str(error))]) from error
    return document


def _read(path: Path) -> str:
    """Return the text of a file.

    Raises:
        SpecError: if it cannot be read.
    """
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
        excess = _excess(text)
        document = None if excess else YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        message = f"is not YAML: {where}{error.problem or error.context}"
        raise SpecError(source, [_file_problem(message)]) from error
    except (YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise SpecError(source, [_file_problem(f"is not YAML: {error}")]) from error
    except (LookupError, TypeError) as error:  # `!!bool 3`, `{[{}]: 1}`: the parser lets them out
        message = f"is not YAML: a tag does not fit its value, or a key is no text ({error})"
        raise SpecError(source, [_file_problem(message)]) from error
    if excess:
        raise SpecError(source, [_file_problem(excess)])
    return document


def _excess(text: str) -> str | None:
    """Return what a text has too much of to be parsed; None if nothing.

    A text of 40 KB can take the parser half a minute. So its tokens are counted first, and no
    more of them are read than it takes to refuse it.

    Raises: YAMLError for what is no YAML.
    """
    depth, num_aliases = 0, 0
    for number, token in enumerate(YAML(typ="safe", pure=True).scan(text), start=1):
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        num_aliases += isinstance(token, AliasToken)
        if depth > _MAX_DEPTH:
            return f"is nested deeper than {_MAX_DEPTH} levels; write it flatter"
        if number > _MAX_TOKENS:
            return f"has more than {_MAX_TOKENS:,} keys, values and marks; write fewer"
        if num_aliases > _MAX_ALIASES:
            return f"has more than {_MAX_ALIASES} aliases; write fewer of them"
    return None


def _mapping(text: str, source: str) -> dict[Any, Any]:
    """Return a document that is a mapping.

    Raises:
        SpecError: if it is none.
    """
    document = _document(text, source)
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise SpecError(source, [_file_problem(f"must be a mapping with `spec`, not {kind}")])
    return document


def _as_json(document: dict[Any, Any], source: str) -> str:
    try:
        is_too_large = _num_characters(document, {}) > _MAX_DOCUMENT_CHARACTERS
        text = "" if is_too_large else json.dumps(document)
    except (TypeError, ValueError) as error:
        message = f"has a value that JSON cannot represent ({error}); put dates in quotes"
        raise SpecError(source, [_file_problem(message)]) from error
    except RecursionError as error:
        raise SpecError(source, [_file_problem("is nested too deeply")]) from error
    if is_too_large:
        message = "has aliases that make it larger than 8 MiB; write fewer of them"
        raise SpecError(source, [_file_problem(message)])
    return text


def _num_characters(node: Any, counted: dict[int, int]) -> int:
    """Return about how many characters a node has as JSON, in time linear in its YAML.

    counted: the sizes of nodes counted before, by identity; an alias is the node that it names.
    """
    if not isinstance(node, dict | list):
        return 1 + (len(node) if isinstance(node, str) else 0)
    if id(node) not in counted:
        counted[id(node)] = 0  # for a node within itself, which JSON refuses
        below = [*node, *node.values()] if isinstance(node, dict) else node
        counted[id(node)] = 1 + sum(_num_characters(each, counted) for each in below)
    return counted[id(node)]


def _file_problem(message: str) -> FieldProblem:
    return FieldProblem(path=FILE, value="", message=message)
