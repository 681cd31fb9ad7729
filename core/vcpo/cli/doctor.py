"""`vcpo doctor`: what this machine or pod lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from vcpo.cli.console import OUT, USER_ERROR
from vcpo.local.doctor import findings


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Say what this machine or pod lacks: driver, compiler, memory, hub and more; 2 if it does."""
    is_well = True
    for each in findings():
        is_well = is_well and each.is_well
        mark, cure = ("ok", "") if each.is_well else ("LACKS", f" -> {each.cure}")
        text = json.dumps(asdict(each)) if as_json else f"{mark:5} {each.name}: {each.found}{cure}"
        OUT.print(text, soft_wrap=True, markup=False, highlight=False)
    if not is_well:
        raise typer.Exit(USER_ERROR)
