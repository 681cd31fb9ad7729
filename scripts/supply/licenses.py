"""Write ``deploy/licenses.csv``, a license for each package; with ``--check`` only compare.

The packages are those of the images' locks. A license is read in the package's metadata: of the
environment that runs this, if it has the same version, else of the file that pip finds and
downloads. ``deploy/licenses.toml`` says which licenses may be shipped, and names those that
metadata leave open. The check needs no network.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.supply.images import IMAGES, ROOT
from scripts.supply.license_policy import UNKNOWN, LicensePolicy, PolicyError
from scripts.supply.lock import LockError, read_lock

POLICY: Final = ROOT / "deploy" / "licenses.toml"
LIST: Final = ROOT / "deploy" / "licenses.csv"
COLUMNS: Final = ("package", "version", "license", "images")

Release = tuple[str, str]
"""Canonical name and public version of a package."""


def shipped_releases() -> dict[Release, list[str]]:
    """Names of the images that hold each package, from the locks; sorted by package."""
    images: dict[Release, list[str]] = {}
    for image in IMAGES:
        for package in read_lock(image.lock.read_text(encoding="utf-8")):
            images.setdefault((package.name, package.public_version), []).append(image.name)
    return dict(sorted(images.items()))


def listed_licenses(text: str) -> dict[Release, str]:
    """License of each package, as the list has it."""
    rows = csv.DictReader(io.StringIO(text))
    return {(row["package"], row["version"]): row["license"] for row in rows}


def read_policy() -> LicensePolicy:
    """The policy in deploy/licenses.toml.

    Raises: PolicyError that names the file, the table and the value.
    """
    try:
        return LicensePolicy.from_table(tomllib.loads(POLICY.read_text(encoding="utf-8")))
    except (PolicyError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"{POLICY.relative_to(ROOT)}: {error}") from error


def rendered_list(shipped: Mapping[Release, Iterable[str]], licenses: Mapping[Release, str]) -> str:
    """Text of the list, a row for each package."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for release, images in shipped.items():
        writer.writerow((*release, licenses.get(release, UNKNOWN), " ".join(images)))
    return file.getvalue()


def license_problems(licenses: Mapping[Release, str], policy: LicensePolicy) -> list[str]:
    """Sentences about packages that may not be shipped, and about words of the policy for none."""
    by_name = {name: expression for (name, _), expression in licenses.items()}
    return [
        *(
            f"{name} {version} has the license {expression}: allow it in deploy/licenses.toml, or"
            " drop it"
            for (name, version), expression in licenses.items()
            if not policy.allows(name, expression)
        ),
        *(
            f"deploy/licenses.toml: packages.{name} is {stated!r}, its metadata say"
            f" {by_name[name]!r}: remove it"
            if name in by_name
            else f"deploy/licenses.toml: packages.{name} is in no image: remove it"
            for name, stated in policy.packages.items()
            if by_name.get(name) != stated
        ),
    ]


def metadata_here(release: Release) -> dict[str, Any] | None:
    """Metadata of a package in this environment, or None if it is not the same version."""
    try:
        found = distribution(release[0])
    except PackageNotFoundError:
        return None
    return found.metadata.json if Version(found.version).public == release[1] else None


def metadata_of_files(releases: Iterable[Release]) -> dict[Release, dict[str, Any]]:
    """Metadata of packages as pip finds them; downloads their files.

    Raises: subprocess.CalledProcessError; pip has then said why.
    """
    wanted = [f"{name}=={version}" for name, version in releases]
    if not wanted:
        return {}
    sys.stdout.write(f"pip reads {len(wanted)} files; those for CUDA have several GB\n")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        subprocess.run(  # noqa: S603 - a fixed command
            [
                *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"),
                *("--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--quiet"),
                *("--report", str(report), *wanted),
            ],
            check=True,
        )
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    tables = (each["metadata"] for each in found)
    return {(canonicalize_name(t["name"]), Version(t["version"]).public): t for t in tables}


def read_licenses(
    shipped: Collection[Release], known: Mapping[Release, str], policy: LicensePolicy
) -> dict[Release, str]:
    """License of each package: the known one, else that of its metadata."""
    here = {each: metadata_here(each) for each in shipped if each not in known}
    metadata = {each: table for each, table in here.items() if table is not None}
    metadata |= metadata_of_files(each for each, table in here.items() if table is None)
    found = {each: policy.license_of(each[0], table) for each, table in metadata.items()}
    return found | {
        each: policy.packages.get(each[0], expression)
        for each, expression in known.items()
        if each in shipped
    }


def main() -> int:
    """Write or check; the exit status is 1 when the list is stale or a license is not allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    parser.add_argument("--all", action="store_true", help="read also what the list already has")
    arguments = parser.parse_args()
    try:
        shipped, policy = shipped_releases(), read_policy()
    except (LockError, PolicyError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    text = LIST.read_text(encoding="utf-8") if LIST.is_file() else ""
    if not arguments.check:
        listed = {} if arguments.all else listed_licenses(text)
        known = {each: expression for each, expression in listed.items() if expression != UNKNOWN}
        try:
            text = rendered_list(shipped, read_licenses(shipped, known, policy))
        except subprocess.CalledProcessError as error:
            sys.stderr.write("pip did not find all packages (above); the list is as it was\n")
            return error.returncode
        LIST.write_text(text, encoding="utf-8")
    listed = listed_licenses(text)
    problems = license_problems(listed, policy)
    if rendered_list(shipped, listed) != text:
        problems.append("deploy/licenses.csv is not of the locks. Cure: make licenses")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
