"""Models in storage that fsspec knows: fetched once into a cache folder of the host.

A fetched model is `<cache>/<last part of the URL>-<digest>`, which gets its name when it is
complete. The digest is of the URL and of what the storage says of each file, so another content is
another folder. The cache is `VCPO_MODEL_CACHE`, or `vcpo/models` in the user's cache folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from vcpo.service.lifecycle import StartError

CACHE_VARIABLE: Final = "VCPO_MODEL_CACHE"
"""Environment variable with the folder of fetched models."""

_LOGGER = logging.getLogger(__name__)
_WEIGHTS: Final = (".safetensors",)
_OTHERS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Endings of the files of a model: configuration, tokenizer, and code that runs only where
`spec.model.trustRemoteCode` says so."""


class ModelFetchError(StartError):
    """A model cannot be fetched; the message has the field, the URL and the fix."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"spec.model.name: '{url}' {problem}")


def is_url(name: str) -> bool:
    """Return whether a model's name is a URL, and neither a directory nor a name on the hub."""
    return "://" in name


def url_problem(url: str) -> str | None:
    """Return why this machine cannot read a URL of this kind; None if it may."""
    protocol, _, place = url.partition("://")
    if not place.strip("/"):
        return "names no folder; give one, such as s3://bucket/folder"
    if protocol == "file" and not place.startswith("/"):
        return "is not an absolute path; give file:///folder, or a directory without file://"
    if importlib.util.find_spec("fsspec") is None:
        return "needs the package fsspec; pip install fsspec"
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        get_filesystem_class(protocol)
    except ValueError:
        known = "s3, gs, abfs, http, file"
        return f"is of a kind that fsspec does not know ('{protocol}'; for example {known})"
    except ImportError:
        package = known_implementations[protocol]["class"].partition(".")[0]
        return f"needs the package {package}; pip install {package}"
    return None


def local_model(name: str, *, with_weights: bool = True) -> str:
    """Return what the model libraries load: a directory or a name on the hub as it is given.

    A model at a URL is fetched into the cache, unless it is there; other processes of the host wait
    for the one that fetches.

    with_weights: also fetch the parameters, and not only configuration and tokenizer.
    """
    if not is_url(name):
        return name
    if (problem := url_problem(name)) is not None:
        raise ModelFetchError(name, problem)
    if name.startswith("file://"):
        return name.removeprefix("file://")
    try:
        return str(_fetched(name, _WEIGHTS + _OTHERS if with_weights else _OTHERS))
    except ModelFetchError:
        raise
    except Exception as error:  # a storage's client may raise anything
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ModelFetchError(
            name,
            f"cannot be fetched ({cause}); check the URL, room in {CACHE_VARIABLE}, and the"
            " storage's credentials of this process (s3: AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, or a role; gs: GOOGLE_APPLICATION_CREDENTIALS), in a cluster"
            " in `template` of the learner and of each rollout group",
        ) from error


def _fetched(url: str, endings: tuple[str, ...]) -> Path:
    import fsspec

    files, root = fsspec.core.url_to_fs(url)
    paths = sorted(
        info["name"]
        for info in files.ls(root, detail=True)
        if info.get("type") == "file" and info["name"].endswith(endings)
    )
    if not any(PurePosixPath(path).name == "config.json" for path in paths):
        raise ModelFetchError(url, "has no config.json; give the folder of a model")
    if ".safetensors" in endings and not any(path.endswith(_WEIGHTS) for path in paths):
        raise ModelFetchError(url, "has no weights (*.safetensors); give the folder of a model")
    identity = repr((url, [(path, files.ukey(path)) for path in paths]))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cache = _cache_folder()
    folder = cache / f"{PurePosixPath(root).name or 'model'}-{digest}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with lock_file(cache / f"{folder.name}.lock"):
            if not folder.is_dir():  # another process may have fetched it meanwhile
                _fetch(files, paths, url, folder)
    return folder


def _fetch(files: Any, paths: list[str], url: str, folder: Path) -> None:
    """Fetch files into a folder that gets its name when all of them are complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    sizes = {PurePosixPath(path).name: files.size(path) for path in paths}
    total_mib = sum(size or 0 for size in sizes.values()) / 2**20
    _LOGGER.info("fetching %s (%.0f MiB) to %s", url, total_mib, folder)
    files.get(paths, f"{partial}/")
    for name, size in sizes.items():
        if size is not None and (found := (partial / name).stat().st_size) != size:
            raise ModelFetchError(url, f"came in part: {name} has {found} of {size} bytes")
    partial.rename(folder)


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vcpo" / "models"


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock between the processes of a host; the kernel releases it if the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
