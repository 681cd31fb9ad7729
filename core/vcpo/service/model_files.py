"""Models in storage that fsspec knows: fetched once into a cache folder of the host.

```
<cache>/<last part of the URL>-<digest>/          a complete model; the name appears last
        <last part of the URL>-<digest>.partial/  files so far; the next attempt goes on with them
        <last part of the URL>-<digest>.lock      of the process that fetches
```

The digest is of the URL and of what the storage says of each file, so another content is another
folder. The cache is `VCPO_MODEL_CACHE`, or `vcpo/models` in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn

from vcpo.service.lifecycle import StartError

CACHE_VARIABLE: Final = "VCPO_MODEL_CACHE"
"""Environment variable with the folder of fetched models."""

_LOGGER = logging.getLogger(__name__)
_WEIGHTS: Final = (".safetensors",)
_OTHERS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Endings of the files of a model: configuration, tokenizer, and code that runs only where
`spec.model.trustRemoteCode` says so."""
PATTERNS: Final = [f"*{ending}" for ending in _WEIGHTS + _OTHERS]
"""Names of all files that a model is loaded from."""
_IDENTITY: Final = ("size", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""Keys under which storages tell that a file's content changed; each storage has some of them."""
_TRANSFERS: Final = 4
"""Files that are fetched at once."""
_REPORT_S: Final = 5.0


class ModelFetchError(StartError):
    """A model cannot be fetched; the message names the field, the URL and the cure."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"spec.model.name: '{url}' {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    """The files of a model in a storage."""

    url: str
    files: Any
    """The storage, fsspec's `AbstractFileSystem`."""
    root: str
    infos: Mapping[str, Mapping[str, Any]]
    """The storage's facts about each file, by the file's path below the root."""

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(int(info.get("size") or 0) for info in self.infos.values())

    @property
    def folder_name(self) -> str:
        """Name of the folder in the cache, another one for another content."""
        identity = [
            (path, [str(info.get(key)) for key in _IDENTITY])
            for path, info in sorted(self.infos.items())
        ]
        digest = hashlib.sha256(repr((self.url, identity)).encode()).hexdigest()[:16]
        return f"{PurePosixPath(self.root).name or 'model'}-{digest}"


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

    Raises:
        ModelFetchError: if it cannot be fetched.
    """
    if not is_url(name):
        return name
    if name.startswith("file://"):
        if (problem := url_problem(name)) is not None:
            raise ModelFetchError(name, problem)
        return name.removeprefix("file://")
    listing = _listing(name, _WEIGHTS + _OTHERS if with_weights else _OTHERS)
    cache = _cache_folder()
    folder = cache / listing.folder_name
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with lock_file(cache / f"{folder.name}.lock"):
            if not folder.is_dir():  # another process may have fetched it meanwhile
                _fetch(listing, folder)
    return str(folder)


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "vcpo" / "models"


def _listing(url: str, endings: tuple[str, ...]) -> _Listing:
    if (problem := url_problem(url)) is not None:
        raise ModelFetchError(url, problem)
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
        infos = {info["name"]: info for info in files.ls(root, detail=True)}
    except Exception as error:  # noqa: BLE001 - a client of a storage may raise anything
        _refuse(url, error)
    found = {
        PurePosixPath(path).name: info
        for path, info in infos.items()
        if info.get("type") == "file" and path.endswith(endings)
    }
    if "config.json" not in found:
        raise ModelFetchError(url, "has no config.json; give the folder of a model")
    if ".safetensors" in endings and not any(path.endswith(_WEIGHTS) for path in found):
        raise ModelFetchError(url, "has no weights (*.safetensors); give the folder of a model")
    return _Listing(url=url, files=files, root=root, infos=found)


def _fetch(listing: _Listing, folder: Path) -> None:
    """Fetch all files, several at once, and report the progress; name the folder at the end."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    _LOGGER.info("fetching %s (%s) to %s", listing.url, _size(listing.size_bytes), folder)
    with ThreadPoolExecutor(max_workers=_TRANSFERS) as transfers:
        pending = {transfers.submit(_fetch_file, listing, path, partial) for path in listing.infos}
        while pending:
            done, pending = wait(pending, timeout=_REPORT_S)
            try:
                _raise_errors(done)
            except Exception as error:  # noqa: BLE001 - a client of a storage may raise anything
                transfers.shutdown(cancel_futures=True)
                _refuse(listing.url, error)
            if pending:
                so_far, of_all = _size(_bytes_in(partial)), _size(listing.size_bytes)
                _LOGGER.info("fetching %s: %s of %s", listing.url, so_far, of_all)
    partial.rename(folder)


def _fetch_file(listing: _Listing, path: str, partial: Path) -> None:
    """Fetch a file, unless an earlier attempt did."""
    target = partial / path
    if not target.exists():
        incomplete = partial / f".{path}"
        listing.files.get_file(listing.infos[path]["name"], str(incomplete))
        found, expected = incomplete.stat().st_size, listing.infos[path].get("size")
        if expected is not None and found != expected:
            raise ValueError(f"{path} has {found} bytes, must have {expected}")
        incomplete.rename(target)


def _bytes_in(folder: Path) -> int:
    """Return the size of the files of a folder; one that gets another name meanwhile may lack."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _raise_errors(done: set[Future[None]]) -> None:
    for each in done:
        each.result()


def _refuse(url: str, error: Exception) -> NoReturn:
    """Raise an error with a cure for an error of a storage's client."""
    cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        cure = "is not there; give the folder of a model"
    elif isinstance(error, PermissionError) or "redential" in cause:
        cure = (
            "may not be read; give this process the storage's credentials (s3: AWS_ACCESS_KEY_ID"
            " and AWS_SECRET_ACCESS_KEY, or a role; gs: GOOGLE_APPLICATION_CREDENTIALS), in a"
            " cluster in `template` of the learner and of each rollout group"
        )
    elif isinstance(error, OSError) and error.filename and error.errno:
        cure = f"cannot be stored; make room, or set {CACHE_VARIABLE} to another folder"
    else:
        cure = "cannot be read; check the URL and whether this machine reaches the storage"
    raise ModelFetchError(url, f"{cure} ({cause})") from error


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold a lock between the processes of a host; the kernel releases it if the process ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _size(size_bytes: int) -> str:
    return (
        f"{size_bytes / 2**30:,.1f} GiB"
        if size_bytes >= 2**30
        else f"{size_bytes / 2**20:,.1f} MiB"
    )
