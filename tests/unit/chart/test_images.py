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


@pytest.mark.parametrize("image", COMPILING)
def test_an_image_for_gpus_has_what_triton_compiles_with_and_a_name_of_its_user(image):
    (run,) = arguments_of("RUN", final_stage(image))
    assert {"gcc", "g++", "libc6-dev"} <= set(run.split())
    assert "useradd --uid 65532 --gid 65532" in run
    (environment,) = arguments_of("ENV", final_stage(image))
    assert "USER=vcpo" in environment.split()


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
def test_no_secret_is_an_argument_of_a_build(image):
    text = DOCKERFILES[image].read_text().upper()
    assert not any(word in text for word in ("TOKEN", "PASSWORD", "SECRET"))


def test_the_operators_image_holds_nothing_of_the_heavy_stack():
    names = {each.name for each in (*requirements(), *requirements("operator"))}
    assert names & HEAVY == set()
    assert "torch" not in " ".join(arguments_of("RUN", instructions(DOCKERFILES["operator"])))
