"""Parts of whole runs: `vcpo run` on a model with random parameters, with each engine."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu.random_models import QWEN_0_5B, TINY, make_config
from benchmarks.gpu.setting import Figures, Setting, has_vllm

_SPECIAL_TOKENS: Final = ("<p>", "<b>", "<e>")
"""No part of another word, as a tokenizer cuts them out of every text."""
_RUN: Final = "import sys; from vcpo.cli.main import app; sys.argv[0] = 'vcpo'; app()"
_ROOT: Final = Path(__file__).parents[2]
_SHOWN: Final = ("step", "step_s", "idle_s", "ess_ratio", "lag_mean", "mismatch", "attention_calls")
_LINES_OF_A_FAILURE: Final = 30
"""Lines that are shown of what each process of a failed run said."""
_LIMIT_S: Final = {False: 120.0, True: 50.0}
"""Seconds of a run, by `is_quick`: less than its part has, as a run ends its own processes."""


def whole_run(setting: Setting) -> Figures:
    """Learner and a worker with engine hf on one card."""
    yield from _run(setting, "hf", _LIMIT_S[setting.is_quick])


def whole_run_vllm(setting: Setting) -> Figures:
    """The same with engine vllm."""
    if not has_vllm():
        yield {"skipped": "needs vLLM"}
        return
    yield from _run(setting, "vllm", 200.0)


def _run(setting: Setting, engine: str, limit_s: float) -> Figures:
    """What the run prints at its end, or its log; and its last step."""
    limit_s = limit_s if setting.is_gpu else 3.0 * limit_s
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_model(setting, folder / "model")
        # JSON is YAML.
        document = _document(setting, folder / "model", engine)
        (folder / "run.yaml").write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-c", _RUN, "run", str(folder / "run.yaml"), "--json"]
        command += ["--run-dir", str(folder / "run")]
        paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        # Our own command line, by our own interpreter.
        process = subprocess.Popen(  # noqa: S603
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        try:
            printed, told = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            printed, told = process.communicate()
            told += f"\nended after {limit_s:.0f} s"
        yield {"exit_status": process.returncode, "engine": engine}
        journal = folder / "run" / "metrics.jsonl"
        records = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
        steps = [each for each in map(json.loads, records) if "step_s" in each]
        if steps:
            yield {"last_step": {key: steps[-1].get(key) for key in _SHOWN}}
        logs = {path.stem: _end_of(path.read_text()) for path in folder.glob("run/logs/*.log")}
    lines = printed.strip().splitlines()
    if lines and lines[-1].startswith("{"):
        yield {"summary": json.loads(lines[-1])}
    if process.returncode:
        # Each line of the live view says how long the run had lasted.
        yield {"printed": _end_of(printed), "logs": logs}
        yield {"error": "\n".join(_end_of(told)) or "no message"}


def _end_of(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line and line[0] not in "┌├│└"]
    return lines[-_LINES_OF_A_FAILURE:]


def _save_model(setting: Setting, folder: Path) -> None:
    """Write a random model, and a tokenizer with a word for each of its tokens.

    A Llama, as for Qwen2 the library reads a tokenizer's file in a way of its own.
    """
    size = setting.choose(QWEN_0_5B, TINY)
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = LlamaForCausalLM(make_config(size, LlamaConfig))
    model.to(setting.dtype).save_pretrained(folder)
    first = len(_SPECIAL_TOKENS)
    words = {word: at for at, word in enumerate(_SPECIAL_TOKENS)}
    words |= {f"w{at}": at for at in range(first, size.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<p>"))  # noqa: S106 - a word
    tokenizer.pre_tokenizer = Whitespace()
    pad, begin, end = _SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=pad, bos_token=begin, eos_token=end
    ).save_pretrained(folder)


def _document(setting: Setting, model_folder: Path, engine: str) -> dict[str, Any]:
    places = {"maxConcurrentSequences": setting.choose(64, 16), "precision": setting.precision}
    group = {"name": "main", "engine": engine, **places}
    if not setting.is_gpu:
        group |= {"threads": 1, **({"kvCacheGibibytes": 0.125} if engine == "vllm" else {})}
    spec = {
        "model": {"name": str(model_folder)},
        "environment": {"name": "benchmarks.gpu.random_task:RandomTask"},
        "steps": setting.choose(4 if setting.is_quick else 12, 2),
        "batch": {"promptsPerStep": setting.choose(16, 2), "trajectoriesPerPrompt": 4},
        "sampling": {"maxNewTokens": setting.choose(256, 16)},
        "optimizer": {"learningRate": 1e-6},
        "algorithm": {"maxPolicyLagSteps": 2},
        "learner": {"precision": setting.precision},
        "rollouts": [group],
    }
    head = {"apiVersion": "vcpo.dev/v1alpha1", "kind": "VCPORun", "metadata": {"name": "gpu-check"}}
    return {**head, "spec": spec}
