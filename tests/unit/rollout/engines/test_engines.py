"""A payload is loaded completely or not at all."""

import io
from dataclasses import replace

import huggingface_hub.constants
import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
)

from tests.fixtures.rollout.models import build_model, parameters_of, request_for
from tests.fixtures.rollout.tokenizers import PIECES, byte_fallback, byte_level, pieces
from vcpo.api.algorithm import Sampling
from vcpo.api.workloads import EngineName, Lora, Precision, Quantization, RolloutGroup
from vcpo.service.vocabulary import Vocabulary, vocabulary_of
from vcpo.wire.trajectory import FinishReason
from vcpo_rollout.engines.adapters import AdapterUse
from vcpo_rollout.engines.engine import EngineError, PolicyWeights, WeightChanges
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.loading import (
    in_checkpoint_form,
    load_end_token_ids,
    load_model_skeleton,
    load_tokenizer,
    place_model,
)
from vcpo_rollout.engines.loading_weights import (
    changed_positions,
    copy_weights,
    read_weights,
    stage_weights,
    write_tensors,
)
from vcpo_rollout.engines.stop_strings import StopStrings
from vcpo_rollout.engines.weight_plan import Device, WeightPlan, decide

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, head_dim=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_version_gets_the_names_and_shapes_of_the_saved_model(family, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(CONFIGS[family])
    found = in_checkpoint_form(skeleton, state)
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


HOPPER = Device(platform="cuda", capability=90)
ADA = Device(platform="cuda", capability=89)
AMPERE = Device(platform="cuda", capability=80)
UNKNOWN = Device(platform="cuda")
CPU = Device(platform="cpu")
ROCM = Device(platform="rocm", capability=94)


def plan(device, *, rank=None, **group):
    given = {"name": "main", "engine": EngineName.VLLM, "precision": "bfloat16", **group}
    lora = None if rank is None else Lora(rank=rank)
    return decide(lora, RolloutGroup.model_validate(given), device)


@pytest.mark.parametrize("device", [HOPPER, ADA])
def test_vllm_quantizes_where_it_has_fp8_in_hardware(device):
    found = plan(device, quantization="fp8")
    assert found.online_method == "fp8_per_block"
    assert found.rounding is Quantization.NONE


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (CPU, {"quantization": "fp8"}, "fp8 on cpu is slow"),
        (AMPERE, {"quantization": "fp8"}, "compute capability of 8.9, and this one is 80"),
        (UNKNOWN, {"quantization": "fp8"}, "this one is None"),
        (ROCM, {"quantization": "fp8"}, "on rocm is slow, or was not tried"),
        (None, {"quantization": "fp8"}, "engine has no kernels"),
        (HOPPER, {"quantization": "fp8", "precision": "float32"}, "the precision is float32"),
        (HOPPER, {"quantization": "int8"}, "no linear layer to int8"),
    ],
)
def test_elsewhere_rounding_stands_in_and_the_log_says_why(device, given, reason):
    found = plan(device, **given)
    assert (found.online_method, found.rounding) == (None, given["quantization"])
    (said,) = found.reasons
    assert said.startswith(f"quantization: {given['quantization']} by rounding: ")
    assert reason in said


def test_what_nobody_asked_for_nobody_does():
    assert plan(HOPPER) == WeightPlan()


@pytest.mark.parametrize(
    ("device", "given"),
    [
        (HOPPER, {}),
        (HOPPER, {"quantization": "fp8"}),
        (HOPPER, {"rank": 512}),
        (CPU, {}),
        (CPU, {"precision": "float32"}),
    ],
)
def test_vllm_serves_adapters_beside_its_base_model(device, given):
    assert plan(device, **{"rank": 16, **given}).adapters is AdapterUse.SERVED


@pytest.mark.parametrize(
    ("device", "given", "reason"),
    [
        (None, {"engine": EngineName.HF}, "engine 'hf' takes full sets of weights"),
        (CPU, {"quantization": "int8"}, "rounds weights and adapters together to int8"),
        (HOPPER, {"noise": {}}, "noise changes the weights"),
        (HOPPER, {"rank": 513}, "up to 512, and this one is 513"),
        (HOPPER, {"precision": "float32"}, "bfloat16 only, and not in float32"),
    ],
)
def test_what_vllm_cannot_serve_is_merged_and_the_log_says_why(device, given, reason):
    found = plan(device, **{"rank": 16, **given})
    assert found.adapters is AdapterUse.MERGED
    assert found.reasons[-1].startswith("adapters: merged: ")
    assert reason in found.reasons[-1]


TOKENIZERS = {
    "pieces": pieces(),
    "bytes": byte_level(),
    "bytes, cleaned up": byte_level(cleans_up=True),
    "words and bytes": byte_fallback(),
}
BROKEN = "\N{REPLACEMENT CHARACTER}"
PROMPT = (5, 6, 7)
ENDLESS = 1 << 19
"""More tokens than a test lives to see."""


def first_end(tokenizer, token_ids, strings):
    """The number of tokens at which a response ends, by its definition; None if it does not."""
    for size in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:size], skip_special_tokens=False)
        if any(string in text for string in strings):
            return size
    return None


def found_end(stop_strings, token_ids):
    """The same as an engine finds it: asked after each token."""
    return next(
        (
            size
            for size in range(1, len(token_ids) + 1)
            if stop_strings.completed_by_last(token_ids[:size])
        ),
        None,
    )


@st.composite
def responses(draw):
    """A tokenizer, a response, and strings of which most are in its text."""
    tokenizer = TOKENIZERS[draw(st.sampled_from(sorted(TOKENIZERS)))]
    # Some models have rows for tokens that their tokenizer does not know; they write nothing.
    sampled = draw(st.lists(st.integers(0, len(tokenizer) + 3), min_size=1, max_size=60))
    written = tokenizer("Stop. 你好 the </answer>\n", add_special_tokens=False)["input_ids"]
    at = draw(st.integers(0, len(sampled)))
    token_ids = [*sampled[:at], *written, *sampled[at:]]
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    strings = {"</answer>", " "}
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        strings.add(text[start : start + draw(st.integers(1, 12))])
    chosen = draw(st.sets(st.sampled_from(sorted(strings)), min_size=1))
    return tokenizer, token_ids, sorted(each for each in chosen if BROKEN not in each) or ["Stop"]


@settings(max_examples=150, deadline=None)
@given(response=responses())
def test_a_string_is_found_at_the_token_after_which_the_whole_text_has_it(response):
    tokenizer, token_ids, strings = response
    expected = first_end(tokenizer, token_ids, strings)
    assert found_end(StopStrings(tokenizer, strings), token_ids) == expected


def test_a_run_without_stop_strings_looks_for_none():
    assert StopStrings.of(Sampling(), pieces()) is None
    sampling = Sampling.model_validate({"stopStrings": ["an", "b"]})
    of_run = StopStrings.of(sampling, pieces())
    assert of_run.completed_by_last([PIECES.index("b")])
    assert not of_run.completed_by_last([PIECES.index("a")])


def make_batch(*strings):
    model = build_model()
    batch = DecodeBatch(
        model,
        end_token_ids=frozenset(),
        pad_token_id=0,
        seed=0,
        stop_strings=StopStrings(pieces(), strings),
    )
    batch.swap(1, parameters_of(model))
    return batch


def run(batch, *requests):
    """Generations of the requests, in order."""
    sequences = [PartialSequence(request=request) for request in requests]
    batch.admit(sequences)
    ended = {}
    while batch.sequences:
        ended |= batch.step()
    return [ended[sequence] for sequence in sequences]


def test_a_response_ends_at_the_token_that_completes_a_string():
    # Strings of two letters that often end in the middle of a piece, or in the next one.
    strings = ("an", "ns", "er", "e<", ">a", ">s", "sw")
    generations = run(make_batch(*strings), *[request_for(PROMPT, max_new_tokens=20)] * 40)
    ends = [first_end(pieces(), each.token_ids, strings) for each in generations]
    assert [len(each.token_ids) for each in generations] == [end or 20 for end in ends]
    assert [each.finish_reason for each in generations] == [
        FinishReason.STOP if end else FinishReason.LENGTH for end in ends
    ]
    assert {each.finish_reason for each in generations} == set(FinishReason)


@pytest.fixture
def folder(tmp_path):
    """A model folder without weights; token 2 ends a response."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "yes": 1, "<eos>": 2}, unk_token="<unk>"))
    build_model(tied=True).config.save_pretrained(tmp_path)
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    return tmp_path


def test_a_skeleton_has_the_models_parameters_and_needs_no_weights(folder):
    skeleton, model = load_model_skeleton(str(folder)), build_model(tied=True)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name: value.shape for name, value in skeleton.named_parameters()} == shapes
    frequencies = skeleton.model.rotary_emb.inv_freq
    assert torch.equal(frequencies, model.model.rotary_emb.inv_freq)
    assert skeleton.lm_head.weight is skeleton.model.embed_tokens.weight


def test_a_soft_cap_of_attention_scores_is_not_left_out(tmp_path):
    # Transformers' sdpa leaves it out, and tokens would be sampled from another distribution.
    Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    ).save_pretrained(tmp_path)
    assert load_model_skeleton(str(tmp_path)).config._attn_implementation == "eager"


def test_a_skeleton_has_the_precision_asked_for(folder):
    skeleton = load_model_skeleton(str(folder), precision=Precision.BFLOAT16)
    assert skeleton.lm_head.weight.dtype is torch.bfloat16
    assert skeleton.model.rotary_emb.inv_freq.dtype is torch.float32


def test_a_skeleton_carries_the_tokens_of_its_folder_and_without_a_tokenizer_none(
    folder, tmp_path_factory
):
    assert vocabulary_of(load_model_skeleton(str(folder))) == Vocabulary(num_tokens=3)
    bare = tmp_path_factory.mktemp("bare")
    build_model().config.save_pretrained(bare)
    assert vocabulary_of(load_model_skeleton(str(bare))) is None


def test_end_tokens_are_the_tokenizers_the_configured_ones_and_the_templates(folder):
    tokenizer = load_tokenizer(str(folder))
    assert load_end_token_ids(str(folder), tokenizer) == {2}
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(folder)
    assert load_end_token_ids(str(folder), tokenizer, frozenset({3})) == {1, 2, 3}


def test_a_model_without_end_token_is_refused(folder):
    tokenizer = load_tokenizer(str(folder))
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"spec\.model\.name.*names no end token"):
        load_end_token_ids(str(folder), tokenizer)


@pytest.mark.parametrize("load", [load_model_skeleton, load_tokenizer])
def test_a_path_without_a_model_is_refused(load, tmp_path):
    with pytest.raises(ValueError, match=rf"spec\.model\.name: '{tmp_path}' is a directory with"):
        load(str(tmp_path))
    for name in ("/no/such/model", "./model"):
        with pytest.raises(ValueError, match=f"'{name}' is not a directory"):
            load(name)


@pytest.mark.parametrize("load", [load_model_skeleton, load_tokenizer])
def test_a_hub_that_is_out_of_reach_is_said_with_the_cure(load, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"use a local directory.*HF_HUB_OFFLINE.*HF_HOME"):
        load("nobody/no-such-model")


def test_a_gpu_without_room_for_the_parameters_is_named_with_the_cure(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And more.")

    model = build_model()
    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(ValueError, match=r"spec\.model\.name: .*allocate 2\.00 GiB.*maxReplicas"):
        place_model(model, torch.device("cpu"), torch.bfloat16)


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def version_of(payload):
    return PolicyWeights(0, payload)


def payload_with(tensors, **changes):
    """The tensors as a payload, some replaced; None leaves one out."""
    merged = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
    return safetensors.torch.save({k: v for k, v in merged.items() if v is not None})


@pytest.mark.parametrize("given", [[HEAD], [EMBEDDING], [HEAD, EMBEDDING]], ids=str)
def test_tied_parameters_may_stand_under_any_of_their_names(given):
    tensors = parameters_of(build_model(seed=1, tied=True))
    shared = tensors.pop(EMBEDDING)
    payload = safetensors.torch.save({**tensors, **{name: shared.clone() for name in given}})
    model = build_model(seed=2, tied=True)
    copy_weights(model, read_weights(model, version_of(payload)))
    assert torch.equal(model.lm_head.weight, shared)
    assert torch.equal(model.model.embed_tokens.weight, shared)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model__norm__weight": None}, f"{NORM} is missing"),
        ({"model__norm__weight": torch.zeros(33)}, rf"{NORM} has shape \[33\], not \[32\]"),
        ({"model__norm__weight": torch.zeros(32, dtype=torch.int32)}, f"{NORM} is torch.int32"),
        ({"extra": torch.zeros(1)}, "extra is unknown"),
        ({"lm_head__weight": torch.zeros(40, 32)}, f"{HEAD} differs from {EMBEDDING}"),
    ],
    ids=["missing", "shape", "integer", "unknown", "tied apart"],
)
def test_tensors_that_do_not_fit_are_named(changes, problem):
    model = build_model(tied=True)
    with pytest.raises(EngineError, match=problem):
        read_weights(model, version_of(payload_with(parameters_of(model), **changes)))


def test_all_problems_are_reported_at_once_up_to_a_number():
    model = build_model()  # 2 layers of 9 parameters, embedding, norm and head: 21 missing
    with pytest.raises(EngineError, match=r"embed_tokens\.weight is missing.*; 16 more$"):
        read_weights(model, version_of(safetensors.torch.save({})))


def test_published_bfloat16_is_held_exactly_in_float32():
    model = build_model()
    rounded = {name: value.bfloat16() for name, value in parameters_of(model).items()}
    copy_weights(model, read_weights(model, version_of(safetensors.torch.save(rounded))))
    assert model.lm_head.weight.dtype is torch.float32
    assert torch.equal(model.lm_head.weight, rounded[HEAD].float())


class TestChanges:
    """Of version 2 the second and fifth element of the embedding differ from version 1."""

    @pytest.fixture
    def weights(self):
        tensors = parameters_of(build_model(tied=True))
        tensors[EMBEDDING].view(-1)[[1, 4]] += 1.0
        changes = WeightChanges(base_policy_version=1, positions={EMBEDDING: np.array([1, 4])})
        payload = safetensors.torch.save(tensors)
        return PolicyWeights(2, payload, changes=changes)

    def test_only_they_are_written_over_the_version_they_change(self, weights):
        model = build_model(tied=True)
        model.model.norm.weight.data.fill_(7.0)
        copy_weights(model, stage_weights(model, weights, in_use=1))
        assert torch.equal(model.lm_head.weight, safetensors.torch.load(weights.payload)[EMBEDDING])
        assert bool((model.model.norm.weight == 7.0).all())

    @pytest.mark.parametrize("in_use", [None, 0, 2])
    def test_over_any_other_version_everything_is_written(self, weights, in_use):
        model = build_model(seed=5, tied=True)
        copy_weights(model, stage_weights(model, weights, in_use=in_use))
        expected = safetensors.torch.load(weights.payload)
        assert all(
            torch.equal(value, expected[name]) for name, value in parameters_of(model).items()
        )

    @pytest.mark.parametrize(("in_use", "known"), [(1, {EMBEDDING: [1, 4]}), (0, None)])
    def test_they_are_known_over_the_version_they_change(self, weights, in_use, known):
        found = changed_positions(build_model(tied=True), weights, in_use=in_use)
        assert known == (found and {name: list(each) for name, each in found.items()})

    def test_their_parameters_have_the_models_first_names(self, weights):
        changes = WeightChanges(base_policy_version=1, positions={HEAD: np.array([0])})
        weights = replace(weights, changes=changes)
        assert [*changed_positions(build_model(tied=True), weights, in_use=1)] == [EMBEDDING]

    def test_a_parameter_that_is_not_flat_in_memory_is_written_whole(self, weights):
        model = build_model(tied=True)
        embedding = model.get_parameter(EMBEDDING)
        embedding.data = torch.zeros_like(embedding).t().contiguous().t()
        copy_weights(model, stage_weights(model, weights, in_use=1))
        assert torch.equal(model.lm_head.weight, safetensors.torch.load(weights.payload)[EMBEDDING])


def test_one_file_is_written_of_tensors():
    published = parameters_of(build_model(seed=1))
    published["scale"], published["empty"] = torch.tensor([0.5]), torch.zeros(1, 0)
    file = io.BytesIO()
    write_tensors(published, file)
    found = safetensors.torch.load(file.getvalue())
    assert found.keys() == published.keys()
    assert all(torch.equal(each, published[name]) for name, each in found.items())
