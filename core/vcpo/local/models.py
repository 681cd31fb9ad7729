"""Location of a run's model on this machine, and checks against its files."""

import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vcpo.api import FieldProblem, VCPORun, VCPORunSpec
from vcpo.api.run import RUN_FOLDER_ANNOTATION
from vcpo.api.workloads import (
    EngineName,
    Environment,
    Model,
    Precision,
    RolloutGroup,
    template_complaints,
)
from vcpo.service.model_config import config_problem, is_known_family
from vcpo.service.model_files import is_url, url_problem
from vcpo.service.rotary_table import table_problems

_NAME = "spec.model.name"
_HUB_TIMEOUT_S = 10.0
_VLLM_BYTES = 3 << 30
"""That vLLM takes of a GPU for its context, activations and graphs, about."""


def model_folder(model: Model) -> Path | None:
    """Return the model's folder, given or in the Hugging Face cache; None if it is not here."""
    if (given := Path(model.name.removeprefix("file://"))).is_dir():
        return given
    cached = _hub_cache() / f"models--{model.name.replace('/', '--')}"
    revision = model.revision or "main"
    reference = cached / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = cached / "snapshots" / commit
    return snapshot if (snapshot / "config.json").is_file() else None


def model_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield the problems of a run's model that this machine can detect.

    A model that must be downloaded is a problem only if downloads are switched off.
    run: a run with local paths (`with_local_paths`).
    """
    name = run.spec.model.name
    if is_url(name) and (message := url_problem(name)) is not None:
        yield FieldProblem(path=_NAME, value=repr(name), message=message)
        return
    folder = model_folder(run.spec.model)
    if folder is None:
        here = Path(run.metadata.annotations.get(RUN_FOLDER_ANNOTATION, "."))
        if (message := _absence(name, here)) is not None:
            yield FieldProblem(path=_NAME, value=repr(name), message=message)
        return
    try:
        config = _read_config(folder)
    except (OSError, ValueError) as error:
        message = f"has no readable config.json ({error}); give a model's directory"
        yield FieldProblem(path=_NAME, value=repr(name), message=message)
        return
    trusts, is_known = run.spec.model.trust_remote_code, is_known_family(config)
    problem = config_problem(config, name, is_known=is_known, trust_remote_code=trusts)
    if problem is not None:
        yield problem
    if (message := run.spec.sampling.room_problem(context_tokens(config))) is not None:
        value = str(run.spec.sampling.max_new_tokens)
        yield FieldProblem(path="spec.sampling.maxNewTokens", value=value, message=message)
    yield from table_problems(run.spec, config)
    yield from _template_problems(run.spec.environment, folder)


def _template_problems(environment: Environment, folder: Path) -> Iterator[FieldProblem]:
    settings = folder / "tokenizer_config.json"
    has_own = settings.is_file() and "chat_template" in settings.read_text(encoding="utf-8")
    if not has_own and not any(folder.glob("*chat_template*")):
        given = environment.system_prompt, environment.template_arguments
        for field, message in template_complaints(environment.prompt_format, *given):
            yield FieldProblem(path=f"spec.environment.{field}", value="", message=message)


def hub_problems(run: VCPORun) -> Iterator[FieldProblem]:
    """Yield a problem if the model must come from the hub, and the hub does not answer.

    The libraries that download it try for minutes, once in each process.
    """
    model = run.spec.model
    if is_url(model.name) or _is_offline() or model_folder(model) is not None:
        return
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - the user's own address
    try:
        urllib.request.urlopen(request, timeout=_HUB_TIMEOUT_S).close()  # noqa: S310
    except urllib.error.HTTPError:  # it answers
        return
    except OSError as error:
        fix = "make it reachable (or set HF_ENDPOINT), or give a model directory"
        message = f"is not in the Hugging Face cache, and the hub does not answer ({error}); {fix}"
        yield FieldProblem(path=_NAME, value=repr(model.name), message=message)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in {"1", "true", "on", "yes"}


def _read_config(folder: Path) -> Mapping[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"it is a {type(config).__name__}, not a mapping")  # noqa: TRY004
    return config


def context_tokens(config: Mapping[str, Any]) -> int | None:
    """Return a model's context length in tokens, with RoPE scaling; None if the config has none.

    config: content of the model's `config.json`.
    """
    text = config.get("text_config") or config
    lengths = (text.get(key) for key in ("max_position_embeddings", "n_positions", "n_ctx"))
    length = next((each for each in lengths if isinstance(each, int)), None)
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if length is None or not original or not factor:
        return length
    return max(length, int(original * factor))


def num_parameters(folder: Path) -> int:
    """Return the parameters of a model by its files, which were opened before."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        tensors = (each for name, each in header.items() if name != "__metadata__")
        count += sum(math.prod(each["shape"]) for each in tensors)
    return count


def worker_bytes(spec: VCPORunSpec, parameters: int | None = None) -> int | None:
    """Return what the largest worker needs of a GPU, if all have vLLM; None if it is not known.

    Weights, `kv_cache_bytes` and `_VLLM_BYTES`.
    parameters: of the model; None counts those of its files.
    """
    folder, most = model_folder(spec.model), 0
    for group in spec.rollouts:
        if folder is None or (kept := kv_cache_bytes(spec, group)) is None:
            return None
        weights = _number_bytes(group) * (parameters or num_parameters(folder))
        most = max(most, weights + kept + _VLLM_BYTES)
    return most


def kv_cache_bytes(spec: VCPORunSpec, group: RolloutGroup) -> int | None:
    """Return keys and values of as many of the longest sequences as a worker of vLLM runs.

    As the group says, if it does; None if it is not known.
    """
    if group.kv_cache_gibibytes is not None:
        return int(group.kv_cache_gibibytes * (1 << 30))
    folder = model_folder(spec.model)
    if folder is None or group.engine_name != EngineName.VLLM or group.max_model_len is None:
        return None
    config = _read_config(folder)
    text = config.get("text_config") or config
    try:
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        numbers = int(2 * text["num_hidden_layers"] * heads * head)
    except KeyError:
        return None
    tokens = group.max_model_len * group.max_concurrent_sequences
    return _number_bytes(group) * numbers * tokens


def _number_bytes(group: RolloutGroup) -> int:
    return 2 if group.number_format is Precision.BFLOAT16 else 4


def _absence(name: str, run_folder: Path) -> str | None:
    """Return why a model that is not here cannot be fetched; None if hub or storage may have it."""
    if is_url(name) and not name.startswith("file://"):
        return None
    name = name.removeprefix("file://")
    path = (run_folder / Path(name).expanduser()).resolve()
    first, _, rest = name.partition("/")
    is_below_a_folder = bool(rest) and (run_folder / first).is_dir()
    if name.startswith((".", "/", "~")) or "/" in rest or is_below_a_folder:
        return f"is not a directory (checked {path})"
    if _is_offline():
        why = "nor in the Hugging Face cache, and HF_HUB_OFFLINE forbids the download"
        return f"is neither a directory ({path}) {why}"
    return None


def _hub_cache() -> Path:
    given = os.environ.get("HF_HUB_CACHE")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(home).expanduser() / "hub"
