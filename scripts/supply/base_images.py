"""Write the digest of each base image into the Dockerfiles; with ``--check`` only look.

A tag names what its publisher last pushed; a digest names one image by content. `docker buildx
imagetools inspect` asks the registry which digest a tag has now; it pulls nothing. Without a digest
the check warns and its exit status is 0, because only a registry can tell it; with ``--release`` it
is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from scripts.supply.images import IMAGES, ROOT

DOCKERFILES: Final = tuple(sorted({image.dockerfile for image in IMAGES}))

_BASE: Final = re.compile(
    r"^ARG PYTHON_IMAGE=(?P<tag>[^@\s]+)(?:@(?P<digest>\S+))?$", flags=re.MULTILINE
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class BaseImageError(ValueError):
    """A Dockerfile names no base image, or a registry names no digest of it."""


def base_image(dockerfile: str) -> tuple[str, str | None]:
    """Name with tag, and digest or None, of the base image in a Dockerfile's text.

    Raises: BaseImageError if no line, or a line with another form of digest, names one.
    """
    found = _BASE.search(dockerfile)
    if found is None:
        raise BaseImageError("has no line ARG PYTHON_IMAGE=<name>:<tag>")
    digest = found["digest"]
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise BaseImageError(f"has the digest {digest!r}, not sha256: and 64 hexadecimal digits")
    return found["tag"], digest


def pin_digest(dockerfile: str, digest: str) -> str:
    """The Dockerfile's text with this digest of its base image."""
    return _BASE.sub(lambda found: f"ARG PYTHON_IMAGE={found['tag']}@{digest}", dockerfile)


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
        said = error.stderr.strip().partition("\n")[0]
        raise BaseImageError(
            f"{tag}: `docker buildx imagetools inspect` failed: {said or 'it said nothing'}."
            " It needs buildx, and a registry that answers"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise BaseImageError(f"{tag}: docker named no digest") from error
    if not _DIGEST.fullmatch(digest):
        raise BaseImageError(f"{tag}: docker named the digest {digest!r}")
    return digest


def write_digests() -> None:
    """Pin every Dockerfile, one question for each tag.

    Raises: BaseImageError; no file has then changed.
    """
    texts = {path: path.read_text(encoding="utf-8") for path in DOCKERFILES}
    tags = {path: base_image(text)[0] for path, text in texts.items()}
    digests = {tag: digest_in_registry(tag) for tag in sorted(set(tags.values()))}
    for path, text in texts.items():
        path.write_text(pin_digest(text, digests[tags[path]]), encoding="utf-8")
    for tag, digest in digests.items():
        sys.stdout.write(f"{tag}@{digest}\n")


def tags_without_digest() -> Iterator[str]:
    """Sentences about Dockerfiles whose base image is a tag alone.

    Raises: BaseImageError for a Dockerfile that cannot be read, with its path.
    """
    for path in DOCKERFILES:
        name = path.relative_to(ROOT)
        try:
            tag, digest = base_image(path.read_text(encoding="utf-8"))
        except BaseImageError as error:
            raise BaseImageError(f"{name} {error}") from error
        if digest is None:
            yield f"{name}: {tag} has no digest, so a build takes what the tag names that day"


def main() -> int:
    """Write or check; the exit status is 1 for a digest that is wrong, or missing in a release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; warn")
    parser.add_argument("--release", action="store_true", help="write nothing; fail without digest")
    arguments = parser.parse_args()
    try:
        if not (arguments.check or arguments.release):
            write_digests()
        missing = list(tags_without_digest())
    except BaseImageError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for sentence in missing:
        sys.stderr.write(f"warning: {sentence}\n")
    if missing:
        sys.stderr.write("Cure, where a registry answers: make digests\n")
    return 1 if missing and arguments.release else 0


if __name__ == "__main__":
    raise SystemExit(main())
