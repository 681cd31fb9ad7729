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
pip=.venv/bin/pip
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
echo "Installing for $device ($why; to choose: make setup DEVICE=cuda or DEVICE=cpu)"

"${1:-python3}" -m venv .venv
$pip install --quiet --upgrade pip
extras=local,operator,dev,research,tracking,trl
if [ "$device" = cuda ]; then
    extras=$extras,rollout
    # Three signs: exactly this version, not the +cpu build that a place for builds may have as well.
    $pip install --quiet "torch===$torch"
# vLLM for CPUs wants PyTorch's build for CPUs, which PyPI does not have for Linux: pip finds it where
# it is told to look (PIP_FIND_LINKS, or PIP_EXTRA_INDEX_URL with the index that pytorch.org names).
elif [ "$(uname)" = Linux ] && $pip install --quiet "torch==$torch+cpu" 2>/dev/null; then
    extras=$extras,rollout-cpu
else
    echo "No torch==$torch+cpu: going on without vLLM. To have it, set PIP_EXTRA_INDEX_URL to" \
        "PyTorch's index of CPU builds (pytorch.org, Get Started, CPU) and make setup again." >&2
fi
$pip install --quiet --constraint deploy/constraints.txt --editable ".[$extras]"
if [ "$device" = cpu ]; then
    # Builds for CUDA that vLLM for CPUs asks for and does not need; see docs/design/032-vllm-engine.md.
    $pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
elif ! .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
    echo "The torch==$torch that pip found is a build without CUDA. Take the place it came from out of" \
        "PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, remove .venv, and make setup again." >&2
    exit 1
fi
echo "Installed for $device: .venv/bin/vcpo"
