"""Base images are pinned by the digest that a registry names: the script, with a fake docker."""

from __future__ import annotations

import json
import sys

import pytest

from scripts.supply import base_images

DIGEST = f"sha256:{'a1' * 32}"
DOCKERFILE = """\
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm{digest}

FROM ${{PYTHON_IMAGE}} AS build
FROM ${{PYTHON_IMAGE}}
"""
TAG = "python:3.11.14-slim-bookworm"
FAILED = "`docker buildx imagetools inspect` failed"
NEEDS = "It needs buildx, and a registry that answers"
PLAIN = DOCKERFILE.format(digest="")
PINNED = DOCKERFILE.format(digest=f"@{DIGEST}")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Two Dockerfiles without a digest."""
    paths = (tmp_path / "one" / "Dockerfile", tmp_path / "two" / "Dockerfile")
    for path in paths:
        path.parent.mkdir()
        path.write_text(PLAIN)
    monkeypatch.setattr(base_images, "ROOT", tmp_path)
    monkeypatch.setattr(base_images, "DOCKERFILES", paths)
    return paths


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Puts a docker on the path that prints a text, and notes what it was asked."""
    tools = tmp_path / "tools"
    tools.mkdir()
    asked = tmp_path / "asked"

    def answer(text, status=0):
        stream = 2 if status else 1
        program = tools / "docker"
        program.write_text(
            f"#!/bin/sh\necho \"$*\" >> {asked}\necho '{text}' >&{stream}\nexit {status}\n"
        )
        program.chmod(0o755)
        return asked

    monkeypatch.setenv("PATH", str(tools))
    return answer


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["base_images", *arguments])
    return base_images.main()


def test_every_dockerfile_gets_the_digest_that_the_tag_has(tree, docker, monkeypatch, capsys):
    asked = docker(json.dumps({"mediaType": "an index", "digest": DIGEST, "size": 10}))
    assert run(monkeypatch) == 0
    assert [path.read_text() for path in tree] == [PINNED, PINNED]
    assert asked.read_text().splitlines() == [
        f"buildx imagetools inspect {TAG} --format {{{{json .Manifest}}}}"
    ]
    assert capsys.readouterr() == (f"{TAG}@{DIGEST}\n", "")


def test_a_newer_digest_takes_the_place_of_the_old_one(tree, docker, monkeypatch):
    newer = f"sha256:{'b2' * 32}"
    tree[0].write_text(PINNED)
    docker(json.dumps({"digest": newer}))
    assert run(monkeypatch) == 0
    assert [base_images.base_image(path.read_text()) for path in tree] == [(TAG, newer)] * 2


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ("ERROR: no such host", 1, f"{TAG}: {FAILED}: ERROR: no such host. {NEEDS}"),
        (
            "unknown flag: --format\n\nRun docker --help for more information",
            1,
            f"{TAG}: {FAILED}: unknown flag: --format. {NEEDS}",
        ),
        ("Name: something", 0, f"{TAG}: docker named no digest"),
        ("{}", 0, f"{TAG}: docker named no digest"),
        ('{"digest": "sha256:12"}', 0, f"{TAG}: docker named the digest 'sha256:12'"),
    ],
)
def test_without_a_digest_from_the_registry_no_file_changes(
    tree, docker, monkeypatch, capsys, answer, status, said
):
    docker(answer, status)
    assert run(monkeypatch) == 1
    assert [path.read_text() for path in tree] == [PLAIN, PLAIN]
    assert capsys.readouterr().err == f"{said}\n"


def test_without_docker_the_error_names_it(tree, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch) == 1
    assert capsys.readouterr().err == "needs the command docker, with buildx\n"


@pytest.mark.parametrize(("argument", "status"), [("--check", 0), ("--release", 1)])
def test_a_tag_alone_is_a_warning_and_stops_a_release(tree, monkeypatch, capsys, argument, status):
    tree[0].write_text(PINNED)
    assert run(monkeypatch, argument) == status
    said = capsys.readouterr().err
    assert f"warning: two/Dockerfile: {TAG} has no digest" in said
    assert "make digests" in said
    assert "one/Dockerfile" not in said


def test_where_all_have_a_digest_nothing_is_said(tree, monkeypatch, capsys):
    for path in tree:
        path.write_text(PINNED)
    assert run(monkeypatch, "--release") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DOCKERFILE.format(digest="@sha256:12"), "one/Dockerfile has the digest 'sha256:12'"),
        ("FROM python\n", "one/Dockerfile has no line ARG PYTHON_IMAGE="),
    ],
)
def test_a_dockerfile_that_names_no_base_or_half_a_digest_fails_the_check(
    tree, monkeypatch, capsys, text, said
):
    tree[0].write_text(text)
    assert run(monkeypatch, "--check") == 1
    assert said in capsys.readouterr().err
