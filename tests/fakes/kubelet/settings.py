"""Settings of a fake kubelet: the address of its API server and its periods."""

import json
import os
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from scripts.supply.images_check import USER, in_root


def _image_environment() -> dict[str, str]:
    """What the images' `ENV` lines say, with the modules of this environment for those of /opt."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAccess:
    """How to reach an API server."""

    url: str
    """Base address, without a path: `http://127.0.0.1:8001`."""
    token: str | None = None
    """Bearer token; None sends none."""
    tls: ssl.SSLContext | None = None
    """For https; None trusts what the machine trusts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRoot:
    """An image as a folder, in which its processes run as its user; it takes root's rights."""

    folder: Path
    environment: Mapping[str, str]

    @classmethod
    def kept(cls, folder: Path, name: str) -> Self:
        text = (folder / f"{name}.json").read_text(encoding="utf-8")
        return cls(folder=(folder / name).resolve(), environment=json.loads(text))

    def command(self, words: Sequence[str], shared: Path) -> list[str]:
        """Return the command line that runs a command there.

        shared: a directory below /tmp that is there too, and can be written.
        """
        here = ["/bin/sh", "-c", 'cd /tmp && exec "$@"', "sh", *words]
        return in_root(self.folder, here, as_user=True, bound=[str(shared)])

    @staticmethod
    def give(directory: Path) -> None:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletSettings:
    """How a fake kubelet works."""

    access: ApiAccess
    root: Path
    """Directory of everything it writes: volumes, claims, logs. Must exist."""
    images: Mapping[str, ImageRoot] = field(default_factory=dict)
    """Root folders of images by name without tag. Others run on the files of this machine."""
    node_name: str = "fake-node"
    image_environment: Mapping[str, str] = field(default_factory=_image_environment)
    """Environment that every image sets; pods add their own."""
    longest_probe_period_s: float = 10.0
    """Probes come at least this often, whatever the pod says; tests wait less that way."""
    first_back_off_s: float = 10.0
    """Wait before the second restart of a container; doubles with each, up to `last_back_off_s`."""
    last_back_off_s: float = 300.0
    heartbeat_s: float = 10.0
    """Time between renewals of the node's lease."""
