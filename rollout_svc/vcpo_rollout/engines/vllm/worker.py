"""What runs inside vLLM's own processes, which import it by name: weights in, and a timely end.

vLLM's built-in weight transfers are collectives between devices. This one reads a safetensors file
through the same official calls (start, update, finish), so that a swap needs nobody else.

Source: https://docs.vllm.ai/en/v0.32.0/training/weight_transfer/
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from safetensors.torch import load_file
from torch.nn import Module
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

_RELOAD_LOGGER = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
BACKEND = "vcpo"
"""Name of the transfer in vLLM's registry."""


class WorkerExtension:
    """Named to vLLM as `worker_extension_cls`: what makes its processes import this module."""


@dataclass
class NothingToAgreeOn(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not type-checked
    """A file needs no group of processes."""


@dataclass
class WeightFile(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not type-checked
    """Where the new weights are."""

    path: str
    """A safetensors file with parameters under their `transformers` names."""
    is_whole: bool
    """Whether every parameter is in it; if not, then all of each layer that it has a part of."""


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not type-checked
    """Loads parameters from a file; the engine is paused meanwhile."""

    init_info_cls = NothingToAgreeOn
    update_info_cls = WeightFile

    def init_transfer_engine(self, init_info: NothingToAgreeOn) -> None:
        """Choose what the log says of a swap; there is nobody to connect to."""
        _RELOAD_LOGGER.addFilter(LayersWithParameters(self.model))

    def start_weight_update(self) -> None:
        """Give the layers back the parameters that they were loaded with, still without values."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WeightFile) -> None:
        """Load the file's tensors, by whatever names vLLM has for them."""
        # Layers that are not in the file keep what they have, as they should; vLLM warns of each.
        _RELOAD_LOGGER.disabled = not update_info.is_whole
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        """Bring the parameters into the form that the kernels want."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            pack_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


class LayersWithParameters(logging.Filter):
    """Keeps vLLM's warnings that a layer failed to load weights where the layer has parameters.

    vLLM counts buffers too, such as the angles of rotary embeddings, which are computed and in no
    version of the policy. It names layers by their class.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        layers = [(type(layer).__name__, layer) for layer in model.modules()]
        has_parameters = {name for name, layer in layers if list(layer.parameters(recurse=False))}
        self._silent = {name for name, _ in layers} - has_parameters

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        named = record.args[:1] if isinstance(record.args, tuple) else ()
        return self._silent.isdisjoint(map(str, named))


def pack_heads(model: Module) -> None:
    """Pack a model's output heads again from the weights they have now; only a CPU has any packed.

    There vLLM multiplies by a packed copy of the weight. A reload loads nothing into a head that is
    tied to the embedding, so its copy would stay the old one: tokens would be sampled from new
    layers under an old head.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    # Neither exit handlers nor other threads may hold this up: whoever wanted the tokens is gone.
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_parent() -> None:
    """End this process when the one that started it has ended, however it ended.

    vLLM's engine process would otherwise outlive a worker that is killed, and keep its memory. The
    kernel's own signal for it (PR_SET_PDEATHSIG) goes by the thread that started the process, which
    may end long before the worker does.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        name = "vcpo-parent-watch"
        threading.Thread(target=_end_with, args=(parent,), name=name, daemon=True).start()


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
_watch_parent()
