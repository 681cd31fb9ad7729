"""Sections of a run that set what runs where: model, environment, learner, workers, limits."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from vcpo.algo.health.early_warning import WarningLevel
from vcpo.algo.health.guards import GuardPolicy
from vcpo.api.cluster import DrainSeconds, Image, ObjectName, PodTemplate
from vcpo.api.environments import environment_complaints, reward_complaints
from vcpo.api.fields import (
    FINITE,
    DnsLabel,
    Ratio,
    Seconds,
    Section,
    Steps,
    Text,
    conflict,
    is_import_path,
    refuse,
)

Threads = Annotated[int, Field(ge=1, le=256)]
TargetModule = Annotated[str, Field(min_length=1, max_length=128)]


class Precision(StrEnum):
    """Number format of a forward pass; parameters and optimizer state are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Quantization(StrEnum):
    """Number format of a rollout worker's weight matrices."""

    NONE = "none"
    FP8 = "fp8"
    """E4M3, one scale per block of 128 x 128."""
    INT8 = "int8"
    """One scale per row."""


class PromptFormat(StrEnum):
    """How a prompt's text becomes tokens."""

    AUTO = "auto"
    """The tokenizer's chat template when it has one, else plain."""
    PLAIN = "plain"
    CHAT = "chat"


class OverlongPrompts(StrEnum):
    """What becomes of a prompt that does not fit into the model's context."""

    SKIP = "skip"
    """It is given up and counted."""
    TRUNCATE = "truncate"
    """Its longest text loses its beginning."""
    FAIL = "fail"
    """The run ends."""


class EngineName(StrEnum):
    """An engine that is shipped."""

    HF = "hf"
    """`transformers`, in the worker's process, on any machine."""
    VLLM = "vllm"
    """vLLM, in processes of its own."""


class KvCache(StrEnum):
    """What becomes of the keys and values of running sequences when a version comes."""

    RECOMPUTE = "recompute"
    """The new weights compute them again."""
    KEEP = "keep"
    """They stay, and the new weights read them."""


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685), trained and published instead of all parameters."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of each adapter. Raise it if the run learns less than with all parameters."""
    alpha: Annotated[int, Field(ge=1, le=10_000)] = 32
    """Numerator of the adapters' scale, alpha / rank."""
    target_modules: Annotated[list[TargetModule], Field(max_length=32)] = Field(default=[])
    """Last parts of the names of the layers that get an adapter, such as `q_proj`. If empty, every
    linear layer but the output head and, in a mixture of experts, the layers of its MLPs."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelCache(Section):
    """A volume for the files of models, in a cluster; all pods of the run share it."""

    claim_name: ObjectName
    """Claim of the volume, which several runs may share. Its access mode is `ReadWriteMany`."""


class Model(Section):
    """The policy to train."""

    name: Annotated[Text, Field(min_length=1, max_length=512)]
    """Model to train: a directory (relative to the run file), a name on the Hugging Face hub, or a
    URL that fsspec knows, such as `s3://bucket/folder`. In a cluster a directory must be an
    absolute path of a mounted volume."""
    revision: (
        Annotated[Text, Field(min_length=1, max_length=128, pattern=r"^[^/.][^/.]*([./][^/.]+)*$")]
        | None
    ) = None
    """Branch, tag or commit on the Hugging Face hub. If unset, the default branch."""
    trust_remote_code: bool = False
    """If true, Python code in the model's repository may run, with the rights of learner and
    workers; some models cannot be loaded without it. Pin the code that you read with `revision`."""
    lora: Lora | None = None
    """LoRA adapters to train beside frozen parameters. If unset, all parameters are trained."""
    size_billions: Annotated[float, Field(gt=0.0, le=10_000.0)] | None = None
    """Number of parameters, in billions. The size of the volume for checkpoints follows from it,
    because the operator does not read the model. If unset, the operator does not know it."""
    cache: ModelCache | None = None
    """Volume where the pods of a cluster keep what they download of the hub (`HF_HOME`): the first
    one downloads the model, and the others read it. If unset, each pod downloads it to its own
    disk."""

    @model_validator(mode="after")
    def _cache_has_something_to_hold(self) -> Self:
        if self.cache is not None and self.name.startswith("/"):
            message = f"may not be given for the mounted volume '{self.name}'; remove it"
            refuse([conflict("cache", value="given", message=message)])
        return self


class Reward(Section):
    """One function that scores responses."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """Function that scores: `package.module:function` of your own, called with `prompt` and
    `response`, or `environment`, the reward that the environment itself gives."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor on what the function returns. The products of all rewards are added up; change it so
    that none drowns the others."""
    parameters: Annotated[dict[str, Any], Field(max_length=64), FINITE] = Field(default={})
    """More arguments of the function, by name."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        refuse(
            conflict(*place, value=value, message=message)
            for place, value, message in reward_complaints(self.name, self.parameters)
        )
        return self


_TEMPLATE_ARGUMENTS_OF_THE_WORKER: Final = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "tokenize", "strftime_now"}
    | {"conversation", "chat_template", "tools", "documents", "return_dict", "return_tensors"}
    | {"padding", "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


class Environment(Section):
    """The task: prompts and rewards."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    """Task that makes prompts and rewards: a shipped one, such as `countdown`, or
    `package.module:Class` for your own."""
    parameters: Annotated[dict[str, Any], Field(max_length=64), FINITE] = Field(default={})
    """Settings of the environment, by name; `docs/tasks.md` lists them."""
    rewards: Annotated[list[Reward], Field(max_length=16)] = Field(default=[])
    """Functions that score responses in place of the environment; the reward is the sum of what
    they return, each times its weight. If unset, the environment scores."""
    prompt_format: PromptFormat = PromptFormat.AUTO
    """How a prompt becomes tokens: `chat` (the tokenizer's chat template), `plain` (text only), or
    `auto` (chat if the tokenizer has a template)."""
    system_prompt: Annotated[str, Field(min_length=1, max_length=16_384)] | None = None
    """System message before each prompt that has none of its own. It needs the chat format. Set it
    to ask for a form of answer that the reward expects. If unset, none."""
    template_arguments: Annotated[dict[str, Any], Field(max_length=32), FINITE] = Field(default={})
    """Arguments of the tokenizer's chat template, such as `enable_thinking: false`. They need the
    chat format."""
    plain_control_tokens: bool = False
    """If true, text that spells a control token, such as `<|endoftext|>`, becomes that token in
    prompts and replies of the plain format. Set it if the environment writes a template of its own.
    In the chat format only the template places control tokens."""
    overlong_prompts: OverlongPrompts = OverlongPrompts.SKIP
    """Treatment of a prompt that leaves no room for `sampling.maxNewTokens` in the model's context:
    `skip` (the prompt is given up and counted), `truncate` (its longest text loses its beginning;
    what the template writes stays), or `fail` (the run ends)."""
    max_absolute_reward: Annotated[float, Field(gt=0.0, le=1e9)] = 10_000.0
    """Largest absolute value of a reward. A response with a larger one counts as a failed
    generation, because it would outweigh all others of its step. Raise it if your rewards are
    larger."""

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        refuse(
            conflict(*place, value=value, message=message)
            for place, value, message in environment_complaints(self.name, self.parameters)
        )
        return self

    @model_validator(mode="after")
    def _template_gets_its_fields(self) -> Self:
        message = "needs a `promptFormat` of 'chat' or 'auto', not 'plain'"
        fields = {"systemPrompt": self.system_prompt, "templateArguments": self.template_arguments}
        is_plain = self.prompt_format is PromptFormat.PLAIN
        refuse(
            conflict(field, value=value, message=message)
            for field, value in fields.items()
            if value and is_plain
        )
        refuse(
            conflict(
                "templateArguments", name, value=value, message="the worker sets it; remove it"
            )
            for name, value in self.template_arguments.items()
            if name in _TEMPLATE_ARGUMENTS_OF_THE_WORKER
        )
        return self

    @model_validator(mode="after")
    def _only_plain_text_has_control_tokens(self) -> Self:
        if self.plain_control_tokens and self.prompt_format is PromptFormat.CHAT:
            message = "needs a `promptFormat` of 'plain' or 'auto', not 'chat'"
            refuse([conflict("plainControlTokens", value=True, message=message)])
        return self


def template_complaints(
    prompt_format: PromptFormat, system_prompt: str | None, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield field and fault of what needs a chat template, for a tokenizer that has none."""
    needs = "needs a chat template, and this model's tokenizer has none; remove it, or give a model"
    if prompt_format is PromptFormat.CHAT:
        yield "promptFormat", f"'chat' {needs} that has one"
    fields = {"systemPrompt": system_prompt, "templateArguments": arguments}
    yield from ((name, f"{needs} that has one") for name, value in fields.items() if value)


class RolloutNoise(Section):
    """Noise on the worker's normalization weights, for exploration (QeRL, arXiv 2510.11696)."""

    initial_sigma: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-2
    """Standard deviation of the noise in the second stage; the first stage has none."""
    final_sigma: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-4
    """Standard deviation of the noise in the last stage; from stage to stage it falls
    geometrically."""
    stages: Annotated[int, Field(ge=3, le=1000)] = 10
    """Number of equal parts into which the run is divided. The noise is the same within a part."""


_OWNED_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "set `model.name` instead",
        "tokenizer": "set `model.name` instead",
        "revision": "set `model.revision` instead",
        "trust_remote_code": "set `model.trustRemoteCode` instead",
        "dtype": "set `precision` instead",
        "quantization": "set `quantization` instead",
        "seed": "set the run's `seed` instead",
        "max_num_seqs": "set `maxConcurrentSequences` instead",
        "max_model_len": "set `maxModelLen` instead",
        "tensor_parallel_size": "set `tensorParallelSize` instead",
        "kv_cache_memory_bytes": "set `kvCacheGibibytes` instead",
        **dict.fromkeys(
            ("enable_lora", "max_loras", "max_lora_rank", "lora_dtype", "lora_target_modules"),
            "`model.lora` decides it; remove it",
        ),
        **dict.fromkeys(
            ("pipeline_parallel_size", "data_parallel_size", "nnodes"),
            "a worker is one engine on one machine; use `tensorParallelSize` and `maxReplicas`",
        ),
        **dict.fromkeys(
            ("load_format", "weight_transfer_config", "worker_cls", "worker_extension_cls"),
            "the learner's versions reach vLLM by it; remove it",
        ),
        **dict.fromkeys(
            ("logprobs_mode", "speculative_config"),
            "tokens must come with the log-probabilities that they were drawn with; remove it",
        ),
        **dict.fromkeys(
            ("skip_tokenizer_init", "disable_log_stats", "distributed_executor_backend"),
            "the worker sets it; remove it",
        ),
    }
)
"""vLLM's arguments that other fields or the worker set, and the fix for one that is given."""


_FIELDS_NOT_OF_HF: Final = (
    "kv_cache",
    "kv_cache_gibibytes",
    "tensor_parallel_size",
    "engine_arguments",
)
"""Fields of a rollout group that engine `hf` does not use."""


def is_engine(name: str) -> bool:
    """Return whether a name is that of a shipped engine, or can be that of a user's class."""
    return name in frozenset(EngineName) or is_import_path(name)


class RolloutGroup(Section):
    """Rollout workers of one kind."""

    name: Annotated[DnsLabel, Field(max_length=20)]
    """Name of the group, unique in the run; part of the workers' names."""
    engine: Annotated[Text, Field(max_length=256)] | None = None
    """Engine that generates: `hf` runs on any machine; `vllm` is for throughput on a GPU;
    `package.module:Class` is your own. If unset, `vllm` if the group sets a field of it, or if the
    workers have GPUs and vLLM is installed; else `hf`."""
    kv_cache: KvCache = KvCache.RECOMPUTE
    """Keys and values of running responses when engine `vllm` takes in a version: `recompute` (the
    new weights read prompt and response again, which takes long if they are long), or `keep`
    (generation goes on with the old ones). What was kept is labelled, and counts as sampled; the
    mismatch of worker and learner is measured on other tokens. Not for engine `hf`, which
    recomputes."""
    kv_cache_gibibytes: Annotated[float, Field(ge=1 / 16, le=4096.0)] | None = None
    """Memory that engine `vllm` takes for keys and values, in GiB, on each of a worker's GPUs. If
    unset, most of a GPU, or 1 GiB on a CPU. Not for engine `hf`."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """GPUs of one worker, over which engine `vllm` splits the model. Raise it if the model does not
    fit on one GPU. Not for engine `hf`."""
    max_model_len: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    """Longest prompt and response together, in tokens; it must be more than
    `sampling.maxNewTokens`. If unset, the model's context; engine `vllm` then makes room for as
    much of it as its memory for keys and values holds. If the model's rotary frequencies depend on
    a length (LongRoPE of Phi-3, dynamic NTK), all groups use those of the longest `maxModelLen`,
    and engine `vllm` needs room for that length."""
    engine_arguments: Annotated[dict[str, Any], Field(max_length=64), FINITE] = Field(default={})
    """More arguments of the engine. For `vllm` they have the names of vLLM's `AsyncEngineArgs`,
    such as `max_num_batched_tokens`; arguments that other fields set are refused. For your own
    engine they are parameters of its `load`. Not for engine `hf`."""
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs that a worker's pod asks for, in a cluster. If unset, `tensorParallelSize` for engine
    `vllm`, unless `template` asks for GPUs by another name; none for other engines."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Smallest number of workers, kept even if the learner has more data than it can use."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 1
    """Largest number of workers, started while the learner waits for data. Raise it if the learner
    still waits."""
    max_concurrent_sequences: Annotated[int, Field(ge=1, le=4096)] = 64
    """Responses that one worker generates at a time. At least `batch.trajectoriesPerPrompt`. Raise
    it until the worker's memory is used."""
    precision: Precision | None = None
    """Number format of generation. A format other than the learner's lowers the on-policy ESS
    ratio. If unset, `bfloat16` on a GPU, else `float32`."""
    quantization: Quantization = Quantization.NONE
    """Number format of the worker's weight matrices: `none`, `fp8` (E4M3, one scale per 128 x 128
    block) or `int8` (one scale per row). It lowers the on-policy ESS ratio, and the calibration
    includes that."""
    noise: RolloutNoise | None = None
    """Noise on the worker's weights, for exploration. If unset, none."""
    threads: Threads | None = None
    """CPU threads of the tensor library. If unset, the library chooses."""
    image: Image | None = None
    """Container image of the workers in a cluster. If unset, the operator's default."""
    drain_seconds: DrainSeconds = 60
    """Longest time, in seconds, that a stopping worker may take to finish its responses, in a
    cluster. Then it releases the others to the learner as partial responses."""
    template: PodTemplate = Field(default={})
    """Part of a PodTemplateSpec, merged into the workers' pods in a cluster; the container's name
    is `rollout`. Use it for resources, node selection and volumes."""

    @property
    def engine_name(self) -> str:
        """Engine that generates; one that is unset is that of a CPU (`vcpo.api.gpu_defaults`)."""
        if self.engine is not None:
            return self.engine
        return (EngineName.VLLM if any(self._fields_of_vllm()) else EngineName.HF).value

    def clamp(self, replicas: int) -> int:
        return min(max(replicas, self.min_replicas), self.max_replicas)

    @property
    def gpus_asked(self) -> int:
        """GPUs that the fields of the group ask for, beside its template."""
        if self.gpus is not None:
            return self.gpus
        is_fast = self.engine_name == EngineName.VLLM or self.tensor_parallel_size > 1
        return self.tensor_parallel_size if is_fast else 0

    @property
    def number_format(self) -> Precision:
        return self.precision or Precision.FLOAT32

    def _fields_of_vllm(self) -> Iterator[str]:
        for name in _FIELDS_NOT_OF_HF:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        conflicts = []
        if self.min_replicas > self.max_replicas:
            message = f"must be at least `minReplicas` ({self.min_replicas})"
            conflicts.append(conflict("maxReplicas", value=self.max_replicas, message=message))
        if self.gpus and self.gpus < self.tensor_parallel_size:
            message = f"must be at least `tensorParallelSize` ({self.tensor_parallel_size})"
            conflicts.append(conflict("gpus", value=self.gpus, message=message))
        if not is_engine(self.engine_name):
            known = ", ".join(EngineName)
            message = f"is unknown; use one of {known}, or package.module:Class for your own"
            conflicts.append(conflict("engine", value=self.engine, message=message))
        message = "engine 'hf' does not use it; remove it or use engine 'vllm'"
        given = self.model_dump(mode="json")
        conflicts += [
            conflict(to_camel(name), value=given[name], message=message)
            for name in (self._fields_of_vllm() if self.engine == EngineName.HF else ())
        ]
        owned = _OWNED_ARGUMENTS if self.engine_name == EngineName.VLLM else {}
        for name, value in self.engine_arguments.items():
            if (fix := owned.get(name)) is not None:
                conflicts.append(conflict("engineArguments", name, value=value, message=fix))
        refuse(conflicts)
        return self


class Lease(Section):
    """Limits on the leases by which workers get prompts."""

    timeout_seconds: Seconds = 600
    """Time in which a worker must submit a prompt's responses, in seconds; then the prompt is
    granted again. Raise it if many responses take longer: such a response needs several leases."""


class Checkpoint(Section):
    """When the run's state is written, and how much of it is kept."""

    every_steps: Steps = 50
    """Largest number of optimizer steps between checkpoints. One is written earlier when 1 GiB was
    accepted since the last one (9 bytes for each token), and one at the end of the run. A restarted
    learner goes on from the last complete checkpoint: it trains on what was accepted since then,
    but takes those steps anew."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """How many checkpoints stay on disk. The newest always stays. If no other of the newest can
    serve a rollback (`health.rollBackOn`), the other places go to older ones that can. The one with
    the best evaluation stays too, however old it is; `vcpo export --best` reads it. A checkpoint is
    evaluated if its step is also a multiple of `evaluation.everySteps`."""


class Weights(Section):
    """How versions of the policy reach rollout workers."""

    store_url: (
        Annotated[str, Field(max_length=1024, pattern=r"^(/|[a-z][a-z0-9+]*://).+$")] | None
    ) = None
    """Folder into which the ranks of the learner write policy versions: an absolute path, or a URL
    that fsspec knows, such as `s3://bucket/folder`. Workers that see a path, and all workers of a
    URL, read the files there; the others get them from the learner's HTTP server. A URL takes the
    load of some hundred workers and more from the learner. If unset, the folder is in the memory of
    the learner's machine."""


class Control(Section):
    """The control loop: lag limit and number of workers."""

    ess_floor_ratio: Ratio = 0.1
    """Floor of the ESS ratio, as a share of the on-policy one. Below it the throttle halves the lag
    limit at once, and again after every ten steps that stay below; healthy steps raise the limit
    slowly. Raise it to react earlier."""
    poll_seconds: Annotated[float, Field(ge=0.1, le=300.0)] = 2.0
    """Time between two decisions of the control loop, in seconds."""
    scale_up_cooldown_seconds: Seconds = 30
    """Least time between two additions of workers, in seconds."""
    scale_down_cooldown_seconds: Seconds = 300
    """Least time between two removals of workers, in seconds."""


class FailurePolicy(Section):
    """How many failures a run survives."""

    max_learner_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the learner in a row without progress, after which the run fails. Progress is a
    step beyond the furthest one so far. Workers in a cluster restart without a limit."""
    max_failures_in_a_row: Annotated[int, Field(ge=1, le=1_000_000)] = 32
    """Failed generations in a row, after which the run fails; one that had responses before fails
    once they have lasted for ten minutes. A worker that fails as often in a row where others
    succeed is set aside instead. Raise it if prompts often fail for a good reason."""


class RollbackTrigger(StrEnum):
    """What rolls a run back to its last good checkpoint; each trigger includes those before it."""

    NEVER = "never"
    COLLAPSE = "collapse"
    """A collapse of the mean training reward."""
    DEAD = "dead"
    """An early warning that is dead."""
    CRITICAL = "critical"
    """An early warning that is critical."""


_LEVELS: Final = {
    RollbackTrigger.DEAD: WarningLevel.DEAD,
    RollbackTrigger.CRITICAL: WarningLevel.CRITICAL,
}


class Health(Section):
    """What a run does by itself about its early warning of a collapse, and about a collapse."""

    enabled: bool = True
    """If true, the run acts on its early warning. At a critical one the lag limit becomes 0 at
    once, and the learning rate is halved, again after ten more steps if the warning lasts; both
    return as the run gets well. `rollBackOn` says when the run goes back. If false, the run does
    nothing by itself, and its early warning still stands in records, metrics, conditions and
    alerts. Choose false to study collapses."""
    roll_back_on: RollbackTrigger = RollbackTrigger.COLLAPSE
    """Event that takes model and optimizer back to the last good checkpoint, with half of the
    learning rate: `collapse` (the mean training reward of ten steps is below half of the best so
    far, beyond chance), `dead` (a collapse, or an early warning that is dead), `critical` (a
    collapse, or an early warning that is critical or dead), or `never`. Steps are not taken again:
    the run goes on with the next one. A run without a good checkpoint goes on as it is; a smaller
    `checkpoint.everySteps` loses less. Choose `never` if the tasks get harder on purpose, so that
    rewards fall. A run is rolled back at most twice."""

    @property
    def guards(self) -> GuardPolicy:
        """The policy that the fields set; one that does nothing if they are not enabled."""
        if not self.enabled:
            return GuardPolicy()
        return GuardPolicy(
            answers_warning=True,
            roll_back_from=_LEVELS.get(self.roll_back_on),
            rolls_back_on_collapse=self.roll_back_on is not RollbackTrigger.NEVER,
        )
