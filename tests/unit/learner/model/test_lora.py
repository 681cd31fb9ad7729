"""LoRA adapters in the learner: trained, published, saved, and merged equally by workers."""

import pytest
import torch

from research.cells.versions import policy_tensors
from tests.fixtures.families import family
from tests.fixtures.learner.checkpoints import write_tensor_files
from tests.fixtures.learner.models import (
    PAD,
    VOCABULARY,
    llama,
    qwen2,
    qwen3_moe,
    sampled_groups,
    seeded_model,
)
from tests.fixtures.learner.updates import make_spec
from tests.fixtures.vocabularies import tokenizer_of
from vcpo.api.workloads import Lora, Model, Precision
from vcpo.service.lifecycle import StartError
from vcpo_learner.model.loading import load_policy
from vcpo_learner.model.lora import add_adapters
from vcpo_learner.model.model_folder import ModelExport
from vcpo_learner.model.skeleton import load_on_ranks
from vcpo_learner.ranks.ranks import Ranks
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_rollout.weights.postprocess import LoraMerge

LORA = Lora(rank=2, alpha=4)
TOKENS = torch.randint(1, 20, (3, 7), generator=torch.Generator().manual_seed(0))
FAMILIES = pytest.mark.parametrize("make", [llama, qwen2])


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def train_adapters(make):
    """A model with adapters after two steps, and the parameters it had before."""
    model = seeded_model(make)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    add_adapters(model, LORA)
    update = PolicyUpdate(model, make_spec(), PAD)
    for _ in range(2):
        assert update.step(sampled_groups(model), policy_version=9).skipped is None
    return model, before


@FAMILIES
def test_only_adapters_are_trained_and_published(make):
    model, before = train_adapters(make)
    kept = {name.replace(".base_layer", ""): each for name, each in model.named_parameters()}
    assert all(torch.equal(kept[name], each) for name, each in before.items())
    published = policy_tensors(model)
    assert {name.split(".")[-3] for name in published} == {"lora_A", "lora_B"}
    # Seven linear layers in each of two blocks, two matrices each.
    assert len(published) == 28


@pytest.mark.parametrize("make", [llama, qwen2, qwen3_moe])
def test_workers_make_the_learners_policy_from_its_adapters(make):
    model, before = train_adapters(make)
    merge = LoraMerge(base=before, scale=LORA.scale)
    worker = seeded_model(make)
    found = worker.load_state_dict(merge(policy_tensors(model), 2), strict=False)
    assert not found.unexpected_keys
    assert not torch.equal(logits(worker), logits(seeded_model(make)))
    torch.testing.assert_close(logits(worker), logits(model), rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_a_whole_model_without_adapters(tmp_path):
    model, tokenizer = load_policy("examples/models/tiny", None, LORA)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    expected = logits(model)
    tensors = write_tensor_files(tmp_path / "tensors", model)
    settings = Model(name="examples/models/tiny", lora=LORA)
    ModelExport("run", settings, model, tokenizer).write_model(tmp_path / "model", tensors, step=1)
    loaded, _ = load_policy(str(tmp_path / "model"), None)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)


def test_layers_may_be_chosen_by_name():
    model = seeded_model(llama)
    add_adapters(model, Lora.model_validate({"targetModules": ["q_proj"]}))
    assert {name.split(".")[4] for name in policy_tensors(model)} == {"q_proj"}


def test_a_name_that_fits_no_layer_is_refused():
    with pytest.raises(StartError, match=r"targetModules: \['qproj'\] fits no layer"):
        add_adapters(seeded_model(llama), Lora.model_validate({"targetModules": ["qproj"]}))


def test_the_mlps_of_a_mixture_get_no_adapters():
    model = seeded_model(qwen3_moe)
    add_adapters(model, LORA)
    layers = {name.split(".")[4] for name in policy_tensors(model)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_layers_that_peft_refuses_get_no_adapter_unless_they_are_named():
    model = family("falcon_h1")
    add_adapters(model, LORA)
    adapted = {name.split(".")[-4] for name in policy_tensors(model)}
    assert {"in_proj", "q_proj", "o_proj", "gate_proj"} <= adapted
    assert "out_proj" not in adapted
    with pytest.raises(StartError, match=r"targetModules: \['out_proj'\]: .*is incompatible"):
        add_adapters(family("falcon_h1"), Lora.model_validate({"targetModules": ["out_proj"]}))


def test_a_layer_that_is_used_without_a_call_gets_no_adapter():
    model = family("jamba")
    add_adapters(model, LORA)
    adapted = {name.split(".")[-4] for name in policy_tensors(model)}
    assert "x_proj" in adapted
    assert "dt_proj" not in adapted
    with pytest.raises(StartError, match="'dt_proj' is a layer that Mamba's layers use without a"):
        add_adapters(family("jamba"), Lora.model_validate({"targetModules": ["x_proj", "dt_proj"]}))


def test_naming_a_layer_of_a_mixtures_mlps_is_refused():
    with pytest.raises(StartError, match=r"\['up_proj'\] are layers of the MLPs of a mixture"):
        add_adapters(
            seeded_model(qwen3_moe), Lora.model_validate({"targetModules": ["q_proj", "up_proj"]})
        )


def test_a_head_that_is_also_the_embeddings_is_refused():
    with pytest.raises(StartError, match=r"targetModules: \['lm_head'\] shares its matrix"):
        add_adapters(llama(tied=True), Lora.model_validate({"targetModules": ["lm_head"]}))


@pytest.fixture
def files(tmp_path):
    """Files of a model in a number type, with its tokenizer."""

    def written(dtype):
        seeded_model(llama).to(dtype).save_pretrained(tmp_path)
        tokenizer_of(range(VOCABULARY)).save_pretrained(tmp_path)
        return Model(name=str(tmp_path), lora=LORA)

    return written


@pytest.mark.parametrize(
    ("dtype", "precision", "held"),
    [
        (torch.bfloat16, Precision.BFLOAT16, torch.bfloat16),
        (torch.bfloat16, Precision.FLOAT32, torch.float32),
        # Half of the digits would be lost, in what is exported too.
        (torch.float32, Precision.BFLOAT16, torch.float32),
    ],
)
def test_frozen_parameters_are_held_as_in_their_files(files, dtype, precision, held):
    network, _ = load_on_ranks(files(dtype), Ranks(device=torch.device("cpu")), precision)
    kinds = {each.requires_grad: each.dtype for each in network.model.parameters()}
    assert kinds == {False: held, True: torch.float32}


def gradient_of_adapters(settings, held, computed):
    """The gradient of a batch, the base held for one number type and the step taken in another."""
    shaped = make_spec()
    learner = shaped.learner.model_copy(update={"precision": computed})
    spec = shaped.model_copy(update={"model": settings, "learner": learner})
    torch.manual_seed(0)
    network, _ = load_on_ranks(settings, Ranks(device=torch.device("cpu")), held)
    trained = [each for each in network.parameters() if each.requires_grad]
    with torch.no_grad():
        for each in trained:
            each.normal_(0.0, 0.3)
    update = PolicyUpdate(network, spec, PAD)
    update.begin(sampled_groups(seeded_model(llama)), policy_version=9)
    return torch.cat([each.grad.flatten() for each in trained])


def test_a_base_in_bfloat16_has_the_gradient_of_one_in_float32_up_to_rounding(files):
    settings, half, full = files(torch.bfloat16), Precision.BFLOAT16, Precision.FLOAT32
    exact = gradient_of_adapters(settings, full, full)
    errors = [
        float((gradient_of_adapters(settings, held, half) - exact).norm() / exact.norm())
        for held in (half, full)
    ]
    assert errors[0] < 0.1
    assert errors[0] < 2.0 * errors[1]
