"""The families that are judged, as data: the name of a configuration, and what is special in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LAYERS: Final = 2
WINDOW: Final = 16
"""Tokens of a sliding window, of a chunk, and of what else a configuration names for long texts."""
ORIGINAL_CONTEXT: Final = 24
"""Tokens of the context that a scaled RoPE was trained with; some responses are longer."""

_FULL_AND_SLIDING: Final = ["sliding_attention", "full_attention"]
_LINEAR_AND_HYBRID: Final = ["linear_attention", "hybrid"]
_FULL_AND_LINEAR: Final = ["linear_attention", "full_attention"]

SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": 101,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "d_inner"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4
    ),
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 32,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    "rotary_dim": 16,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    # Windows and chunks
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "attention_window_size",
            "window_size",
            "local_attention",
            "attention_chunk_size",
            "floor_scale",
        ),
        WINDOW,
    ),
    "sliding_window_pattern": 2,
    "max_window_layers": 1,
    # Mixtures of experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "expert_ffn_hidden_size",
        ),
        32,
    ),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "n_group": 2,
    "topk_group": 1,
    # Attention of low rank; vLLM's for CPUs is compiled for these two sizes only.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # Attention that chooses its tokens. A score is 0 if no head is positive, and the choice among
    # tokens of score 0 is arbitrary: with many heads there are none.
    "index_topk": 8,
    "index_head_dim": 64,
    "index_n_heads": 16,
    # Attention without keys and values
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
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
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """What differs from `SIZES`, by field."""
    reference: str = "eager"
    """Attention of transformers that is right."""

    def config(self) -> PreTrainedConfig:
        """Return the configuration."""
        made = CONFIG_MAPPING[self.model_type]
        common = {name: size for name, size in SIZES.items() if name in made.__annotations__}
        config: PreTrainedConfig = made(**(common | dict(self.sizes)))
        return config


def _family(
    model_type: str, variant: str = "", /, *, reference: str = "eager", **sizes: Any
) -> Family:
    name = f"{model_type} ({variant})" if variant else model_type
    return Family(name=name, model_type=model_type, sizes=sizes, reference=reference)


_ROPE: Final = {"rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}
_YARN: Final = {**_ROPE, "rope_type": "yarn", "factor": 8.0}
_LLAMA3: Final = {
    **_ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LONGROPE: Final = {
    **_ROPE,
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [8.0] * 16,
}
_EVERY_HEAD: Final = {"num_key_value_heads": 4}
_FOUR_LAYERS: Final = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _FULL_AND_SLIDING * 2,
}
_PER_LAYER_INPUT: Final = {"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 16}
_COMPRESSED: Final = {
    "num_hidden_layers": 4,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
}
_DBRX_ATTENTION: Final = {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}
_DBRX_EXPERTS: Final = {
    "hidden_size": 128,
    "ffn_hidden_size": 32,
    "moe_num_experts": 8,
    "moe_top_k": 2,
}
_MAMBA: Final = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}

FAMILIES: Final = (
    # Those of 2026
    _family("qwen3"),
    _family("qwen3", "YaRN", rope_parameters=_YARN),
    _family("qwen3_moe"),
    _family("qwen3_next", layer_types=_FULL_AND_LINEAR),
    _family("qwen3_5_text", layer_types=_FULL_AND_LINEAR),
    _family("qwen3_5_moe_text", layer_types=_FULL_AND_LINEAR),
    _family("glm4_moe", head_dim=32),
    _family("glm4_moe_lite", **_EVERY_HEAD),
    _family("glm_moe_dsa", **_EVERY_HEAD, head_dim=64),
    _family("deepseek_v3", **_EVERY_HEAD),
    _family("deepseek_v32", **_EVERY_HEAD, head_dim=64),
    _family("deepseek_v4", head_dim=64, o_groups=2, o_lora_rank=16, hc_mult=2, **_COMPRESSED),
    _family("gpt_oss", layer_types=_FULL_AND_SLIDING),
    _family("gemma3_text", layer_types=_FULL_AND_SLIDING),
    _family("gemma3n_text", **_FOUR_LAYERS, **_PER_LAYER_INPUT),
    _family("gemma4_text", **_FOUR_LAYERS, **_PER_LAYER_INPUT),
    _family(
        "gemma4_text",
        "mixture",
        layer_types=_FULL_AND_SLIDING,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
    ),
    _family("gemma4_unified_text", layer_types=_FULL_AND_SLIDING),
    _family("minimax_m2"),
    _family("minimax_m3_vl_text"),
    _family("llama4_text"),
    _family("olmo3", layer_types=_FULL_AND_SLIDING),
    _family("smollm3"),
    _family("phi3"),
    _family(
        "phi3",
        "LongRoPE",
        original_max_position_embeddings=ORIGINAL_CONTEXT,
        rope_parameters=_LONGROPE,
    ),
    _family(
        "kimi_linear",
        **_EVERY_HEAD,
        layer_types=_FULL_AND_LINEAR,
        linear_num_heads=2,
        linear_head_dim=32,
    ),
    _family("mimo_v2_flash", layer_types=_FULL_AND_SLIDING),
    _family("ernie4_5"),
    _family("ernie4_5_moe"),
    _family("seed_oss"),
    _family("dots1"),
    _family("hunyuan_v1_dense"),
    _family("hunyuan_v1_moe"),
    _family("hy_v3"),
    _family("hy_v4"),
    _family("longcat_flash", **_EVERY_HEAD, head_dim=64, zero_expert_num=4),
    _family("ministral3"),
    _family("mistral"),
    _family("mixtral"),
    _family("granite"),
    _family("granitemoehybrid", **_MAMBA, layer_types=["mamba", "attention"]),
    _family(
        "nemotron_h",
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=16,
        moe_shared_expert_intermediate_size=32,
    ),
    _family("lfm2", layer_types=["conv", "full_attention"]),
    _family("lfm2_moe", layer_types=["conv", "full_attention"]),
    _family("solar_open"),
    _family("exaone4", layer_types=_FULL_AND_SLIDING),
    _family("exaone_moe", layer_types=_FULL_AND_SLIDING),
    # The others
    _family("llama"),
    _family("llama", "tied", tie_word_embeddings=True),
    _family("llama", "RoPE of Llama 3", rope_parameters=_LLAMA3),
    _family("qwen2"),
    _family("qwen2", "sliding window", use_sliding_window=True),
    _family("qwen2_moe"),
    _family("qwen2_moe", "sliding window", use_sliding_window=True, max_window_layers=0),
    _family(
        "qwen4_exp_text",
        layer_types=_FULL_AND_LINEAR,
        hc_count=2,
        hc_lowrank=16,
        ple_layer_ids=[1],
        ple_embed_dim=16,
        heads_per_ngram=2,
        ngram_vocab_size_base=100,
        split_ngram_parts=2,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=32,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    _family("deepseek_v2", **_EVERY_HEAD),
    _family("glm"),
    _family("glm4"),
    _family("gemma"),
    _family("gemma2", layer_types=_FULL_AND_SLIDING),
    _family("vaultgemma", layer_types=_FULL_AND_SLIDING),
    _family("recurrent_gemma", block_types=("recurrent", "attention")),
    _family("minimax", layer_types=_FULL_AND_LINEAR),
    _family("ministral", layer_types=_FULL_AND_SLIDING),
    _family("olmo"),
    _family("olmo2"),
    _family("olmoe"),
    _family("olmo_hybrid", layer_types=_FULL_AND_LINEAR),
    _family("flex_olmo"),
    _family("phi"),
    _family("phimoe"),
    _family("cohere", logit_scale=1.0),
    _family("cohere2", logit_scale=1.0, layer_types=_FULL_AND_SLIDING),
    _family("cohere2_moe", logit_scale=1.0, layer_types=_FULL_AND_SLIDING),
    _family("granite_swa"),
    _family("granitemoe"),
    _family("granitemoe_swa"),
    _family("granitemoeshared"),
    _family("afmoe", layer_types=_FULL_AND_SLIDING),
    _family("apertus"),
    _family("arcee"),
    _family("aria_text"),
    _family("axk1", **_EVERY_HEAD),
    _family("axk2", **_EVERY_HEAD),
    _family("bamba", **_MAMBA, attn_layer_indices=[1]),
    _family("biogpt"),
    _family("bitnet"),
    _family("bloom"),
    _family("codegen"),
    _family("ctrl"),
    _family("cwm", bos_token_id=2, layer_types=_FULL_AND_SLIDING),
    _family("dbrx", attn_config=_DBRX_ATTENTION, ffn_config=_DBRX_EXPERTS),
    _family("diffllama"),
    _family("doge"),
    _family("falcon"),
    _family("falcon", "new decoder", new_decoder_architecture=True),
    # Transformers 5.19's eager attention adds its biases twice, in the mask and to the scores.
    _family("falcon", "ALiBi", reference="sdpa", alibi=True, multi_query=False, num_kv_heads=4),
    _family("falcon_h1", **_MAMBA, mamba_d_ssm=256),
    _family("falcon_mamba"),
    _family("gpt2"),
    _family("gpt_bigcode"),
    _family("gpt_neo", attention_types=[[["global", "local"], 1]]),
    _family("gpt_neox"),
    _family("gpt_neox_japanese"),
    _family("gptj"),
    _family("helium"),
    _family("hrm_text"),
    _family("hyperclovax"),
    _family(
        "inkling_text",
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        rel_extent=32,
        logits_mup_width_multiplier=1.0,
    ),
    _family("jais2"),
    _family("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16),
    _family("jetmoe", num_key_value_heads=2, kv_channels=32),
    _family("laguna", layer_types=_FULL_AND_SLIDING),
    _family("mamba"),
    _family("mamba2", num_heads=8, state_size=16, n_groups=1, chunk_size=16),
    _family("mellum", layer_types=_FULL_AND_SLIDING),
    _family("minicpm3", **_EVERY_HEAD),
    _family("modernbert-decoder", bos_token_id=2, layer_types=_FULL_AND_SLIDING),
    _family("mpt"),
    _family("nanochat"),
    _family("nemotron"),
    _family("openai-gpt"),
    _family("opt"),
    _family("persimmon"),
    _family("rwkv"),
    _family("stablelm"),
    _family("starcoder2"),
    _family("xglm"),
    _family("xlstm"),
    _family("youtu", **_EVERY_HEAD),
    _family("zamba", num_hidden_layers=4, layers_block_type=_LINEAR_AND_HYBRID * 2),
    _family("zamba2", layers_block_type=_LINEAR_AND_HYBRID, chunk_size=16),
    _family("zaya", num_experts_per_tok=1, router_hidden_size=32),
)
"""In the order of the table."""
