"""Package the chart as ``dist/chart/vcpo-VERSION.tgz``; with ``--push`` send it to a registry.

A registry holds it as an OCI artifact, from which ``helm install vcpo oci://HOST/PATH/vcpo`` takes
it. The credentials are those of ``helm registry login``.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

import helm_python

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "dist" / "chart"


def package_chart(folder: Path = FOLDER) -> Path:
    """Write the chart's archive into a folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    return Path(helm_python.package(ROOT / "charts" / "vcpo", destination=folder))


def main() -> int:
    """Package, and push if asked to; 1 if the registry does not take it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--push", metavar="URL", help="registry and path, oci://HOST/PATH")
    arguments = parser.parse_args()
    archive = package_chart()
    sys.stdout.write(f"{archive.relative_to(ROOT)}\n")
    if arguments.push:
        try:
            helm_python.push(archive, arguments.push)
        except helm_python.HelmError as error:
            sys.stderr.write(f"{arguments.push}: {error}\n")
            return 1
        sys.stdout.write(f"{arguments.push}/{archive.stem.rpartition('-')[0]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
