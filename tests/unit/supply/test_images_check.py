"""The Dockerfiles' instructions are read as a container engine reads them."""

from __future__ import annotations

import pytest

from scripts.supply.images import IMAGES
from scripts.supply.images_check import (
    Builder,
    copies,
    images_of_kind,
    main,
    read_stages,
    variables_of,
)


def test_stages_begin_at_from_and_continued_lines_are_one_instruction():
    text = "# a comment\nARG BASE=x\nFROM ${BASE} AS one\nRUN a && \\\n    b\nFROM one\nUSER 1:1\n"
    first, second = read_stages(text)
    assert (first.base, first.name, first.steps) == ("${BASE}", "one", [("RUN", "a && b")])
    assert (second.base, second.name, second.steps) == ("one", "", [("USER", "1:1")])


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_every_stage_of_our_images_begins_from_the_base_or_an_earlier_one(image):
    stages = read_stages(image.dockerfile.read_text())
    known = {"${PYTHON_IMAGE}"}
    for stage in stages:
        assert stage.base in known
        known.add(stage.name)
        words = {word for word, _ in stage.steps}
        assert words <= {"ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "ENTRYPOINT"}


def test_variables_refer_to_earlier_ones():
    known = {"PATH": "/usr/bin"}
    assert variables_of("PATH=/opt/bin:$PATH HOME=/tmp", known) == {
        "PATH": "/opt/bin:/usr/bin",
        "HOME": "/tmp",
    }
    assert variables_of("TORCH_INDEX_URL=", {}) == {"TORCH_INDEX_URL": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("core core", [("", "core", "/src/core")]),
        ("a.txt b/c.txt ./", [("", "a.txt", "/src/a.txt"), ("", "b/c.txt", "/src/c.txt")]),
        ("--from=build /opt/code /opt/code", [("build", "/opt/code", "/opt/code")]),
    ],
)
def test_a_copy_names_stage_source_and_target(text, expected):
    assert list(copies(text, "/src")) == expected


def test_a_build_argument_takes_the_place_of_the_default_and_of_no_other_variable(tmp_path):
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("FROM x\nARG URL=\nARG OTHER=1\nENV HOME=/tmp PATH=/opt/$URL:$PATH\n")
    base = tmp_path / "base"
    base.mkdir()
    builder = Builder(base, tmp_path, with_packages=True, arguments={"URL": "a", "LOST": "b"})
    builder.build(dockerfile)
    usual = "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"
    assert builder.environment == {"PATH": f"/opt/a:{usual}", "HOME": "/tmp"}


def test_an_image_is_for_cpus_or_for_gpus_and_the_operators_for_both():
    names = [[each.name for each in images_of_kind(for_cpus=cpus)] for cpus in (True, False)]
    assert names == [["operator", "learner-cpu", "rollout-cpu"], ["operator", "learner", "rollout"]]


def test_a_machine_that_cannot_try_says_what_it_lacks(capsys):
    assert main(["--mmdebstrap", ""]) == 2
    assert "images-check needs " in capsys.readouterr().err
