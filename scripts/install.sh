#!/bin/sh
# Installs everything into .venv, at tested versions: scripts/install.sh [PYTHON]
set -eu
cd "$(dirname "$0")/.."
pip=.venv/bin/pip
torch=$(sed -n 's/^torch==//p' deploy/constraints.txt)

"${1:-python3}" -m venv .venv
$pip install --quiet --upgrade pip
extras=local,operator,dev,verifiers
# vLLM for CPUs wants PyTorch's build for CPUs, which PyPI does not have for Linux: pip finds it where
# it is told to look (PIP_FIND_LINKS, or PIP_EXTRA_INDEX_URL with the index that pytorch.org names).
if [ "$(uname)" = Linux ] && $pip install --quiet "torch==$torch+cpu" 2>/dev/null; then
    extras=$extras,rollout-cpu
else
    echo "No torch==$torch+cpu: going on without vLLM. To have it, set PIP_EXTRA_INDEX_URL to" \
        "PyTorch's index of CPU builds (pytorch.org, Get Started, CPU) and make setup again." >&2
fi
$pip install --quiet --constraint deploy/constraints.txt --editable ".[$extras]"
# Builds for CUDA that vLLM for CPUs asks for and does not need; see docs/design/032-vllm-engine.md.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
