"""Write the digest of each base image into the Dockerfiles; with ``--check`` only look.

A tag names what its publisher last pushed; a digest names one image by content. `docker buildx
imagetools inspect` asks the registry which digest a tag has now; it pulls nothing. Without a digest
the check warns and its exit status is 0, because only a registry can tell it; with ``--release`` it
is 1.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from scripts.supply.images import IMAGES, ROOT

DOCKERFILES: Final = tuple(sorted({image.dockerfile for image in IMAGES}))

_BASE: Final = re.compile(
    r"^ARG PYTHON_IMAGE=(?P<tag>[^@\s]+)(?:@(?P<digest>\S+))?$", flags=re.MULTILINE
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class BaseImageError(ValueError):
    """A Dockerfile names no base image, or a registry names no digest of it."""


def base_image(dockerfile: Path) -> tuple[str, str | None]:
    """Return name with tag, and digest or None, of the base image in a Dockerfile.

    Raises: BaseImageError if no line, or a line with another form of digest, names one.
    """
    found, name = _BASE.search(dockerfile.read_text(encoding="utf-8")), dockerfile.relative_to(ROOT)
    if found is None:
        raise BaseImageError(f"{name} has no line ARG PYTHON_IMAGE=<name>:<tag>")
    digest = found["digest"]
    if digest is not None and not _DIGEST.fullmatch(digest):
        wanted = "not sha256: and 64 hexadecimal digits"
        raise BaseImageError(f"{name} has the digest {digest!r}, {wanted}")
    return found["tag"], digest


def digest_in_registry(tag: str) -> str:
    """Digest that a tag has now; of the index of all platforms, if there is one.

    Raises: BaseImageError with what docker said.
    """
    command = ("docker", "buildx", "imagetools", "inspect", tag, "--format", "{{json .Manifest}}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
        digest = str(json.loads(done.stdout)["digest"])
    except FileNotFoundError:
        raise BaseImageError("needs the command docker, with buildx") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().partition("\n")[0] or "it said nothing"
        needs = "It needs buildx, and a registry that answers"
        raise BaseImageError(f"{tag}: `{' '.join(command[:4])}` failed: {said}. {needs}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise BaseImageError(f"{tag}: docker named no digest") from error
    if not _DIGEST.fullmatch(digest):
        raise BaseImageError(f"{tag}: docker named the digest {digest!r}")
    return digest


def write_digests() -> None:
    """Pin every Dockerfile, one question for each tag.

    Raises: BaseImageError; no file has then changed.
    """
    tags = {path: base_image(path)[0] for path in DOCKERFILES}
    digests = {tag: digest_in_registry(tag) for tag in sorted(set(tags.values()))}
    for path, tag in tags.items():
        line = f"ARG PYTHON_IMAGE={tag}@{digests[tag]}"
        path.write_text(_BASE.sub(line, path.read_text(encoding="utf-8")), encoding="utf-8")
    for tag, digest in digests.items():
        sys.stdout.write(f"{tag}@{digest}\n")


def main() -> int:
    """Write or check; the exit status is 1 for a digest that is wrong, or missing in a release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; warn")
    parser.add_argument("--release", action="store_true", help="write nothing; fail without digest")
    arguments = parser.parse_args()
    try:
        if not (arguments.check or arguments.release):
            write_digests()
        found = {path: base_image(path) for path in DOCKERFILES}
    except BaseImageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    missing = {path: tag for path, (tag, digest) in found.items() if digest is None}
    for path, tag in missing.items():
        lack = "has no digest, so a build takes what the tag names that day"
        sys.stderr.write(f"warning: {path.relative_to(ROOT)}: {tag} {lack}\n")
    if missing:
        sys.stderr.write("Fix, where a registry answers: make digests\n")
    return 1 if missing and arguments.release else 0


if __name__ == "__main__":
    raise SystemExit(main())
