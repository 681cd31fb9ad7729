"""The images, and the packages that each of them asks for by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
LOCKS: Final = ROOT / "deploy" / "locks"
CONSTRAINTS: Final = ROOT / "deploy" / "constraints.txt"
PYPROJECT: Final = ROOT / "pyproject.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image that the Dockerfiles build."""

    name: str
    folder: str
    """Folder of the tree that holds its Dockerfile."""
    extras: tuple[str, ...]
    """Extras of pyproject.toml whose packages it holds."""
    for_cpus: bool = False
    """Whether it holds PyTorch's build for CPUs, not the one for CUDA."""

    @property
    def dockerfile(self) -> Path:
        return ROOT / self.folder / "Dockerfile"

    @property
    def lock(self) -> Path:
        return LOCKS / f"{self.name}.txt"


_LEARNER: Final = ("learner", "tracking")
IMAGES: Final = (
    Image(name="operator", folder="operator", extras=("operator",)),
    Image(name="learner", folder="learner_svc", extras=_LEARNER),
    Image(name="learner-cpu", folder="learner_svc", extras=_LEARNER, for_cpus=True),
    Image(name="rollout", folder="rollout_svc", extras=("rollout",)),
    Image(name="rollout-cpu", folder="rollout_svc", extras=("rollout-cpu",), for_cpus=True),
)
BUILD_LOCK: Final = LOCKS / "build.txt"
"""Packages that make the wheel; no image ships them."""


def pyproject() -> dict[str, Any]:
    """What pyproject.toml holds."""
    return tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


def asked_of_image(image: Image, project: Mapping[str, Any]) -> list[Requirement]:
    """Requirements of an image.

    project: the table ``project`` of pyproject.toml.
    """
    lists = [project["dependencies"]]
    lists += [project["optional-dependencies"][extra] for extra in image.extras]
    return [Requirement(text) for texts in lists for text in texts]


def tested_versions() -> dict[str, str]:
    """Version of each package with which the tests ran, from deploy/constraints.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pins}
