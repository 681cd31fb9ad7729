"""Runs inside vLLM's processes, which import it by name.

It loads versions, watches the parent, and records errors for it.

vLLM's built-in weight transfers are collectives between devices. This one reads a safetensors file
through the same public calls (start, update, finish), so a swap needs no other process.

Source: https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/
"""

from __future__ import annotations

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
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from vcpo.metrics.device_memory import device_memory
from vcpo.service.lifecycle import wake_at_parent_exit
from vcpo.service.persistent_buffers import own_buffers
from vcpo_rollout.engines.vllm import ROLLOUT_WORKER_VARIABLE
from vcpo_rollout.engines.vllm.last_error import record_errors

_ROUTER_BIAS = "e_score_correction_bias"
BACKEND = "vcpo"
"""Name of the weight transfer in vLLM's registry."""
_LOGIT_LAYERS = (LogitsProcessor, LogitsProcessorWithLoRA)


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
    """A safetensors file with parameters and buffers in the form of a checkpoint."""
    is_whole: bool
    """Whether it has every tensor. If not, it has all tensors of each layer it touches."""


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not type-checked
    """Loads tensors from a file while the engine is paused."""

    init_info_cls = FileTransferInit
    update_info_cls = WeightFile

    def init_transfer_engine(self, init_info: FileTransferInit) -> None:
        """Nothing to do: there is no connection to open."""

    def start_weight_update(self) -> None:
        self._expert_kernels = take_expert_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightFile) -> None:
        """Load the file's tensors; vLLM maps their names to its own."""
        with safe_open(update_info.path, "pt") as file:
            loaded = self.model.load_weights(
                (name, file.get_tensor(name))
                for name in file.keys()  # noqa: SIM118
            )
        # A few models do not say what they load.
        missing = (
            tensors_without_values(self.model, loaded) if update_info.is_whole and loaded else []
        )
        if missing:
            raise ValueError(f"the version has no values for {', '.join(missing[:5])}")

    def finish_weight_update(self) -> None:
        """Convert the parameters into the format of the kernels."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer, kernel in self._expert_kernels.items():
            # A layer that was not in the file keeps its kernel with its values.
            layer.quant_method.moe_kernel = layer.quant_method.moe_kernel or kernel
        if self.model_config.hf_text_config.tie_word_embeddings:
            repack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


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


def take_expert_kernels(model: Module) -> dict[Any, Any]:
    """Take the kernels off a model's layers with experts, and return them by layer; only on a CPU.

    There a kernel multiplies by packed weights. vLLM packs them as it makes a layer's kernel, and a
    reload makes none for a layer that has one: the kernel would take loaded weights for packed.
    """
    if not current_platform.is_cpu():
        return {}
    layers: list[Any] = [each for each in model.modules() if isinstance(each, RoutedExperts)]
    kernels = {layer: layer.quant_method.moe_kernel for layer in layers}
    for layer in kernels:
        layer.quant_method.moe_kernel = None
    return kernels


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
