"""The commands that documents print, and a user who types them on a server.

helm is the real one, by its SDK; kubectl is the real one where there is one. What needs more than
an API server is made to end at once: `--watch` is left out, a rollout is not waited for, and in
place of logs, which no kubelet keeps here, the object itself is asked for. docker and make are not
run: the files that they name must be there.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python

from tests.fixtures.chart.rendering import NAMESPACE, Values, render_files
from tests.fixtures.chart.variants import EVERYTHING, NARROW

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("helm", "kubectl")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:helm|kubectl) [^`]+)`")
_HEADER = re.compile(r"^# +((?:helm|kubectl) .*)$", re.MULTILINE)
_NOTE = re.compile(r"^  ((?:helm|kubectl) .*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"<[a-z]+>")


def documents() -> dict[str, list[str]]:
    """The commands of each document in their order, by its name."""
    found = {}
    for name in ("README.md", "docs/kubernetes.md", "charts/vcpo/README.md"):
        text = (ROOT / name).read_text()
        found[name] = [*_fenced_commands(text), *(one(each) for each in _INLINE.findall(text))]
    for path in (*sorted((ROOT / "examples").glob("*.yaml")), *_manifests()):
        found[str(path.relative_to(ROOT))] = _HEADER.findall(path.read_text())
    for name, values in NOTES.items():
        found[name] = _NOTE.findall(render_files(values)["NOTES.txt"])
    whole = {name: [each for each in texts if is_whole(each)] for name, texts in found.items()}
    return {name: commands for name, commands in whole.items() if commands}


NOTES: dict[str, Values] = {
    "NOTES.txt, defaults": {},
    "NOTES.txt, narrow": NARROW,
    "NOTES.txt, everything": EVERYTHING,
    "NOTES.txt, no definitions": {"crds": {"enabled": False}},
}


def _manifests() -> list[Path]:
    return [ROOT / "deploy" / "crds.yaml", ROOT / "deploy" / "vcpo.yaml"]


def _fenced_commands(text: str) -> Iterator[str]:
    blocks = [block for language, block in _FENCED.findall(text) if language in {"", "sh"}]
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            bare = re.split(r"\s+#\s", line)[0]
            yield from (one(part) for part in re.split(r"&&|;", bare) if part.split()[:1])


def one(command: str) -> str:
    """A command on one line, with names in place of what the reader must fill in."""
    text = " ".join(command.split()).replace("$REGISTRY", "registry.example.com/ml")
    return _PLACEHOLDER.sub("main", text.replace("<run>", "countdown"))


def is_whole(command: str) -> bool:
    """Whether a command is to be typed, and not the name of one."""
    words = command.split()
    return words[0] in PROGRAMS and len(words) > 2


def named_files(command: str) -> list[str]:
    """Files and folders of the project that a command names."""
    words = shlex.split(command)
    flags = {"-f", "-k", "--filename", "--kustomize"}
    found = [after for word, after in itertools.pairwise(words) if word in flags]
    found += [word for word in words if re.match(r"(charts|deploy|examples)/", word)]
    return [each for each in found if each != "run.yaml"]


class Typist:
    """Types commands in a folder, at a server. kubectl: path of the program."""

    def __init__(self, *, folder: Path, kubeconfig: Path, kubectl: str) -> None:
        self.folder = folder
        self.kubeconfig = kubeconfig
        self.kubectl = kubectl
        self._helms: dict[str, helm_python.Config] = {}

    def close(self) -> None:
        """Let go of helm."""
        for helm in self._helms.values():
            helm.close()

    def type(self, command: str) -> str:
        """Run a command, without what it is piped into; returns what it printed.

        Raises: RuntimeError, helm_python.HelmError.
        """
        program, *arguments = shlex.split(command.partition(" | ")[0])
        return self._helm(arguments) if program == "helm" else self._kubectl(arguments)

    def _kubectl(self, arguments: list[str]) -> str:
        words = [self.kubectl, f"--kubeconfig={self.kubeconfig}", *_without_waiting(arguments)]
        done = subprocess.run(
            words, cwd=self.folder, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"kubectl {shlex.join(arguments)}: {done.stderr}")
        return done.stdout

    def _helm(self, arguments: list[str]) -> str:
        said = _helm_line(arguments)
        helm = self._helm_in(said.namespace)
        match said.words:
            case ["install", name, chart]:
                helm.install(self.folder / chart, name, said.values, create_namespace=True)
            case ["upgrade", name, chart]:
                helm.upgrade(self.folder / chart, name, said.values, reuse_values=said.reuse_values)
            case ["uninstall", name]:
                helm.uninstall(name)
            case ["test", name]:
                # Its pod would wait for a node; that the release has one is what is asked.
                if "helm.sh/hook: test" not in json.dumps(helm.get_all(name)):
                    raise RuntimeError(f"helm test {name}: the release has no test")
            case _:
                raise RuntimeError(f"helm {said.words}: not known to the test")
        return ""

    def install(self, values: Values) -> None:
        """Install the chart as the notes have it that it was."""
        helm = self._helm_in(NAMESPACE)
        helm.install(self.folder / "charts/vcpo", "vcpo", values, create_namespace=True)

    def _helm_in(self, namespace: str) -> helm_python.Config:
        if namespace not in self._helms:
            # Kept in memory: helm writes its Secrets in a form that the fake does not read.
            self._helms[namespace] = helm_python.Config(
                kubeconfig_path=self.kubeconfig, namespace=namespace, storage_driver="memory"
            )
        return self._helms[namespace]


@dataclass(slots=True, kw_only=True)
class _HelmLine:
    words: list[str]
    values: dict[str, Any]
    namespace: str = "default"
    reuse_values: bool = False


def _helm_line(arguments: list[str]) -> _HelmLine:
    said = _HelmLine(words=[], values={})
    remaining = iter(arguments)
    for word in remaining:
        match word:
            case "--namespace":
                said.namespace = next(remaining)
            case "--set":
                _merge(said.values, helm_python.parse_set_string(next(remaining)))
            case "--reuse-values":
                said.reuse_values = True
            case "--create-namespace":
                pass
            case _ if word.startswith("-"):
                raise RuntimeError(f"helm {word}: not known to the test")
            case _:
                said.words.append(word)
    return said


def _merge(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _without_waiting(arguments: list[str]) -> list[str]:
    """The same command, which ends by itself on a server without a kubelet."""
    kept = [word for word in arguments if word != "--watch"]
    if "logs" in kept:
        at = kept.index("logs")
        if "-l" in kept:
            return [*kept[:at], "get", "pods", *kept[kept.index("-l") :][:2]]
        (name,) = (word for word in kept[at + 1 :] if not word.startswith("-"))
        return [*kept[:at], "get", name if "/" in name else f"pod/{name}"]
    return [*kept, "--watch=false"] if "rollout" in kept else kept
