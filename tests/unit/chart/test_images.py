"""The Dockerfiles build small, pinned images that run as nobody."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fixtures.chart.rendering import ROOT

DOCKERFILES = {
    "operator": ROOT / "operator" / "Dockerfile",
    "learner": ROOT / "learner_svc" / "Dockerfile",
    "rollout": ROOT / "rollout_svc" / "Dockerfile",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPILING = ("learner", "rollout")
HEAVY = {"torch", "transformers", "safetensors", "vllm"}

each_image = pytest.mark.parametrize("image", DOCKERFILES)


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and arguments, comments dropped and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines if line.strip()]


def final_stage(image: str) -> list[tuple[str, str]]:
    steps = instructions(DOCKERFILES[image])
    last = max(index for index, (word, _) in enumerate(steps) if word == "FROM")
    return steps[last:]


def arguments_of(word: str, steps: list[tuple[str, str]]) -> list[str]:
    return [arguments for each, arguments in steps if each == word]


def requirements(extra: str | None = None) -> list[Requirement]:
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return [Requirement(each) for each in listed]


@each_image
def test_the_process_is_a_numeric_nobody(image):
    assert arguments_of("USER", final_stage(image)) == ["65532:65532"]


@each_image
def test_nothing_is_built_in_the_stage_that_ships(image):
    runs = arguments_of("RUN", final_stage(image))
    packages = r"apt-get update && apt-get install [\w+ -]+ && rm -rf /var/lib/apt/lists/\*"
    user = r"groupadd [\w -]+ && useradd [\w/ -]+"
    only_debian = rf"{packages}|{user}|{packages} && {user}"
    assert [run for run in runs if not re.fullmatch(only_debian, run)] == []
    packages = "--from=packages" if image in COMPILING else "--from=build"
    code = ["--from=build /opt/code /opt/code"] if image in COMPILING else []
    assert arguments_of("COPY", final_stage(image)) == [f"{packages} /opt/vcpo /opt/vcpo", *code]


@pytest.mark.parametrize("image", COMPILING)
def test_an_image_for_gpus_has_what_triton_compiles_with_and_a_name_of_its_user(image):
    (run,) = arguments_of("RUN", final_stage(image))
    assert {"gcc", "g++", "libc6-dev"} <= set(run.split())
    assert "useradd --uid 65532 --gid 65532" in run
    (environment,) = arguments_of("ENV", final_stage(image))
    assert "USER=vcpo" in environment.split()


@pytest.mark.parametrize("image", COMPILING)
def test_a_change_of_the_code_leaves_the_layer_of_the_packages_as_it_was(image):
    steps = instructions(DOCKERFILES[image])
    begins = [index for index, (word, _) in enumerate(steps) if word == "FROM"]
    packages = steps[begins[0] : begins[1]]
    assert steps[begins[1]] == ("FROM", "packages AS build")
    copied = " ".join(arguments_of("COPY", packages)).split()
    assert all(each.startswith("deploy/locks/") or each == "./" for each in copied)
    (installed,) = [run for run in arguments_of("RUN", steps) if "--no-index" in run]
    assert "--target /opt/code" in installed


@each_image
def test_the_base_is_one_exact_version_that_a_build_can_pin_by_digest(image):
    steps = instructions(DOCKERFILES[image])
    (base,) = [each for each in arguments_of("ARG", steps) if each.startswith("PYTHON_IMAGE=")]
    assert re.fullmatch(
        r"PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base
    )
    sources = {each.split(" AS ")[0] for each in arguments_of("FROM", steps)} - {"packages"}
    assert sources == {"${PYTHON_IMAGE}"}


@each_image
def test_sources_are_copied_by_name_and_never_the_whole_context(image):
    copies = arguments_of("COPY", instructions(DOCKERFILES[image]))
    assert not any(source in {".", "./", "*"} for copy in copies for source in copy.split()[:-1])
    assert arguments_of("ADD", instructions(DOCKERFILES[image])) == []


@each_image
def test_every_package_is_installed_by_the_hash_that_a_lock_has(image):
    runs = " && ".join(arguments_of("RUN", instructions(DOCKERFILES[image])))
    installs = [run for run in re.findall(r"pip install ([^&]*)", runs) if "--no-index" not in run]
    assert len(installs) == 2
    for install in installs:
        assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(install.split())


@each_image
def test_an_image_installs_its_own_lock_and_starts_its_own_module(image):
    steps = instructions(DOCKERFILES[image])
    (lock,) = re.findall(rf"--requirement ({image}\S*)", " ".join(arguments_of("RUN", steps)))
    cpu = "${TORCH_INDEX_URL:+-cpu}"
    for name in {lock.replace(cpu, ""), lock.replace(cpu, "-cpu")}:
        assert f"deploy/locks/{name}" in " ".join(arguments_of("COPY", steps)).split()
    assert arguments_of("ENTRYPOINT", final_stage(image)) == [f'["python", "-m", "vcpo_{image}"]']


@each_image
def test_the_wheel_of_this_project_is_made_without_a_network(image):
    runs = " ".join(arguments_of("RUN", instructions(DOCKERFILES[image])))
    assert "/opt/build/bin/hatchling build --target wheel --directory /dist" in runs
    assert re.search(r"/opt/vcpo/bin/pip install --no-deps --no-index .*/dist/\*\.whl", runs)


@each_image
def test_a_module_in_the_working_directory_never_shadows_an_installed_one(image):
    (environment,) = arguments_of("ENV", final_stage(image))
    assert "PYTHONSAFEPATH=1" in environment.split()


@each_image
def test_no_secret_is_an_argument_of_a_build(image):
    text = DOCKERFILES[image].read_text().upper()
    assert not any(word in text for word in ("TOKEN", "PASSWORD", "SECRET"))


def test_the_operators_image_holds_nothing_of_the_heavy_stack():
    names = {each.name for each in (*requirements(), *requirements("operator"))}
    assert names & HEAVY == set()
    assert "torch" not in " ".join(arguments_of("RUN", instructions(DOCKERFILES["operator"])))


@pytest.mark.parametrize("image", ["learner", "rollout"])
def test_there_is_a_build_for_gpus_and_one_for_cpus(image):
    steps = instructions(DOCKERFILES[image])
    assert "TORCH_INDEX_URL=" in arguments_of("ARG", steps)
    (run,) = [run for run in arguments_of("RUN", steps) if "TORCH_INDEX_URL:+-cpu" in run]
    assert '${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"}' in run
    assert f"{image}${{TORCH_INDEX_URL:+-cpu}}.txt" in run.split()


def test_the_build_context_holds_only_what_an_image_copies():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    copied = {
        source
        for path in DOCKERFILES.values()
        for copy in arguments_of("COPY", instructions(path))
        if not copy.startswith("--from")
        for source in copy.split()[:-1]
    }
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied
