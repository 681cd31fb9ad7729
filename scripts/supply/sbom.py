"""Write a bill of materials for each image: CycloneDX 1.6, ``dist/sbom/<image>.cdx.json``.

It lists the packages of the image's lock with their licenses and who needs whom, and the base
image, but not what that one holds. It needs no network. Where ``SOURCE_DATE_EPOCH`` gives the time,
two runs on one tree write the same bytes (https://reproducible-builds.org/specs/source-date-epoch/).
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from scripts.supply.base_images import base_image
from scripts.supply.images import IMAGES, ROOT, Image, pyproject
from scripts.supply.licenses import LIST, Release, listed_licenses
from scripts.supply.lock import PROJECT, LockedPackage, read_lock

FOLDER: Final = ROOT / "dist" / "sbom"


def bill_of_materials(
    image: Image,
    project: Mapping[str, Any],
    lock: str,
    base: tuple[str, str | None],
    licenses: Mapping[Release, str],
    made_at: datetime,
) -> Bom:
    """The bill of materials of one image.

    project: the table ``project`` of pyproject.toml.
    lock: the lock's text.
    base: name with tag, and digest or None, of the base image.
    Raises: KeyError naming a package without a license.
    """
    lock_hash = hashlib.sha256(lock.encode()).hexdigest()
    factory = LicenseFactory()
    itself = Component(
        name=project["name"],
        version=project["version"],
        bom_ref=PROJECT,
        licenses=[factory.make_from_string(project["license"])],
    )
    packages = read_lock(lock)
    parts = {PROJECT: itself} | {
        package.name: _component(package, licenses, factory) for package in packages
    }
    container = Component(
        name=f"vcpo-{image.name}",
        version=project["version"],
        type=ComponentType.CONTAINER,
        bom_ref="image",
    )
    base_component = _base_component(*base)
    bom = Bom(
        components=[base_component, *parts.values()],
        serial_number=uuid5(NAMESPACE_URL, f"{container.name}@{container.version}:{lock_hash}"),
    )
    bom.metadata.timestamp = made_at
    bom.metadata.component = container
    bom.metadata.properties.add(Property(name="vcpo:lock:sha256", value=lock_hash))
    bom.register_dependency(container, [base_component, itself])
    for name, component in parts.items():
        bom.register_dependency(component, _needs_of(name, packages, parts))
    return bom


def _component(
    package: LockedPackage, licenses: Mapping[Release, str], factory: LicenseFactory
) -> Component:
    return Component(
        name=package.name,
        version=package.version,
        bom_ref=package.name,
        purl=PackageURL("pypi", None, package.name, package.version),
        licenses=[factory.make_from_string(licenses[package.name, package.public_version])],
    )


def _base_component(tag: str, digest: str | None) -> Component:
    name, _, version = tag.rpartition(":")
    return Component(
        name=name,
        version=version,
        type=ComponentType.CONTAINER,
        bom_ref="base image",
        purl=PackageURL("docker", None, name, digest or version),
    )


def _needs_of(
    name: str, packages: Iterable[LockedPackage], parts: Mapping[str, Component]
) -> list[Component]:
    return [parts[package.name] for package in packages if name in package.needed_by]


def write_sbom(
    image: Image, project: Mapping[str, Any], licenses: Mapping[Release, str], made_at: datetime
) -> Path:
    """Write one image's bill of materials, and return its file.

    Raises: ValueError if it does not have the form of CycloneDX.
    """
    lock = image.lock.read_text(encoding="utf-8")
    base = base_image(image.dockerfile.read_text(encoding="utf-8"))
    bom = bill_of_materials(image, project, lock, base, licenses, made_at)
    text = JsonV1Dot6(bom).output_as_string(indent=2) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise ValueError(f"the bill of materials of {image.name} is not CycloneDX: {wrong}")
    path = FOLDER / f"{image.name}.cdx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def main() -> int:
    """Write them all; the exit status is 1 for a package without a license."""
    project = pyproject()["project"]
    licenses = listed_licenses(LIST.read_text(encoding="utf-8"))
    made_at = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())), UTC)
    for image in IMAGES:
        try:
            path = write_sbom(image, project, licenses, made_at)
        except KeyError as error:
            sys.stderr.write(f"deploy/licenses.csv lacks {error}. Cure: make licenses\n")
            return 1
        sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
