"""Runs inside vLLM's processes, which import it by name.

It loads versions, watches the parent, and records errors for it.

vLLM's built-in weight transfers are collectives between devices. This one reads a safetensors file
through the same public calls (start, update, finish), so a swap needs no other process.

Source: https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/
"""

import contextlib
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Module
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
    layerwise_groups,
)
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import capture_layer_to_meta
from vllm.platforms import current_platform

from vcpo.metrics.device_memory import device_memory
from vcpo.service.lifecycle import wake_at_parent_exit
from vcpo.service.persistent_buffers import own_buffers
from vcpo.wire.deltas import VALUES
from vcpo_rollout.engines.vllm import ROLLOUT_WORKER_VARIABLE
from vcpo_rollout.engines.vllm.exchange import POSITIONS
from vcpo_rollout.engines.vllm.last_error import record_errors

_ROUTER_BIAS = "e_score_correction_bias"
BACKEND = "vcpo"
"""Name of the weight transfer in vLLM's registry."""
_LOGIT_LAYERS = (LogitsProcessor, LogitsProcessorWithLoRA)
_KEEPS_PARAMETERS = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class WorkerExtension:
    """Makes vLLM's processes import this module: vLLM gets its name as `worker_extension_cls`.

    Its methods become those of vLLM's workers.
    """

    def memory_of_device(self) -> dict[str, int]:
        """Return bytes of this worker's GPU by `MemoryState`; empty on a CPU."""
        device: torch.device = self.device  # type: ignore[attr-defined]  # of vLLM's worker
        return {
            state.value: size for state, size in (device_memory(torch.cuda, device) or {}).items()
        }

    def obstacle_to_patches(self) -> str | None:
        """Return why this worker's model takes no patches, after its first full set."""
        transfer: FileTransfer = self.weight_transfer_engine  # type: ignore[attr-defined]  # of vLLM's
        return transfer.obstacle

    def layers_without_place(self) -> list[str]:
        """Return the layers with an adapter that this worker's model does not have.

        vLLM drops such an adapter without a word, and samples from the base model there. By now it
        has put adapters of layers that it computes as one under a name of its own.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]  # of vLLM's worker
        manager = runner.lora_manager._adapter_manager
        held = manager.list_adapters().values()
        return [layer for each in held for layer in each.loras if layer not in manager.modules]

    def sample_only(self, num_tokens: int, holes: list[int]) -> None:
        """Leave rows of the head without a token out of every softmax; see `Vocabulary`.

        It costs nothing without holes: vLLM cuts its own padding off at the same place.
        """
        model = self.get_model()  # type: ignore[attr-defined]  # of vLLM's worker
        layers = [each for each in model.modules() if isinstance(each, _LOGIT_LAYERS)]
        if not layers:
            raise RuntimeError(f"{type(model).__name__}: has no layer that makes logits")
        places = torch.tensor(holes, device=next(model.parameters()).device)
        for layer in layers:
            if isinstance(layer, LogitsProcessor):
                layer.vocab_size = layer.org_vocab_size = num_tokens
            if holes:
                layer.register_forward_hook(functools.partial(_hide, places))


def _hide(holes: Tensor, layer: Module, inputs: Any, logits: Tensor | None) -> None:
    if logits is not None:  # one of several processes gathers them
        logits.index_fill_(-1, holes, -torch.inf)


@dataclass
class FileTransferInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not type-checked
    """Empty: a file needs no group of processes."""


@dataclass
class WeightFile(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not type-checked
    """Names the file with the new weights."""

    path: str
    """A safetensors file with all tensors in the form of a checkpoint, or with changed elements."""
    shapes: dict[str, list[int]] | None
    """Of the tensors that changed; None for a file of all."""


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not type-checked
    """Loads tensors from a file while the engine is paused."""

    obstacle: str | None = None
    """Why the model takes no patches; empty if it does, None before the first full set."""

    init_info_cls = FileTransferInit
    update_info_cls = WeightFile

    def init_transfer_engine(self, init_info: FileTransferInit) -> None:
        """Nothing to do: there is no connection to open."""

    def start_weight_update(self) -> None:
        """Nothing to do: what comes first depends on the file."""

    def receive_weights(self, update_info: WeightFile) -> None:
        """Load the file's tensors; vLLM maps their names to its own."""
        with safe_open(update_info.path, "pt") as file:
            if update_info.shapes is not None:
                self._patch(file, update_info.shapes)
                return
            self._load(file)
            if self.obstacle is None:
                self.obstacle = obstacle_in(self.model) or self._try_patches(file)

    def _load(self, file: Any) -> None:
        forget_expert_kernels(self.model)
        widen(self.model, self.model_config.dtype)
        initialize_layerwise_reload(self.model)
        names = file.keys()
        loaded = self.model.load_weights((name, file.get_tensor(name)) for name in names)
        # A few models do not say what they load.
        if loaded and (missing := tensors_without_values(self.model, loaded)):
            raise ValueError(f"the version has no values for {', '.join(missing[:5])}")
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            repack_heads(self.model)

    def _try_patches(self, file: Any) -> str:
        """Patch every tensor in no element; return what goes wrong, empty if the weights stay.

        Some loaders would write vLLM's NaN for elements that stay, or convert a tensor again.
        """
        patches = []
        for name in file.keys():  # noqa: SIM118
            each = file.get_tensor(name)
            new = each.new_empty(0, device=self.device)
            if each.is_floating_point():
                patches.append(CheckpointWeightPatch(name, each.shape, new.dtype, new, new.long()))
        before = sums_of_bytes(self.model)
        try:
            load_checkpoint_weight_patches(self.model, patches)
            if sums_of_bytes(self.model) == before:
                return ""
            fault = "a patch changes what it does not name"
        except Exception as error:  # noqa: BLE001 - the code of any model runs there
            fault = f"vLLM cannot patch it: {type(error).__name__}: {error}"
        self._load(file)
        return fault

    def _patch(self, file: Any, shapes: dict[str, list[int]]) -> None:
        for names in layerwise_groups(list(shapes)):  # few are on the device at once
            patches = []
            for name in names:
                ends, shape = (VALUES, POSITIONS), tuple(shapes[name])
                new, at = (file.get_tensor(name + end).to(self.device) for end in ends)
                patches.append(CheckpointWeightPatch(name, shape, new.dtype, new, at))
            load_checkpoint_weight_patches(self.model, patches, validate_unique_indices=False)

    def finish_weight_update(self) -> None:
        """Nothing to do: each file is complete."""

    def shutdown(self) -> None:
        """Nothing to do."""


def widen(model: Module, dtype: torch.dtype) -> None:
    """Give parameters that a layer has in a shorter type than the model's the type of the model.

    Apertus has some in bfloat16 in any run, and would round those of each version.
    """
    for layer in model.modules():
        short = [
            each
            for each in layer.parameters(recurse=False)
            if each.is_floating_point() and each.itemsize < dtype.itemsize
        ]
        if short and not hasattr(layer, "quant_method"):
            for each in short:
                each.data = each.data.to(dtype)
            get_layerwise_info(layer).restore_metadata = capture_layer_to_meta(layer)


def sums_of_bytes(model: Module) -> list[int]:
    """Return the sum of the bytes of each parameter and persistent buffer."""
    flat = (each.reshape(-1).view(torch.uint8) for each in model.state_dict().values())
    return [int(each.sum(dtype=torch.int64)) for each in flat]


def obstacle_in(model: Module) -> str:
    """Return which layer computes with copies of its parameters, which a patch does not reach."""
    for path, layer in model.named_modules():
        keeps = type(getattr(layer, "quant_method", None)) in _KEEPS_PARAMETERS
        converts = hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention
        if converts or not keeps or not all(map(Tensor.numel, layer.parameters(recurse=False))):
            return f"vLLM converts the weights of {path} ({type(layer).__name__})"
    return ""


def tensors_without_values(model: Module, loaded: Set[str]) -> list[str]:
    """Return the parameters and persistent buffers that nothing was loaded into, by vLLM's names.

    Like vLLM's own check of a checkpoint it leaves out layers whose parameters are converted after
    they are loaded, because these have other names and sizes then. Routers have a bias beside such
    parameters, which is not converted, and which their experts have under a name of their own.

    loaded: what `load_weights` returned.
    """
    names: defaultdict[Tensor, list[str]] = defaultdict(list)
    for path, layer in model.named_modules():
        for own, tensor in own_state(layer).items():
            if own == _ROUTER_BIAS or not is_converted(layer):
                names[tensor].append(f"{path}.{own}".removeprefix("."))
    return [each[0] for each in names.values() if loaded.isdisjoint(each)]


def own_state(layer: Module) -> dict[str, Tensor]:
    """Return a layer's own parameters and persistent buffers, by name."""
    return dict(layer.named_parameters(recurse=False)) | own_buffers(layer)


def is_converted(layer: Module) -> bool:
    """Whether vLLM converts a layer after it is loaded, or computes what the layer holds."""
    method = getattr(layer, "quant_method", None)
    return is_deferred_attention_layer(layer) or hasattr(method, "process_weights_after_loading")


def forget_expert_kernels(model: Module) -> None:
    """Take the kernels off a model's layers with experts; only on a CPU.

    There a kernel multiplies by packed weights. vLLM packs them as it makes a layer's kernel, and a
    reload makes none for a layer that has one: the kernel would take loaded weights for packed.
    """
    for layer in model.modules():
        if current_platform.is_cpu() and isinstance(layer, RoutedExperts):
            layer.quant_method.moe_kernel = None


def repack_heads(model: Module) -> None:
    """Repack the output heads of a model from their current weights; only a CPU packs them.

    On a CPU vLLM multiplies by a packed copy of the weight. A reload loads nothing into a head that
    is tied to the embedding, so the copy would keep the old weights, and tokens would be sampled
    from new layers with an old head.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _watch_parents() -> None:
    """Kill this process when its parent or the rollout worker ends, however that ends.

    vLLM's engine process would otherwise survive a killed rollout worker and keep its memory. With
    several GPUs it stands between the worker and the processes that import this module, which then
    kill it too. The kernel's own signal (PR_SET_PDEATHSIG) follows the thread that started the
    process, which may end long before the worker does; it only continues a stopped process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    wake_at_parent_exit()
    rollout_worker = int(os.environ.get(ROLLOUT_WORKER_VARIABLE, os.getppid()))

    def kill_after_parents() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            ends = [parent.sentinel, os.pidfd_open(rollout_worker)]
            multiprocessing.connection.wait(ends)
        # Exit handlers and other threads must not delay the end: no process wants the tokens.
        if os.getppid() == parent.pid != rollout_worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_after_parents, name="vcpo-parent-watch", daemon=True).start()


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
# It warns of layers that keep their values, as intended, and of buffers that are computed.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
_watch_parents()
record_errors(logging.getLogger("vllm"))
