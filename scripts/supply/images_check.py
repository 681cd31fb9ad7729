"""Run the Dockerfiles without a container engine, and look at what they make; for root on Linux.

Every instruction of an image is carried out in a clean root folder. In place of the base image,
which only a registry has, stands Debian's release of the same name with its Python, made by
`mmdebstrap`. The result is looked at as the image's user, with a read-only root. Packages for CUDA
have gigabytes: `--packages` installs them too, else the steps that install them are left out, and
said to be. `--torch-index URL` takes the images for CPUs instead, whole. `--keep FOLDER` leaves the
roots there, where `python -m tests.e2e.cluster --roots FOLDER` runs the processes of a run in them.

The last line is one JSON object: for each image compiler, headers, user, size and size of
the code's layer in bytes, and what was not tried.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scripts.supply.images import IMAGES as ALL_IMAGES
from scripts.supply.images import ROOT, Image

_RELEASE: Final = "bookworm"
_OF_BASE: Final = "python3.11,python3.11-venv,ca-certificates"
_LINKS: Final = {"usr/local/bin/python": "python3.11", "usr/local/bin/python3": "python3.11"}
_HOST_FILES: Final = ("/etc/resolv.conf", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
_PASSED: Final = re.compile(r"^(PIP_|SSL_CERT|https?_proxy|HTTPS?_PROXY|no_proxy|NO_PROXY)")
_HEAVY: Final = re.compile(r"--requirement (learner|rollout)\b")
USER: Final = 65_532
"""Number of the images' user."""
_COMPILES: Final = {
    "compiler": "printf '#include <stdio.h>\\nint main(){return 0;}' > x.c && gcc x.c -o x && ./x",
    "headers": "printf '#include <vector>\\nint main(){return 0;}' > y.cc && g++ y.cc -o y && ./y",
    "user": "python3.11 -c 'import getpass; getpass.getuser()'",
}
"""What a library does at run time, as a shell command in the scratch folder."""


@dataclass(kw_only=True)
class Stage:
    """One stage of a Dockerfile: what it begins from, and its instructions in order."""

    base: str
    name: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)


def read_stages(text: str) -> list[Stage]:
    """The stages of a Dockerfile; instructions before the first one belong to none."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.M)
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found.append(Stage(base=base, name=name))
        elif word and found:
            found[-1].steps.append((word, rest.strip()))
    return found


def variables_of(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """What an ENV or ARG instruction sets, with `$NAME` of what is known."""
    pairs = (each.partition("=") for each in shlex.split(text))
    return {
        name: re.sub(r"\$(\w+)", lambda found: known.get(found[1], ""), value)
        for name, _, value in pairs
    }


def copies(text: str, folder: str) -> Iterator[tuple[str, str, str]]:
    """What a COPY copies: stage, empty for the tree; source; target, absolute.

    folder: The working folder.
    """
    words = text.split()
    stage = words.pop(0).removeprefix("--from=") if words[0].startswith("--from=") else ""
    *sources, target = words
    for source in sources:
        is_folder = target.endswith("/") or target in {".", "./"}
        name = f"{target}/{Path(source).name}" if is_folder else target
        yield stage, source, os.path.normpath(f"{folder}/{name}" if name[0] != "/" else name)


class Builder:
    """Carries out the Dockerfile of one image, each stage in a root folder of its own."""

    def __init__(
        self,
        base: Path,
        work: Path,
        *,
        with_packages: bool,
        bound: Sequence[str],
        arguments: Mapping[str, str],
    ) -> None:
        """Build below a work folder; `arguments` are those of `docker build --build-arg`."""
        self._base = base
        self._work = work
        self._with_packages = with_packages
        self._bound = bound
        self._arguments = arguments
        self._roots: dict[str, Path] = {}
        self.left_out: list[str] = []
        """Steps that were not carried out."""
        self.environment: dict[str, str] = {}
        """What the last stage sets for the processes of the image."""

    def build(self, dockerfile: Path) -> Path:
        """Carry out all stages; the root folder of the last one.

        Raises: subprocess.CalledProcessError.
        """
        root = self._base
        for number, stage in enumerate(read_stages(dockerfile.read_text(encoding="utf-8"))):
            root = self._work / str(number)
            start = self._roots.get(stage.base, self._base)
            subprocess.run(["cp", "-a", "--reflink=auto", start, root], check=True)  # noqa: S603, S607
            self._carry_out(stage, root)
            self._roots[stage.name] = root
        return root

    def _carry_out(self, stage: Stage, root: Path) -> None:
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin"}
        environment = {"HOME": "/root", **self.environment}
        environment |= {name: value for name, value in os.environ.items() if _PASSED.match(name)}
        folder = "/"
        for word, text in stage.steps:
            if word == "ARG":
                known = variables_of(text, environment)
                environment |= {name: self._arguments.get(name, known[name]) for name in known}
            elif word == "ENV":
                given = variables_of(text, environment)
                environment |= given
                self.environment |= given
            elif word == "WORKDIR":
                folder = text
                (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            elif word == "COPY":
                self._copy(text, folder, root)
            elif word == "RUN" and _HEAVY.search(text) and not self._with_packages:
                self.left_out.append(text.partition(" && ")[0])
            elif word == "RUN":
                run_in(root, f"cd {folder} && {text}", environment, bound=self._bound)

    def _copy(self, text: str, folder: str, root: Path) -> None:
        for stage, source, target in copies(text, folder):
            start = self._roots[stage] / source.lstrip("/") if stage else ROOT / source
            end = root / target.lstrip("/")
            end.parent.mkdir(parents=True, exist_ok=True)
            if start.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".venv")
                shutil.copytree(start, end, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                shutil.copy2(start, end)


def run_in(
    root: Path,
    command: str,
    environment: Mapping[str, str],
    *,
    as_user: bool = False,
    bound: Sequence[str] = (),
) -> str:
    """Run a shell command with a folder as its root; what it says on standard output.

    as_user: As the images' user, with all but `/tmp` read-only.
    bound: Folders of this machine that are there too.
    Raises: subprocess.CalledProcessError.
    """
    isolated = in_root(root, ["/bin/sh", "-ec", command], as_user=as_user, bound=bound)
    environment = dict(environment)
    done = subprocess.run(isolated, env=environment, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return done.stdout


def in_root(
    root: Path, command: Sequence[str], *, as_user: bool = False, bound: Sequence[str] = ()
) -> list[str]:
    """A command line that becomes a command with a folder as its root; arguments as of `run_in`.

    A user's process ends with the process that started it.
    """
    mounts = [f"mount --rbind /dev {root}/dev", f"mount -t proc proc {root}/proc"]
    if as_user:
        mounts.insert(0, f"mount --bind {root} {root} && mount -o remount,bind,ro {root}")
        mounts.append(f"mount -t tmpfs -o mode=1777 tmpfs {root}/tmp")  # noqa: S108
    mounts += [f"mkdir -p {root}{path} && mount --bind {path} {root}{path}" for path in bound]
    user = ["/usr/bin/setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    user += ["--pdeathsig=KILL"]  # a change of the user clears an earlier one
    inner = shlex.join(["/usr/sbin/chroot", str(root), *(user if as_user else ()), *command])
    return ["unshare", "--mount", "/bin/sh", "-ec", " && ".join([*mounts, f"exec {inner}"])]


def make_base(folder: Path, mmdebstrap: str) -> None:
    """Make the root folder that stands for the base image."""
    command = [mmdebstrap, "--variant=minbase", f"--include={_OF_BASE}", _RELEASE, str(folder)]
    subprocess.run(command, check=True)  # noqa: S603
    for link, target in _LINKS.items():
        (folder / link).symlink_to(f"/usr/bin/{target}")
    for name in _HOST_FILES:
        if Path(name).is_file():
            shutil.copy2(name, folder / name.lstrip("/"), follow_symlinks=True)


def look_at(root: Path, environment: Mapping[str, str], *, compiles: bool) -> dict[str, Any]:
    """What the user of an image finds in its root folder."""
    found: dict[str, Any] = {}
    for name, command in _COMPILES.items() if compiles else ():
        found[name] = _succeeds(root, f"cd /tmp && {command}", environment)
    found["size_bytes"] = _size(root)
    code = root / "opt" / "code"
    found["code_layer_bytes"] = _size(code) if code.is_dir() else None
    return found


def _succeeds(root: Path, command: str, environment: Mapping[str, str]) -> bool:
    try:
        run_in(root, command, environment, as_user=True)
    except subprocess.CalledProcessError:
        return False
    return True


def _size(folder: Path) -> int:
    command = ["du", "-sxb", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    return int(done.stdout.split()[0])


def check(image: Image, builder: Builder, keep: Path | None = None) -> dict[str, Any]:
    """Build an image's root folder, look at it, and move it to a folder that is to keep it."""
    try:
        root = builder.build(image.dockerfile)
        compiles = image.name != "operator"
        found = look_at(root, builder.environment, compiles=compiles)
    except subprocess.CalledProcessError as error:
        return {"failed": str(error)[-600:]}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        shutil.move(root, keep / image.name)
        (keep / f"{image.name}.json").write_text(json.dumps(builder.environment), encoding="utf-8")
    return {**found, "not_tried": [*builder.left_out, f"the base image, but {_RELEASE}"]}


def images_of_kind(*, for_cpus: bool) -> list[Image]:
    """The operator's image, and the others for CPUs or for GPUs."""
    return [each for each in ALL_IMAGES if each.for_cpus == for_cpus or each.name == "operator"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check images; 1 if one does not build, 2 if this machine cannot try."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", action="store_true", help="install packages of gigabytes")
    parser.add_argument("--torch-index", help="images for CPUs; URL of PyTorch's index of builds")
    parser.add_argument("--keep", type=Path, help="folder that keeps the images' roots")
    parser.add_argument("--mmdebstrap", default=shutil.which("mmdebstrap"), help="its path")
    bind = "folder of this machine that pip needs"
    parser.add_argument("--bind", action="append", default=[], help=bind)
    given = parser.parse_args(arguments)
    if os.geteuid() != 0 or not given.mmdebstrap:
        lack = "mmdebstrap (apt-get install mmdebstrap)" if os.geteuid() == 0 else "root's rights"
        sys.stderr.write(f"images-check needs {lack}\n")
        return 2
    report = {}
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        base, index = Path(folder) / "base", given.torch_index
        make_base(base, given.mmdebstrap)
        for image in images_of_kind(for_cpus=index is not None):
            work = Path(folder) / image.name
            work.mkdir()
            builder = Builder(
                base,
                work,
                with_packages=given.packages or index is not None,
                bound=given.bind,
                arguments={"TORCH_INDEX_URL": index or ""},
            )
            report[image.name] = check(image, builder, given.keep)
            shutil.rmtree(work)
    print(json.dumps(report))  # noqa: T201 - the result
    return int(any("failed" in each for each in report.values()))


if __name__ == "__main__":
    raise SystemExit(main())
