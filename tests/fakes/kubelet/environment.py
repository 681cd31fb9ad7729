"""What a container's process sees: its command, arguments and environment, as pure functions.

A container has a file system and an address of its own; a process of this machine has not. So three
things are substituted in every text that the process may read (command, arguments, values of the
environment, text files from ConfigMaps and Secrets), and nothing else:

    a mount path, and all below it      -> the directory that stands for the mount
    `0.0.0.0:` (listen everywhere)      -> the pod's own loopback address and the same port
    `$(NAME)` in command, args, values  -> the variable's value, as Kubernetes itself does

Paths are replaced as whole names only: `/tmp` neither in `/tmpfile` nor in `/var/tmp`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]

_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_EVERYWHERE = re.compile(r"(?<![\d.])0\.0\.0\.0(?=:\d)")


class UnsupportedPodError(ValueError):
    """The pod asks for what the fake kubelet cannot give; the message names the field."""


class MissingReferenceError(LookupError):
    """The pod refers to an object, or a key, that is not there (yet)."""


class Relocation:
    """Rewrites texts from the container's view to this machine's."""

    def __init__(self, mounts: Mapping[str, str], pod_ip: str) -> None:
        """mounts: directory of this machine, by mount path."""
        self._mounts = dict(mounts)
        self._pod_ip = pod_ip
        longest_first = sorted(self._mounts, key=len, reverse=True)
        alternatives = "|".join(re.escape(path) for path in longest_first)
        self._path = re.compile(rf"(?<![\w./-])({alternatives})(?![\w.-])") if mounts else None

    def __call__(self, text: str) -> str:
        """The text as the process is to read it."""
        if self._path is not None:
            text = self._path.sub(lambda found: self._mounts[found[1]], text)
        return _EVERYWHERE.sub(self._pod_ip, text)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """text with `$(NAME)` replaced; an unknown name stays as it is and `$$` is one dollar sign."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return _REFERENCE.sub(value, text)


def environment(
    container: JsonObject, pod: JsonObject, read_key: Callable[[str, str, str], str]
) -> dict[str, str]:
    """Variables that the pod's author set, in order, each seeing those before it.

    read_key: value of a key of a ConfigMap or Secret: (`configmaps` or `secrets`, name, key).

    Raises:
        UnsupportedPodError: for sources that the fake kubelet does not know.
        MissingReferenceError: from `read_key`.
    """
    if container.get("envFrom"):
        raise UnsupportedPodError("containers[].envFrom: not supported by the fake kubelet")
    variables: dict[str, str] = {}
    for entry in container.get("env") or ():
        source = entry.get("valueFrom")
        if source:
            variables[entry["name"]] = _from_source(entry["name"], source, pod, read_key)
        else:
            variables[entry["name"]] = expand(entry.get("value") or "", variables)
    return variables


def _from_source(
    name: str, source: JsonObject, pod: JsonObject, read_key: Callable[[str, str, str], str]
) -> str:
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"])
    for key, plural in (("configMapKeyRef", "configmaps"), ("secretKeyRef", "secrets")):
        if key in source:
            return read_key(plural, source[key]["name"], source[key]["key"])
    raise UnsupportedPodError(f"env[{name}].valueFrom: {', '.join(source)} is not supported")


def field_of(pod: JsonObject, path: str) -> str:
    """A field of the pod as the downward API gives it, such as `metadata.labels['vcpo.dev/run']`.

    Raises:
        UnsupportedPodError: when the pod has none there.
    """
    keyed = re.fullmatch(r"(metadata\.(?:labels|annotations))\['([^']+)'\]", path)
    parts = [*keyed[1].split("."), keyed[2]] if keyed else path.split(".")
    value: Any = pod
    for part in parts:
        if not isinstance(value, Mapping) or part not in value:
            raise UnsupportedPodError(f"fieldRef.fieldPath: the pod has no {path}")
        value = value[part]
    return str(value)


def command_line(container: JsonObject, variables: Mapping[str, str]) -> list[str]:
    """The process to start.

    Raises:
        UnsupportedPodError: without a command; there is no image whose entry point could be run.
    """
    words: Sequence[str] = [*(container.get("command") or ()), *(container.get("args") or ())]
    if not container.get("command"):
        raise UnsupportedPodError(
            "containers[].command: must be set, since the fake kubelet runs no image"
        )
    return [expand(word, variables) for word in words]
