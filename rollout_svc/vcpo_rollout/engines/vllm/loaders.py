"""How a version gets into vLLM: its files, and the calls while generation is paused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final, Protocol

from transformers import PreTrainedModel
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from vcpo.api.workloads import Lora
from vcpo_rollout.engines.adapters import read_adapters
from vcpo_rollout.engines.engine import EngineError, PolicyWeights
from vcpo_rollout.engines.loading import in_checkpoint_form
from vcpo_rollout.engines.loading_weights import changed_tensors, read_weights, tensors_of
from vcpo_rollout.engines.vllm.exchange import tensors_to_send, write_memory_file

_ADAPTER_PLACE: Final = 1
"""vLLM's number for the only adapter that it holds: the one of the version in use."""


class VersionLoader(Protocol):
    """Puts versions into vLLM, one after the other."""

    lora_request: LoRARequest | None
    """The adapter that a generation asks vLLM for; None for the model itself."""

    def update(self, weights: PolicyWeights, *, in_use: int | None) -> AbstractContextManager[Any]:
        """Check a version and write it for vLLM; the files exist until the context ends.

        It takes long enough to need a thread, and touches nothing that generation uses.

        in_use: the version that vLLM samples from; None before the first.

        Raises:
            EngineError: when the tensors do not fit the model.
        """

    async def load(self, llm: AsyncLLM, update: Any, policy_version: int) -> None:
        """Load a written version into the paused vLLM, and label the tokens to come with it.

        Raises:
            Exception: any of vLLM's; its weights are then unknown.
        """


class ParameterLoader:
    """Loads full sets of parameters, or the decoder layers that changed; a `VersionLoader`.

    skeleton: the model in `transformers`, against which weights are checked.
    """

    lora_request = None

    def __init__(self, skeleton: PreTrainedModel) -> None:
        self._skeleton = skeleton
        self._can_receive = False

    @contextmanager
    def update(self, weights: PolicyWeights, *, in_use: int | None) -> Iterator[dict[str, Any]]:
        """Write the changed layers; yields the fields of `vllm.worker.WeightFile`."""
        changed = changed_tensors(self._skeleton, weights, in_use=in_use)
        tensors = read_weights(self._skeleton, weights)
        sent = in_checkpoint_form(self._skeleton, tensors_to_send(tensors, changed))
        with write_memory_file(sent) as file:
            yield {"path": str(_path_for_vllm(file)), "is_whole": changed is None}

    async def load(self, llm: AsyncLLM, update: dict[str, Any], policy_version: int) -> None:
        """Load the file through vLLM's weight transfer."""
        if not self._can_receive:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            self._can_receive = True
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await llm.finish_weight_update(weight_version=str(policy_version))


class AdapterLoader:
    """Puts the adapters of each version in the place of the last ones; a `VersionLoader`.

    The base model stays as vLLM loaded it at its start.

    skeleton: the base model in `transformers`, against which adapters are checked.
    """

    def __init__(self, skeleton: PreTrainedModel, lora: Lora) -> None:
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()
        }
        self._lora = lora
        # vLLM reads no path for an adapter that it holds, and generation waits for the first one.
        self.lora_request = LoRARequest("policy", _ADAPTER_PLACE, "in use")

    @contextmanager
    def update(self, weights: PolicyWeights, *, in_use: int | None) -> Iterator[LoRARequest]:
        """Write the adapters as peft does; yields the request to hold them under `_ADAPTER_PLACE`.

        The folder has the configuration only: the tensors are in memory, behind a link.
        """
        adapters = list(read_adapters(tensors_of(weights.payload), self._shapes))
        if not adapters:
            raise EngineError("payload: holds no adapter, and this run trains adapters only")
        tensors = {}
        for adapter in adapters:
            name = f"base_model.model.{adapter.layer}"
            tensors[f"{name}.lora_A.weight"] = adapter.a
            tensors[f"{name}.lora_B.weight"] = adapter.b
        settings = {
            "peft_type": "LORA",
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "target_modules": sorted({each.layer.rpartition(".")[2] for each in adapters}),
        }
        with (
            TemporaryDirectory(prefix="vcpo-adapters-") as folder,
            write_memory_file(tensors) as file,
        ):
            (Path(folder) / "adapter_config.json").write_text(
                json.dumps(settings), encoding="utf-8"
            )
            (Path(folder) / "adapter_model.safetensors").symlink_to(_path_for_vllm(file))
            name = f"version-{weights.policy_version}"
            yield LoRARequest(name, _ADAPTER_PLACE, folder, load_inplace=True)

    async def load(self, llm: AsyncLLM, update: LoRARequest, policy_version: int) -> None:
        if not await llm.add_lora(update):
            raise EngineError("vLLM did not take the adapters; its log says why")
        await llm.update_weight_version(str(policy_version))


def _path_for_vllm(file: IO[bytes]) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
