"""Check of a whole run: the learner and vLLM on one card, for twenty steps."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.random_models import QWEN_1_5B, TINY, make_model
from benchmarks.gpu.setting import Figures, Setting

_SPECIAL_TOKENS: Final = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
_RUN = "import sys; from vcpo.cli.main import app; sys.argv[0] = 'vcpo'; app()"


def whole_run(setting: Setting) -> Figures:
    """Run `vcpo run` on a random model, and return the summary that it prints."""
    steps = setting.choose(20, 3)
    with tempfile.TemporaryDirectory() as directory:
        model_folder = Path(directory) / "model"
        _save_model(setting, model_folder)
        file = Path(directory) / "run.yaml"
        # JSON is YAML.
        file.write_text(json.dumps(_document(setting, model_folder, steps)), encoding="utf-8")
        command = [sys.executable, "-c", _RUN, "run", str(file), "--json"]
        command += ["--run-dir", str(Path(directory) / "run")]
        # Our own command line, by our own interpreter.
        ended = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
    yield {"exit_status": ended.returncode, "steps": steps}
    lines = ended.stdout.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        yield {"summary": json.loads(lines[-1])}
    else:
        yield {"error": "\n".join(ended.stderr.strip().splitlines()[-5:])}


def _save_model(setting: Setting, folder: Path) -> None:
    """Write a random model, and a tokenizer with a word for each of its tokens."""
    size = setting.choose(QWEN_1_5B, TINY)
    make_model(size, torch.device("cpu")).bfloat16().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{at}": at for at in range(size.vocabulary)}))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL_TOKENS).save_pretrained(folder)


def _document(setting: Setting, model_folder: Path, steps: int) -> dict[str, Any]:
    group = {
        "name": "main",
        "engine": "vllm",
        "maxConcurrentSequences": setting.choose(64, 16),
        "precision": setting.precision,
    }
    if not setting.is_gpu:
        group |= {"kvCacheGibibytes": 0.125, "threads": 1}
    return {
        "apiVersion": "vcpo.dev/v1alpha1",
        "kind": "VCPORun",
        "metadata": {"name": "gpu-check"},
        "spec": {
            "model": {"name": str(model_folder)},
            "environment": {"name": "benchmarks.gpu.random_task:RandomTask"},
            "steps": steps,
            "batch": {"promptsPerStep": setting.choose(16, 2), "trajectoriesPerPrompt": 4},
            "sampling": {"maxNewTokens": setting.choose(512, 16)},
            "optimizer": {"learningRate": 1e-6},
            "learner": {"precision": setting.precision},
            "rollouts": [group],
        },
    }
