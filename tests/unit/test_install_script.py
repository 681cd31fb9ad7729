"""The installation for a GPU and for a CPU: the real script, with a fake Python and a fake pip."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in *+cpu*) exit "${CPU_BUILD:-0}" ;; esac
"""
VENV_PYTHON = """#!/bin/sh
exit "${TORCH_WITHOUT_CUDA:-0}"
"""
PYTHON = f"""#!/bin/sh
mkdir -p .venv/bin
cat > .venv/bin/pip <<'END'
{PIP}END
cat > .venv/bin/python <<'END'
{VENV_PYTHON}END
chmod +x .venv/bin/pip .venv/bin/python
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Runs the script in a copy of the tree; returns what it said, its status and pip's calls."""
    for name in ("scripts/install.sh", "deploy/constraints.txt"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("fake-python", PYTHON), ("ldconfig", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    log = tmp_path / "pip.log"
    log.touch()

    def run(*arguments, gpus="", **variables):
        smi = tools / "nvidia-smi"
        smi.write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
        smi.chmod(0o755)
        done = subprocess.run(
            ["sh", str(tmp_path / "scripts/install.sh"), *arguments, "fake-python"],
            env={"PATH": f"{tools}:/usr/bin:/bin", "LOG": str(log), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr, done.returncode, log.read_text().splitlines()

    return run


def installed_extras(calls):
    """Extras of the last installation, and the packages removed."""
    (extras,) = [call.rpartition("[")[2].rstrip("]") for call in calls if "--editable" in call]
    removed = [call.split()[3:] for call in calls if call.startswith("uninstall")]
    return extras.split(","), removed


H200 = "GPU 0: NVIDIA H200\\n"


def test_where_there_is_a_gpu_its_builds_are_installed_and_nothing_is_removed(install):
    said, status, calls = install(gpus=H200)
    assert status == 0
    assert "Installing for cuda (found an NVIDIA driver" in said
    assert "install --quiet torch===2.13.0" in calls
    extras, removed = installed_extras(calls)
    assert "rollout" in extras
    assert "rollout-cpu" not in extras
    assert removed == []


def test_where_there_is_none_the_builds_for_cpus_are(install):
    said, status, calls = install()
    assert status == 0
    assert "Installing for cpu (found no NVIDIA driver" in said
    extras, removed = installed_extras(calls)
    assert "rollout-cpu" in extras
    assert "rollout" not in extras
    assert removed == [["torchvision", "torchaudio", "torchcodec", "triton"]]


def test_without_pytorchs_build_for_cpus_there_is_no_vllm(install):
    said, status, calls = install(CPU_BUILD="1")
    assert status == 0
    assert "going on without vLLM" in said
    assert not {"rollout", "rollout-cpu"} & set(installed_extras(calls)[0])


@pytest.mark.parametrize(("device", "gpus"), [("cuda", ""), ("cpu", H200)])
def test_the_users_choice_holds(install, device, gpus):
    said, status, calls = install("--device", device, gpus=gpus)
    assert status == 0
    assert f"Installing for {device} (as asked for" in said
    assert ("rollout" in installed_extras(calls)[0]) == (device == "cuda")


def test_a_torch_without_cuda_beside_a_gpu_is_reported_with_the_cure(install):
    said, status, _ = install(gpus=H200, TORCH_WITHOUT_CUDA="1")
    assert status == 1
    assert "is a build without CUDA. Take the place it came from out of" in said


def test_another_device_is_refused(install):
    said, status, calls = install("--device", "tpu")
    assert (status, calls) == (2, [])
    assert "--device is 'tpu', must be auto, cuda or cpu" in said
