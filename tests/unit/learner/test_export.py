"""A model from a checkpoint, as `vcpo export` writes it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.checkpoints import write_checkpoint
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.records import EVALUATION
from vcpo.api import run_to_yaml
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import Journal
from vcpo.service.lifecycle import StartError
from vcpo_learner import export as learner_export
from vcpo_learner.checkpoints.folder import CheckpointFolder
from vcpo_learner.checkpoints.manifest import CheckpointError
from vcpo_learner.model.loading import load_policy

TINY = str(Path("examples/models/tiny").resolve())
TOKENS = torch.tensor([[3, 4, 5, 6]])
SHARD = "shard-00001-model-00001-of-00001.safetensors"
LORA = {"name": TINY, "lora": {"rank": 2, "alpha": 4}}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def trained_run(run_dir, *steps, model):
    """A run directory with checkpoints of random parameters; returns the last one's model."""
    run = make_run(model=model)
    run_dir.mkdir(exist_ok=True)
    (run_dir / "spec.yaml").write_text(run_to_yaml(run))
    settings = run.spec.model
    policy, _ = load_policy(settings.name, settings.revision, settings.lora)
    folder = CheckpointFolder(run_dir / "checkpoints", run)
    for step in steps:
        torch.manual_seed(step)
        for parameter in policy.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
        write_checkpoint(folder, step, model=policy)
    return policy


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def export(source, **options):
    defaults = {"directory": None, "step": None, "best": False, "adapters": False}
    return learner_export.export(learner_export.Options(source=source, **(defaults | options)))


def test_the_model_of_the_newest_checkpoint_loads_anywhere(run_dir):
    trained = trained_run(run_dir, 1, 2, model={"name": TINY})
    folder = export(run_dir)
    assert folder == run_dir / "exports" / "step-00000002"
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(trained))
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
    assert ExportedModel.read(folder) == ExportedModel(
        kind=ExportKind.MODEL, run="run", step=2, base_model=TINY, parameters=209_984
    )


def test_adapters_are_merged_or_load_beside_their_model_and_say_the_same(run_dir):
    trained = trained_run(run_dir, 4, model=LORA)
    merged = export(run_dir)
    assert merged.name == "step-00000004"
    beside = export(run_dir, adapters=True)
    assert beside.name == "step-00000004-adapters"
    assert not (beside / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), beside)
    expected = logits(trained)
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(TINY)))
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-6)
    whole = AutoModelForCausalLM.from_pretrained(merged)
    torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-5)


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(run_dir, capsys):
    trained_run(run_dir, 1, 2, model={"name": TINY})
    (run_dir / "checkpoints" / "step-00000002" / "ledger-00000.pb").write_bytes(b"x")
    assert export(run_dir).name == "step-00000001"
    assert "step-00000002/ledger-00000.pb" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused_with_the_cure(run_dir):
    trained_run(run_dir, model={"name": TINY})
    with pytest.raises(StartError, match="there is no checkpoint yet"):
        export(run_dir)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has none"):
        export(run_dir, step=7)


def test_a_folder_of_something_else_is_not_replaced_and_one_of_an_export_is(run_dir, tmp_path):
    trained_run(run_dir, 1, 2, model={"name": TINY})
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("mine")
    with pytest.raises(StartError, match=r"DIR: .*out holds something else"):
        export(run_dir, directory=output)
    (output / "mine.txt").unlink()
    for step in (1, 2):
        export(run_dir, directory=output, step=step)
    assert ExportedModel.read(output).step == 2


def test_a_disk_without_room_is_said_in_a_sentence_and_nothing_is_left(
    run_dir, capsys, monkeypatch
):
    trained_run(run_dir, 3, model={"name": TINY})
    monkeypatch.setattr("sys.argv", ["export", str(run_dir)])
    capsys.readouterr()  # what training printed
    with files_of_at_most(10_000):
        assert learner_export.main() == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"{run_dir / 'exports/step-00000003'}: cannot be written (")
    assert list((run_dir / "exports").iterdir()) == []


def test_the_best_evaluated_checkpoint_may_be_asked_for(run_dir):
    trained_run(run_dir, 1, 2, model={"name": TINY})
    with pytest.raises(StartError, match=r"--best: no checkpoint of .* was evaluated; give --step"):
        export(run_dir, best=True)
    journal = Journal(run_dir)
    for step, accuracy in [(0, 0.9), (1, 0.5), (2, 0.25)]:
        journal.evaluation(replace(EVALUATION, step=step, accuracy=accuracy))
    assert export(run_dir, best=True).name == "step-00000001"


@pytest.fixture(scope="module")
def half_precision(tmp_path_factory):
    """The tiny model in bfloat16, as nearly all models are published."""
    folder = tmp_path_factory.mktemp("models") / "half"
    AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def weights_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def named_dtype(folder):
    return json.loads((folder / "config.json").read_text())["dtype"]


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}], ids=["whole", "adapters"])
def test_a_model_has_the_number_format_that_the_run_began_with(run_dir, half_precision, lora):
    trained = trained_run(run_dir, 1, model={"name": str(half_precision), "lora": lora})
    kept = export(run_dir)
    assert named_dtype(kept) == "bfloat16"
    rounded = weights_of(kept)
    assert {each.dtype for each in rounded.values()} == {torch.bfloat16}
    if lora is None:
        for name, parameter in trained.named_parameters():
            assert torch.equal(rounded[name], parameter.bfloat16()), name
