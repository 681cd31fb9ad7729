"""Generate the gRPC stubs of ``protos/`` into ``core/``; with ``--check`` only compare.

The stubs are committed so that an install needs no compiler; regeneration is byte-identical for
one version of the tools, so a difference means that a ``.proto`` file or a tool has changed.
"""

import argparse
import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("vcpo/wire/v1")


def generate(destination: Path) -> None:
    """Write the stubs of every ``.proto`` file below ``destination``.

    Raises:
        SystemExit: when the compiler refuses a file; it has said why.
    """
    sources = sorted(str(path) for path in (ROOT / "protos" / PACKAGE).glob("*.proto"))
    outputs = [f"--{kind}_out={destination}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{destination}" for kind in ("mypy", "mypy_grpc")]
    well_known = str(files("grpc_tools").joinpath("_proto"))
    # protoc finds the mypy plug-ins beside the interpreter.
    plugins = [
        f"--plugin={name}={Path(sys.executable).parent / name}"
        for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
    ]
    code = protoc.main(
        ["protoc", f"-I{ROOT / 'protos'}", f"-I{well_known}", *plugins, *outputs, *sources]
    )
    if code != 0:
        raise SystemExit(code)


def find_drift(committed: Path, fresh: Path) -> list[str]:
    """Names of stub files that differ between two folders or exist in one only."""
    names = {path.name for folder in (committed, fresh) for path in folder.glob("*_pb2*")}
    return sorted(
        name
        for name in names
        if not (committed / name).is_file()
        or not (fresh / name).is_file()
        or not filecmp.cmp(committed / name, fresh / name, shallow=False)
    )


def main() -> int:
    """Generate, or check; the exit status is 1 when the committed stubs have find_drift."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail on drift")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(ROOT / "core")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = find_drift(ROOT / "core" / PACKAGE, Path(scratch) / PACKAGE)
    if names:
        sys.stderr.write(f"stale stubs: {', '.join(names)}. Fix: make protos\n")
    return 1 if names else 0


if __name__ == "__main__":
    raise SystemExit(main())
