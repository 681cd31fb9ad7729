"""The families that are judged, as data: the name of a configuration, and what is special in it."""

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS: Final = 2
WINDOW: Final = 16
"""Tokens of a sliding window, of a chunk, and of what else a configuration names for long texts."""
ORIGINAL_CONTEXT: Final = 24
"""Tokens of the context that a scaled RoPE was trained with; some responses are longer."""

_HEAVY, _SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
_FULL_AND_SLIDING: Final = ["sliding_attention", "full_attention"]
_LINEAR_AND_HYBRID: Final = ["linear_attention", "hybrid"]

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 101,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "d_inner"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "attention_heads": 4,
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "n_group", "sliding_window_pattern"), 2
    ),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    "rotary_dim": 16,
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    # Windows and chunks
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("window_size", "local_attention", "attention_chunk_size"), WINDOW),
    "floor_scale": WINDOW,
    "max_window_layers": 1,
    # Mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "topk_group": 1,
    # Attention of low rank; vLLM's for CPUs is compiled for these two sizes only.
    "kv_lora_rank": 512,
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim"), 64),
    **dict.fromkeys(("q_lora_rank", "qk_nope_head_dim", "v_head_dim"), 32),
    # Attention that chooses its tokens. A score is 0 if no head is positive, and the choice among
    # tokens of score 0 is arbitrary: with many heads there are none.
    "index_topk": 8,
    "index_n_heads": 16,
    # Attention without keys and values
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Sizes by the names of a configuration's fields; each configuration takes those that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model of random parameters: a configuration of transformers, at tiny size."""

    name: str
    """Row of the table: the model type, and what sets the row apart if there are several."""
    model_type: str
    sizes: Mapping[str, Any]
    """What differs from `SIZES`, by field."""
    reference: str
    """Attention of transformers that is right."""

    def config(self) -> PreTrainedConfig:
        """Return the configuration."""
        made = CONFIG_MAPPING[self.model_type]
        common = {name: size for name, size in SIZES.items() if name in made.__annotations__}
        config: PreTrainedConfig = made(**(common | dict(self.sizes)))
        return config


_ROPE: Final = {"rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
_SCALED: Final = {**_ROPE, "factor": 8.0}
_LLAMA3: Final = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONGROPE: Final = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [8.0] * 16}
_EVERY_HEAD: Final = {"num_key_value_heads": 4}
_INDEXED: Final = {**_EVERY_HEAD, "head_dim": 64}
_SLIDING: Final = {"layer_types": _FULL_AND_SLIDING}
_LINEAR: Final = {"layer_types": ["linear_attention", "full_attention"]}
_DBRX_EXPERTS: Final = {"hidden_size": 128, "ffn_hidden_size": 32}
_CONVOLUTION: Final = {"layer_types": ["conv", "full_attention"]}
_SHARED_KEYS: Final = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
_PER_LAYER_INPUT: Final = {"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 16}
_MAMBA: Final = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16}
_NAMES: Final = """
qwen3, qwen3 (YaRN), qwen3_moe, qwen3_next, qwen3_5_text, qwen3_5_moe_text, glm4_moe, glm4_moe_lite,
glm_moe_dsa, deepseek_v3, deepseek_v32, deepseek_v4, gpt_oss, gemma3_text, gemma3n_text,
gemma4_text, gemma4_text (mixture), gemma4_unified_text, minimax_m2, minimax_m3_vl_text,
llama4_text, olmo3, smollm3, phi3, phi3 (LongRoPE), kimi_linear, mimo_v2_flash, ernie4_5,
ernie4_5_moe, seed_oss, dots1, hunyuan_v1_dense, hunyuan_v1_moe, hy_v3, hy_v4, longcat_flash,
ministral3, mistral, mixtral, granite, granitemoehybrid, nemotron_h, lfm2, lfm2_moe, solar_open,
exaone4, exaone_moe, llama, llama (tied), llama (RoPE of Llama 3), qwen2, qwen2 (sliding window),
qwen2_moe, qwen2_moe (sliding window), qwen4_exp_text, deepseek_v2, glm, glm4, gemma, gemma2,
vaultgemma, recurrent_gemma, minimax, ministral, olmo, olmo2, olmoe, olmo_hybrid, flex_olmo, phi,
phimoe, cohere, cohere2, cohere2_moe, granite_swa, granitemoe, granitemoe_swa, granitemoeshared,
afmoe, apertus, arcee, aria_text, axk1, axk2, bamba, biogpt, bitnet, bloom, codegen, ctrl, cwm,
dbrx, diffllama, doge, falcon, falcon (new decoder), falcon (ALiBi), falcon_h1, falcon_mamba, gpt2,
gpt_bigcode, gpt_neo, gpt_neox, gpt_neox_japanese, gptj, helium, hrm_text, hyperclovax,
inkling_text, jais2, jamba, jetmoe, laguna, mamba, mamba2, mellum, minicpm3, modernbert-decoder,
mpt, nanochat, nemotron, openai-gpt, opt, persimmon, rwkv, stablelm, starcoder2, xglm, xlstm, youtu,
zamba, zamba2, zaya
"""
"""Families of 2026, and then the others, in the order of the table."""


def _named(names: str, *more: Mapping[str, Any], **sizes: Any) -> dict[str, Mapping[str, Any]]:
    sizes = dict(ChainMap(sizes, *map(dict, more)))
    return dict.fromkeys(names.split(", "), sizes)


_SIZES: Final[Mapping[str, Any]] = {
    **_named(
        "gpt_oss, gemma3_text, gemma4_unified_text, olmo3, mimo_v2_flash, exaone4, exaone_moe, "
        "gemma2, vaultgemma, ministral, afmoe, laguna, mellum",
        **_SLIDING,
    ),
    **_named("qwen3_next, qwen3_5_text, qwen3_5_moe_text, minimax, olmo_hybrid", **_LINEAR),
    **_named("glm4_moe_lite, deepseek_v3, deepseek_v2, axk1, axk2, minicpm3, youtu", **_EVERY_HEAD),
    **_named("cohere2, cohere2_moe", logit_scale=1.0, **_SLIDING),
    **_named("cwm, modernbert-decoder", bos_token_id=2, **_SLIDING),
    **_named("glm_moe_dsa, deepseek_v32", **_INDEXED),
    **_named(
        "gemma3n_text, gemma4_text",
        {**_SHARED_KEYS, **_PER_LAYER_INPUT, "layer_types": _FULL_AND_SLIDING * 2},
    ),
    **_named("lfm2, lfm2_moe", **_CONVOLUTION),
    **_named("cohere", logit_scale=1.0),
    **_named("qwen3 (YaRN)", rope_parameters=_SCALED | {"rope_type": "yarn"}),
    **_named("glm4_moe", head_dim=32),
    **_named(
        "deepseek_v4",
        {"head_dim": 64, "o_groups": 2, "o_lora_rank": 16, "hc_mult": 2, "num_hidden_layers": 4},
        layer_types=["sliding_attention", _HEAVY, _SPARSE, "sliding_attention"],
        compress_rates={_SPARSE: 4, _HEAVY: 8},
    ),
    **_named(
        "gemma4_text (mixture)", _SLIDING, hidden_size_per_layer_input=0, enable_moe_block=True
    ),
    **_named(
        "phi3 (LongRoPE)",
        original_max_position_embeddings=ORIGINAL_CONTEXT,
        rope_parameters=_ROPE | _LONGROPE,
    ),
    **_named("kimi_linear", _EVERY_HEAD, _LINEAR, linear_num_heads=2, linear_head_dim=32),
    **_named("longcat_flash", _INDEXED, zero_expert_num=4),
    **_named("granitemoehybrid", _MAMBA, layer_types=["mamba", "attention"], mamba_chunk_size=16),
    **_named(
        "nemotron_h",
        {"mamba_num_heads": 8, "mamba_head_dim": 32, "moe_shared_expert_intermediate_size": 32},
        {"n_groups": 1, "ssm_state_size": 16, "chunk_size": 16},
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    ),
    **_named("llama (tied)", tie_word_embeddings=True),
    **_named("llama (RoPE of Llama 3)", rope_parameters=_SCALED | _LLAMA3),
    **_named("qwen2 (sliding window)", use_sliding_window=True),
    **_named("qwen2_moe (sliding window)", use_sliding_window=True, max_window_layers=0),
    **_named(
        "qwen4_exp_text",
        {**_LINEAR, "hc_count": 2, "hc_lowrank": 16, "ple_layer_ids": [1], "ple_embed_dim": 16},
        {"heads_per_ngram": 2, "ngram_vocab_size_base": 100, "split_ngram_parts": 2},
        {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 32},
        {"indexer_budget": 8, "indexer_compress_ratio": 2},
    ),
    **_named("recurrent_gemma", block_types=("recurrent", "attention")),
    **_named("bamba", _MAMBA, mamba_chunk_size=16, attn_layer_indices=[1]),
    **_named(
        "dbrx",
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
        ffn_config={**_DBRX_EXPERTS, "moe_num_experts": 8, "moe_top_k": 2},
    ),
    **_named("falcon (new decoder)", new_decoder_architecture=True),
    **_named("falcon (ALiBi)", alibi=True, multi_query=False, num_kv_heads=4),
    **_named("falcon_h1", _MAMBA, mamba_chunk_size=16, mamba_d_ssm=256),
    **_named("gpt_neo", attention_types=[[["global", "local"], 1]]),
    **_named(
        "inkling_text",
        {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32},
        {"rel_extent": 32, "logits_mup_width_multiplier": 1.0},
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
    ),
    **_named("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16),
    **_named("jetmoe", num_key_value_heads=2, kv_channels=32),
    **_named("mamba2", num_heads=8, state_size=16, n_groups=1, chunk_size=16),
    **_named("zamba", num_hidden_layers=4, layers_block_type=_LINEAR_AND_HYBRID * 2),
    **_named("zamba2", layers_block_type=_LINEAR_AND_HYBRID, chunk_size=16),
    **_named("zaya", num_experts_per_tok=1, router_hidden_size=32),
}
"""What differs from `SIZES`, by name."""
# Transformers 5.19's eager attention adds its biases twice, in the mask and to the scores.
_REFERENCES: Final = {"falcon (ALiBi)": "sdpa"}
FAMILIES: Final = tuple(
    Family(
        name=name,
        model_type=name.partition(" (")[0],
        sizes=_SIZES.get(name, {}),
        reference=_REFERENCES.get(name, "eager"),
    )
    for name in _NAMES.strip().replace("\n", " ").split(", ")
)
