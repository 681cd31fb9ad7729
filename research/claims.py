"""What README and the results page say, against numbers computed from the records.

`claims.yaml` has sentences of each page with numbers as fields, `{STUDY/METHOD/LAG/COLUMN:.3f}`. A
digit of a page that is in none of them has to be in one of its `given` patterns: a setting.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

import yaml


def facts_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a report by name."""
    tables = [*report["conditions"].items()]
    for name, study in report["studies"].items():
        tables += [(name, study[part]) for part in ("by_lag", "safe_rates", "plane")]
    facts = {
        f"{name}/{row['method']}/{row['lag']}/{column}": value
        for name, rows in tables
        for row in rows
        for column, value in row.items()
        if isinstance(value, int | float)
    }
    facts |= {
        f"{name}/{row['method']}/{row['lag']}/{row['rate']:.0e}": row["final"]
        for name, rows in report["conditions"].items()
        for row in rows
    }
    facts |= {f"{name}/target": study["target"] for name, study in report["studies"].items()}
    return facts | {"cells": report["cells"]}


def check(root: Path, facts: Mapping[str, float]) -> tuple[int, list[str]]:
    """Return how many numbers of the pages are facts, and where a page differs."""
    numbers, problems = 0, list[str]()
    pages = Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8")
    for place, claims in yaml.safe_load(pages).items():
        page, _, heading = place.partition("#")
        text = (root / page).read_text(encoding="utf-8")
        section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0] if heading else text
        rest = " ".join(section.split())
        for sentence in claims["says"]:
            numbers += sum(name is not None for _, name, _, _ in Formatter().parse(sentence))
            said = " ".join(sentence.format_map(facts).split())
            if said not in rest:
                problems.append(f"{place}: does not say: {said}")
            rest = rest.replace(said, " ")
        rest = re.sub("|".join(claims["given"]), " ", rest)
        problems += [f"{place}: no fact: {found}" for found in re.findall(r"\S*\d\S*", rest)]
    return numbers, problems
