"""Every field of a run says what it sets, in which unit, and what it means if it is unset."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from scripts.render_reference import FIRST, rendered_page
from vcpo.api.run import VCPORunSpec

UNITS = {"_seconds": "seconds", "_gibibytes": "GiB", "_nats": "nats per token"}


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from models_in(argument)


def fields(
    model: type[BaseModel] = VCPORunSpec, path: str = "spec"
) -> Iterator[tuple[str, str, FieldInfo]]:
    """Path, name and field of each value that a run file can set, and of sections with a text."""
    for name, field in model.model_fields.items():
        inner = list(models_in(field.annotation))
        if not inner or field.description:
            yield f"{path}.{name}", name, field
        for each in inner:
            yield from fields(each, f"{path}.{name}")


def text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def offenders(is_broken) -> list[str]:
    return sorted({path for path, name, field in fields() if is_broken(name, field)})


def test_a_field_without_a_default_value_says_what_unset_means():
    def is_broken(_: str, field: FieldInfo) -> bool:
        unset = field.default is None and not field.is_required()
        return unset and "if unset" not in text(field).lower()

    assert offenders(is_broken) == []


def test_a_field_with_a_unit_names_it_in_its_text():
    def is_broken(name: str, field: FieldInfo) -> bool:
        units = [unit for suffix, unit in UNITS.items() if name.endswith(suffix)]
        return any(unit not in text(field) for unit in units)

    assert offenders(is_broken) == []


def test_no_text_speaks_of_pythons_none():
    def is_broken(_: str, field: FieldInfo) -> bool:
        return "None" in text(field)

    assert offenders(is_broken) == []


PAGE = rendered_page()
ROWS = re.findall(r"^\| `([\w.\[\]]+)` \| (.+?) \| (.+?) \| (.+) \|$", PAGE, flags=re.M)


def test_each_field_stands_once_with_its_text_and_the_twenty_come_first():
    paths = [path for path, *_ in ROWS]
    assert len(FIRST) == 20
    assert tuple(paths[:20]) == FIRST
    assert len(set(paths)) == len(paths)

    def in_file(path: str) -> str:
        return re.sub("_([a-z])", lambda each: each[1].upper(), path.removeprefix("spec."))

    texts = {path.replace("[]", ""): text for path, _, _, text in ROWS}
    assert texts == {
        in_file(path): " ".join((field.description or "").split()).replace("|", "\\|")
        for path, _, field in fields()
    }


def test_kind_range_and_default_of_a_field_are_told():
    told = {path: (value, default) for path, value, default, _ in ROWS}
    assert told["steps"] == ("integer, 1 to 10,000,000", "must be set")
    assert told["optimizer.learningRate"] == ("number, above 0 to 1", "`1e-06`")
    assert told["environment.overlongPrompts"] == ("`skip`, `truncate`, `fail`", "`skip`")
    assert told["model.lora"] == ("section", "unset")
    assert told["rollouts"] == ("list: section", "one, `main`")
    assert told["model.lora.targetModules"] == ("list: text", "`[]`")
