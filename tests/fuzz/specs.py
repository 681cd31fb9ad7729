"""Targets: files that a user writes."""

import json
import warnings
from functools import cache
from typing import Any, TypeAlias

from hypothesis import strategies as st

from tests.fuzz.target import Target
from vcpo.api import SpecError, parse_run, run_to_yaml

_Document: TypeAlias = "str | dict[str, _Document]"

_SHORTEST: _Document = {
    "metadata": {"name": "r"},
    "spec": {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": "3"},
}
_SCALARS = (
    *("0", "1", "-1", "1e-6", "1e400", ".nan", "-.inf", "0x10", "0b", "0_", "1:30", "''", "~"),
    *("true", "yes", "null", "2020-12-31", "2020-13-45", "a", "a:B", "a b", "-", "=", "<<"),
    *('"\\ud800"', '"\\N"', '"\\0"', "a" * 300, "9" * 5000, f"0x{'f' * 5000}", "ü", "\t", "k8s/x"),
)
_TAGS = ("", "!!int ", "!!float ", "!!bool ", "!!str ", "!!null ", "!!timestamp ", "!!binary ")
_OTHER_TAGS = ("!!set ", "!!omap ", "!!seq ", "!!map ", "!!merge ", "!a ", "!!python/name:os ")
_PREFIXES = st.sampled_from((*_TAGS * 2, *_OTHER_TAGS, "&a ", "*a #", "? ", "- "))


def _nodes(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(inner, inner).map(": ".join), max_size=2)
    return st.one_of(
        st.builds("{}{}".format, _PREFIXES, inner),
        pairs.map(lambda each: "{" + ", ".join(each) + "}"),
        st.lists(inner, max_size=2).map(lambda each: "[" + ", ".join(each) + "]"),
    )


# By their indices: hypothesis would write all of them into the name of the strategy.
_NODES = st.recursive(
    st.integers(0, len(_SCALARS) - 1).map(lambda index: _SCALARS[index]), _nodes, max_leaves=6
)


@cache
def _fields() -> tuple[tuple[str, ...], ...]:
    return tuple(_paths(json.loads(parse_run(_rendered(_SHORTEST)).model_dump_json(by_alias=True))))


def _paths(document: Any) -> list[tuple[str, ...]]:
    if not isinstance(document, dict):
        return [()]
    below = [(name, *path) for name, each in document.items() for path in _paths(each)]
    return [(), *below]


def _rendered(document: _Document) -> str:
    if isinstance(document, str):
        return document
    return f"{{{', '.join(f'{name}: {_rendered(each)}' for name, each in document.items())}}}"


def _with_field(document: _Document, path: tuple[str, ...], value: _Document) -> _Document:
    """The document with one field set, and what is above it."""
    if not path:
        return value
    known = document if isinstance(document, dict) else {}
    return {**known, path[0]: _with_field(known.get(path[0], {}), path[1:], value)}


@st.composite
def _changed_runs(draw: st.DrawFn) -> str:
    """Runs in which up to three fields have other values."""
    run: _Document = _SHORTEST
    for path in draw(st.lists(st.deferred(lambda: st.sampled_from(_fields())), max_size=3)):
        run = _with_field(run, path, draw(_NODES))
    parameters = draw(st.none() | _NODES)
    if parameters is not None:
        run = _with_field(
            run, ("spec", "environment"), f"{{name: 'a:B', parameters: {parameters}}}"
        )
    return _rendered(run)


def _check_run(data: bytes) -> None:
    """A run is refused with fields and reasons, or is written and read back equal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an anchor that is set twice
            run = parse_run(data.decode(errors="replace"))
    except SpecError as error:
        problems = error.problems
    else:
        assert parse_run(run_to_yaml(run)) == run
        return
    assert problems
    assert all(problem.path and problem.message for problem in problems)


def _encoded(texts: st.SearchStrategy[str]) -> st.SearchStrategy[bytes]:
    return texts.map(lambda text: text.encode(errors="replace"))


TARGETS = (Target(name="run", inputs=_encoded(_changed_runs() | _NODES), check=_check_run),)
