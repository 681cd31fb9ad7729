"""A model from a checkpoint, as `vcpo export` writes it."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fixtures.disk_limits import files_of_at_most
from tests.fixtures.learner.checkpoints import write_checkpoint, write_tensor_files
from tests.fixtures.learner.dispatcher import make_run
from tests.fixtures.records import EVALUATION
from vcpo.api import run_to_yaml
from vcpo.api.workloads import Lora, Model
from vcpo.records.exported_model import ExportedModel, ExportKind
from vcpo.records.journal import Journal
from vcpo.service.lifecycle import StartError
from vcpo_learner import export as learner_export
from vcpo_learner.checkpoints.folder import CheckpointFolder
from vcpo_learner.checkpoints.manifest import CheckpointError, CheckpointManifest, DamageError
from vcpo_learner.model.loading import load_policy
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.skeleton import build_skeleton

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
    return learner_export.export(learner_export.Options(source=source, **options))


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


CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"


@pytest.fixture
def strangers(run_dir, tmp_path):
    """A checkpoint of a stranger, whose manifest says what is given; its model has code."""
    trained_run(run_dir, 1, model={"name": TINY})
    path = (run_dir / "checkpoints" / "step-00000001").rename(tmp_path / "theirs")
    model = shutil.copytree(TINY, path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "house", "auto_map": {"AutoConfig": "evil.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "evil.py").write_text(CODE)

    def write(**changes):
        manifest = CheckpointManifest.read(path)
        changed = {**manifest.spec["model"], "name": str(model), **changes}
        spec = {**manifest.spec, "model": changed}
        manifest.model_copy(update={"spec": spec}).write(path)
        return path

    return write


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"trustRemoteCode": True}, {}, "asks to run Python code .* give --trust-remote-code"),
        ({}, {}, r"spec\.model\.trustRemoteCode: "),
        ({"trustRemoteCode": True}, {"model": TINY}, "asks to run Python code"),
        ({"name": "http://127.0.0.1:9/x"}, {}, "not a directory here; give --model"),
        ({"name": "file:///etc"}, {}, "not a directory here; give --model"),
        ({"name": "somebody/something"}, {}, "not a directory here; give --model"),
        ({"revision": "../../x"}, {"model": TINY}, "revision"),
        ({"lora": {"rank": 2}}, {"model": TINY}, "tensor .* does not fit the run's model"),
    ],
)
def test_the_manifest_of_a_stranger_runs_no_code_and_chooses_no_host(
    strangers, tmp_path, monkeypatch, changes, options, said
):
    monkeypatch.setattr(socket, "socket", None)
    with pytest.raises((StartError, ValueError), match=said):
        export(strangers(**changes), directory=tmp_path / "out", **options)
    assert not [*tmp_path.rglob("ran"), *tmp_path.rglob("out")]


def test_the_user_names_the_model_or_the_run_directory_whose_spec_does(run_dir, strangers):
    folder = export(strangers(revision="of-theirs"), directory=run_dir / "out", model=TINY)
    assert ExportedModel.read(folder).base_model == TINY
    path = strangers(trustRemoteCode=True, name="http://127.0.0.1:9/x")
    path.rename(run_dir / "checkpoints" / "step-00000001")
    assert ExportedModel.read(export(run_dir)).base_model == TINY


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["whole", "adapters"])
def test_a_checkpoint_that_is_not_the_whole_model_is_not_exported(tmp_path, lora):
    model, tokenizer = load_policy(TINY, None, lora)
    exporting = ModelExport(
        "run", Model(name=TINY, lora=lora), build_skeleton(TINY, None), tokenizer
    )
    add_adapters(exporting.model, lora) if lora else None
    model.evil = torch.nn.Linear(1, 1, bias=False)
    more = write_tensor_files(tmp_path / "more", model)
    del model.evil
    next(each for each in model.parameters() if each.requires_grad).requires_grad_(False)
    fewer = write_tensor_files(tmp_path / "fewer", model)
    for tensors in (more, fewer):
        with pytest.raises(DamageError, match=r"tensor .*: does not fit the run's model"):
            exporting.write_model(tmp_path / "out", tensors, step=1)
    assert not (tmp_path / "out").exists()


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
