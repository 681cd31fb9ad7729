"""Every alert has a runbook, and what a runbook names exists: series, objects, fields, events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click import Context

from tests.fixtures.chart.rendering import CHART, ROOT, of_kind, only
from tests.fixtures.promql import unknown_names
from tools.monitoring.rules import rules
from vcpo.cli.main import app
from vcpo_operator import names

FOLDER = ROOT / "docs" / "runbooks"
PAGES = {path.stem: path for path in FOLDER.glob("*/*.md")}
ALERTS = {rule.name: rule for rule in rules() if rule.is_alert}
RECORDED = frozenset(rule.name for rule in rules() if not rule.is_alert)
SECTIONS = ["Meaning", "Impact", "Diagnosis", "Mitigation", "False positives"]
RUN = "countdown"

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text(), flags=re.M | re.S)
    return [re.sub(r"\\\n\s*", " ", text) for text in found]


def commands(page: Path) -> Iterator[str]:
    for text in blocks(page, "sh"):
        yield from (line.strip() for line in text.splitlines())


def section(page: Path, title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), flags=re.M | re.S)
    return text


def panel_path(alert: str) -> str:
    return ALERTS[alert].annotations["dashboard_url"].partition("&")[0]


def test_there_is_a_runbook_for_each_alert_at_its_address_and_no_other():
    addresses = {rule.annotations["runbook_url"] for rule in ALERTS.values()}
    assert addresses == {path.relative_to(ROOT).as_posix() for path in PAGES.values()}
    assert ALERTS.keys() == PAGES.keys()


@each_page
def test_a_runbook_has_every_section_in_order(page):
    text = page.read_text()
    assert text.startswith(f"# {page.stem}\n")
    assert re.findall(r"^## (.*)", text, flags=re.M) == SECTIONS
    assert [title for title in SECTIONS if not section(page, title).strip()] == []


@each_page
def test_the_diagnosis_is_numbered_and_has_a_command_a_query_and_the_alerts_panel(page):
    diagnosis = section(page, "Diagnosis")
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", diagnosis, flags=re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 3
    assert "kubectl" in diagnosis
    assert "```promql" in diagnosis
    assert f"`{panel_path(page.stem)}`" in diagnosis
    assert "`vcpo run`" in page.read_text()


@each_page
def test_the_panel_of_the_alert_is_on_its_board_with_the_title_that_the_page_says(page):
    uid, panel_id = re.fullmatch(r"/d/([\w-]+)\?viewPanel=(\d+)", panel_path(page.stem)).groups()
    board = json.loads((CHART / "files" / "dashboards" / f"{uid}.json").read_text())
    (panel,) = (each for each in board["panels"] if each["id"] == int(panel_id))
    assert f"anel *{panel['title']}*: `" in section(page, "Diagnosis")


@each_page
def test_every_query_is_promql_over_series_that_exist(page):
    queries = blocks(page, "promql")
    assert {query: found for query in queries if (found := unknown_names(query, RECORDED))} == {}


def test_every_command_names_objects_as_the_operator_and_the_chart_name_them():
    known = {
        f"vrun {RUN}",
        f"pod {names.learner_name(RUN)}-0",
        f"deployment/{only('Deployment')['metadata']['name']}",
    }
    selectors = {
        f"{names.RUN_LABEL}={RUN}",
        *(f"{names.ROLE_LABEL}={role.value}" for role in names.Role),
        "app.kubernetes.io/component=operator",
    }
    component = only("Deployment")["spec"]["selector"]["matchLabels"]
    assert component["app.kubernetes.io/component"] == "operator"
    offenders = []
    for page in PAGES.values():
        for command in commands(page):
            named = re.findall(r"(?:vrun|pod) countdown[\w-]*|deployment/[\w-]+", command)
            labels = [
                each for text in re.findall(r" -l (\S+)", command) for each in text.split(",")
            ]
            faults = [*({*named} - known), *({*labels} - selectors)]
            offenders += [f"{page.stem}: {fault}" for fault in faults]
    assert offenders == []


def test_every_learner_command_names_its_pod_and_container():
    pod, container = f"{names.learner_name(RUN)}-0", names.Role.LEARNER.value
    lines = [line for page in PAGES.values() for line in commands(page) if " -c " in line]
    assert lines
    assert [line for line in lines if f" -c {container} " not in line or pod not in line] == []


def test_every_kubectl_command_says_its_namespace():
    lines = [line for page in PAGES.values() for line in commands(page)]
    kubectl = [line for line in lines if line.startswith("kubectl")]
    spaces = re.compile(r"^kubectl (-n (ml|vcpo-system) |get \S+ --all-namespaces)")
    assert [line for line in kubectl if not spaces.match(line)] == []
    others = {line.split()[0] for line in lines} - {"kubectl"}
    assert others <= {"vcpo", "grep", "tail", "cat", "helm", "--set"}


def test_every_patch_sets_a_field_of_the_definition():
    (definition,) = (
        each
        for each in of_kind("CustomResourceDefinition")
        if each["metadata"]["name"] == "vcporuns.vcpo.dev"
    )
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    texts = [page.read_text() for page in (*PAGES.values(), FOLDER / "README.md")]
    patches = [json.loads(text) for each in texts for text in re.findall(r"-p\s+'(.*?)'", each)]
    assert len(patches) > 5
    for patch in patches:
        fields, rest = schema, patch
        while isinstance(rest, dict):
            ((name, rest),) = rest.items()
            fields = fields["properties"][name]


def test_every_field_and_value_that_a_page_names_exists():
    chart = (ROOT / "charts" / "vcpo" / "values.yaml").read_text()
    texts = [*(str(each["spec"]) for each in of_kind("CustomResourceDefinition")), chart]
    known = set(re.findall(r"\w+", "\n".join(texts)))
    offenders = [
        f"{page.stem}: {path}"
        for page in PAGES.values()
        for path in re.findall(r"`((?:[a-z]\w*\.)+[a-z]\w*)`", page.read_text())
        if not path.endswith((".log", ".jsonl", ".json"))
        and not {*path.removeprefix("spec.").split(".")} <= known
    ]
    assert offenders == []


def test_every_event_that_a_command_looks_for_is_one_that_is_written():
    folders = ("core/vcpo", "learner_svc/vcpo_learner", "operator/vcpo_operator")
    sources = "\n".join(
        path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")
    )
    lines = [line for page in PAGES.values() for line in commands(page)]
    search = r"(?:vcpo events|learner-0 \|) .*grep (?:-E )?'?([\w|]+)"
    looked_for = [re.search(search, line) for line in lines]
    kinds = {kind for match in looked_for if match for kind in match[1].split("|")}
    kinds |= {kind for line in lines for kind in re.findall(r"reason=(\w+)", line)}
    assert len(kinds) > 5
    assert [kind for kind in sorted(kinds) if f'"{kind}"' not in sources] == []


def test_every_command_of_vcpo_has_the_options_that_it_is_given():
    pages = [*PAGES.values(), FOLDER / "README.md"]
    typed = [line for page in pages for line in commands(page)]
    typed += re.findall(r"`(vcpo (?!run`)[^`]+)`", "\n".join(page.read_text() for page in pages))
    calls = [line.partition("|")[0].split() for line in typed if line.startswith("vcpo ")]
    assert {name for _, name, *_ in calls} >= {"events", "logs", "report", "run"}
    known = typer.main.get_command(app).commands
    for _, name, *arguments in calls:
        known[name].make_parser(Context(known[name])).parse_args(arguments)


def test_every_chart_value_in_a_command_exists():
    lines = [line for page in PAGES.values() for line in commands(page)]
    settings = [each for line in lines for each in re.findall(r"--set '?([\w.]+)=", line)]
    assert settings
    text = (ROOT / "charts" / "vcpo" / "values.yaml").read_text()
    assert [each for each in settings if f"{each.split('.')[-2]}:" not in text] == []


def test_documents_name_alerts_that_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "charts/vcpo/README.md"]
    others = {"VCPORun", "VCPORunSpec", "VCPOTrainer"}
    named = {name for page in pages for name in re.findall(r"\bVCPO[A-Z]\w+", page.read_text())}
    assert sorted(named - ALERTS.keys() - others) == []


def test_the_index_lists_every_alert_with_its_severity():
    rows = re.findall(
        r"^\| \[(\w+)\]\(([^)]+)\) \| ([^|]+) \|", (FOLDER / "README.md").read_text(), re.M
    )
    listed = {name: (path, set(severities.split(", "))) for name, path, severities in rows}
    severities: dict[str, set[str]] = {}
    for rule in rules():
        if rule.is_alert:
            severities.setdefault(rule.name, set()).add(rule.labels["severity"])
    assert listed == {
        name: (PAGES[name].relative_to(FOLDER).as_posix(), found)
        for name, found in severities.items()
    }
