"""Whether a model's configuration is that of a policy that can be trained; no code of it runs.

`vcpo validate`, the learner and the workers ask the same function before they load a model, so a
checkpoint that one of them cannot use is refused by all of them, with the same words.
"""

import importlib.util
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from vcpo.api import FieldProblem

_NAME: Final = "spec.model.name"
_TRUST: Final = "spec.model.trustRemoteCode"
_CAUSAL: Final = re.compile(r"(For\w*CausalLM|(LMHead|WithLMHead)\w*|GenerationDecoder)$")
_OTHER_INPUTS: Final = ("vision_config", "audio_config", "vq_config", "thinker_config")
WITH_LANGUAGE_MODEL: Final = frozenset(
    {
        "emu3",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "got_ocr2",
        "llama4",
        "mllama",
        "phi4_multimodal",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen4_exp",
    }
)
"""Families with other inputs that transformers' `AutoModelForCausalLM` loads all the same: the
whole model (Gemma 3 and 4), or its language model alone (Qwen3.5, Llama 4)."""
_DEQUANTIZING: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compressed-tensors": "CompressedTensorsConfig",
        "fp8": "FineGrainedFP8Config",
        "mxfp4": "Mxfp4Config",
    }
)
"""Classes of transformers that undo a quantization when a model is loaded, by method."""


def config_problem(
    config: Mapping[str, Any], name: str, *, is_known: bool, trust_remote_code: bool
) -> FieldProblem | None:
    """Return why a model cannot be the policy of a run, and the fix; None if it may be.

    config: content of the model's `config.json`.
    name: of the model, as in the run file.
    is_known: whether the installed transformers has code for the model's family.
    """
    own_code = config.get("auto_map") or {}
    if own_code and not is_known and not trust_remote_code:
        return untrusted_code(name)
    message = _unknown(config, is_known=is_known or bool(own_code)) or _quantization_problem(config)
    if message is None and "AutoModelForCausalLM" not in own_code:
        message = _not_causal(config)
    return None if message is None else FieldProblem(path=_NAME, value=repr(name), message=message)


def load_problem(name: str, error: Exception) -> str:
    """Return why a library cannot load a model or its tokenizer, with the fix."""
    if "trust_remote_code" in str(error):  # transformers' advice
        return str(untrusted_code(name))
    if Path(name).is_dir():
        problem = (
            "is a directory without a usable model; it needs config.json, model.safetensors and"
            " tokenizer.json as `save_pretrained` writes them"
        )
    elif Path(name).is_absolute() or name.startswith((".", "~")):
        problem = "is not a directory; relative paths start at the run file"
    else:
        problem = (
            "is neither a directory nor a model that the Hugging Face hub serves; use a local"
            " directory, or let this machine reach the hub (unset HF_HUB_OFFLINE), set HF_HOME to a"
            " cache that holds the model, or set HF_TOKEN if it is gated"
        )
    reason = " ".join(str(error).split())[:300]
    return f"{_NAME}: {name!r} {problem} ({type(error).__name__}: {reason})"


def shape_problem(
    name: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> str | None:
    """Return the first tensor that transformers found in another shape than config.json's."""
    for tensor, there, wanted in sorted(mismatched):
        shapes = f"as {list(there)}, and its config.json makes it {list(wanted)}"
        return f"{_NAME}: {name!r}: its files hold {tensor} {shapes}; fetch both again"
    return None


def untrusted_code(name: str) -> FieldProblem:
    """Return the problem of a model, or tokenizer, that needs code of its own and may not run it.

    name: of the model, as in the run file.
    """
    message = (
        f"{name!r} needs the Python code of its own repository, which would run with the rights of"
        " learner and workers; read that code, pin it with `model.revision` and set true, or give"
        " a model of a family that the installed transformers has"
    )
    return FieldProblem(path=_TRUST, value="false", message=message)


def is_known_family(config: Mapping[str, Any]) -> bool:
    """Return whether the installed transformers has code for a model's family.

    Without transformers every family counts as known: the services, which have it, decide.
    """
    library = importlib.util.find_spec("transformers")  # finds it without running it
    if library is None or library.origin is None:
        return True
    families = Path(library.origin).parent / "models"
    names = str(config.get("model_type")).replace("-", "_")
    # A family's folder also holds its parts: `gemma3` has `gemma3_text`.
    return any((families / names[: match.start()]).is_dir() for match in re.finditer(r"_|$", names))


def _unknown(config: Mapping[str, Any], *, is_known: bool) -> str | None:
    family = config.get("model_type")
    if is_known or family is None:
        return None
    return f"is of a family ({family}) that the installed transformers lacks; install a newer one"


def _quantization_problem(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a checkpoint whose weights are quantized."""
    sections = (config, config.get("text_config") or {})
    found = next(
        (
            section[key]
            for section in sections
            for key in ("quantization_config", "compression_config")
            if section.get(key)
        ),
        None,
    )
    if found is None:
        return None
    by_bits = "bitsandbytes" if {"load_in_4bit", "load_in_8bit"} & set(found) else "unknown method"
    method = str(found.get("quant_method") or found.get("quant_algo") or by_bits)
    fix = "give the checkpoint that it was made from"
    if (undoing := _DEQUANTIZING.get(method)) is not None:
        fix += (
            ", or write one in bfloat16 with transformers: from_pretrained(name,"
            f" quantization_config={undoing}(dequantize=True), dtype='bfloat16'), then"
            " save_pretrained"
        )
    elif method == "bitsandbytes":
        fix += ", or write one with transformers: from_pretrained(name).dequantize()"
    return (
        f"is a quantized checkpoint ({method}), whose weights no optimizer can change; {fix};"
        " `rollouts[].quantization` quantizes for generation"
    )


def _not_causal(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a model that does not predict a text's next token."""
    family = str(config.get("model_type"))
    if family in WITH_LANGUAGE_MODEL:
        return None
    if config.get("is_encoder_decoder"):
        return f"is an encoder-decoder model ({family}); give one with a decoder alone"
    if any(config.get(key) is not None for key in _OTHER_INPUTS):
        return (
            f"is a model of images, video or sound ({family}) whose language model transformers"
            " does not load by itself; give a text-only checkpoint, or one of a family that it"
            " does, such as gemma3 or qwen3_5"
        )
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any(_CAUSAL.search(name) for name in names):
        return (
            f"is a {names[0]}, which does not predict the next token; give a causal language"
            " model (its config.json names a ...ForCausalLM)"
        )
    return None
