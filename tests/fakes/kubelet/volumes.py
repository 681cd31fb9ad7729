"""Volumes of a pod as directories of this machine.

<root>/pods/<namespace>_<pod>_<uid>/<volume>   ConfigMap, Secret, emptyDir: gone with the pod
<root>/claims/<namespace>/<claim>              PersistentVolumeClaim: kept across pods
"""

import base64
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.kubelet.environment import (
    JsonObject,
    MissingReferenceError,
    Relocation,
    UnsupportedPodError,
)

_SOURCES = {"configMap": ("configmaps", "name"), "secret": ("secrets", "secretName")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPaths:
    """Where the parts of one pod lie."""

    root: Path
    namespace: str
    pod: str
    uid: str

    @property
    def directory(self) -> Path:
        return self.root / "pods" / f"{self.namespace}_{self.pod}_{self.uid}"

    @property
    def logs(self) -> Path:
        return self.root / "logs" / f"{self.namespace}_{self.pod}"

    def volume(self, volume: JsonObject) -> Path:
        """Directory of a volume of the pod."""
        claim = volume.get("persistentVolumeClaim")
        if claim is not None:
            return self.root / "claims" / self.namespace / str(claim["claimName"])
        return self.directory / str(volume["name"])

    def forget(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def mount_points(pod: JsonObject, container: JsonObject, paths: PodPaths) -> dict[str, str]:
    """Directory of this machine by mount path, for one container.

    Raises:
        UnsupportedPodError: for a mount of a volume that the pod does not have.
    """
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes") or ()}
    points = {}
    for mount in container.get("volumeMounts") or ():
        if mount["name"] not in volumes:
            raise UnsupportedPodError(f"volumeMounts: the pod has no volume {mount['name']!r}")
        below = paths.volume(volumes[mount["name"]])
        points[mount["mountPath"].rstrip("/")] = str(below / mount.get("subPath", ""))
    return points


def volume_references(pod: JsonObject) -> list[tuple[str, str]]:
    """ConfigMaps and Secrets that the pod's volumes hold: (plural, name)."""
    found = []
    for volume in pod["spec"].get("volumes") or ():
        for source, (plural, key) in _SOURCES.items():
            if source in volume:
                found.append((plural, str(volume[source][key])))
    return found


def claims(pod: JsonObject) -> list[str]:
    """Names of the claims that the pod mounts."""
    volumes = pod["spec"].get("volumes") or ()
    sources = (volume.get("persistentVolumeClaim") for volume in volumes)
    return [source["claimName"] for source in sources if source]


def make_volumes(
    pod: JsonObject,
    paths: PodPaths,
    objects: Mapping[tuple[str, str], JsonObject],
    relocate: Relocation,
) -> None:
    """Make the directories and write the files of all volumes.

    objects: what `volume_references` returned.

    Raises:
        UnsupportedPodError: for kinds of volumes that the fake kubelet does not know.
        MissingReferenceError: when a volume asks for a key that its object lacks.
    """
    for volume in pod["spec"].get("volumes") or ():
        directory = paths.volume(volume)
        directory.mkdir(parents=True, exist_ok=True)
        source = next((each for each in _SOURCES if each in volume), None)
        if source is not None:
            plural, key = _SOURCES[source]
            content = object_files(plural, objects[plural, volume[source][key]])
            _write(directory, _select_items(volume[source], content), relocate)
        elif not {"emptyDir", "persistentVolumeClaim"} & volume.keys():
            raise UnsupportedPodError(f"volumes[{volume['name']}]: of a kind not supported")
    for container in pod["spec"]["containers"]:
        for directory_name in mount_points(pod, container, paths).values():
            Path(directory_name).mkdir(parents=True, exist_ok=True)


def object_files(plural: str, body: JsonObject) -> dict[str, bytes]:
    """Content of a ConfigMap or Secret by key."""
    if plural == "secrets":
        return {key: base64.b64decode(text) for key, text in (body.get("data") or {}).items()}
    files = {key: text.encode() for key, text in (body.get("data") or {}).items()}
    binary = (body.get("binaryData") or {}).items()
    return files | {key: base64.b64decode(text) for key, text in binary}


def _select_items(source: JsonObject, content: Mapping[str, bytes]) -> dict[str, bytes]:
    if not source.get("items"):
        return dict(content)
    chosen = {}
    for item in source["items"]:
        if item["key"] not in content:
            raise MissingReferenceError(f"references non-existent config key: {item['key']}")
        chosen[item["path"]] = content[item["key"]]
    return chosen


def _write(directory: Path, files: Mapping[str, bytes], relocate: Callable[[str], str]) -> None:
    for name, content in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(_relocate_text(content, relocate))


def _relocate_text(content: bytes, relocate: Callable[[str], str]) -> bytes:
    """Text as the process is to read it; what is not text stays as it is."""
    try:
        return relocate(content.decode()).encode()
    except UnicodeDecodeError:
        return content
