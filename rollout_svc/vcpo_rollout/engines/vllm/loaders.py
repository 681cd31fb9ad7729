"""How a version gets into vLLM: its files, and the calls while generation is paused.

`update` checks a version and writes it, in a thread and beside generation; what does not fit the
model is an EngineError. The files exist until its context ends. `load` brings them into the paused
vLLM and labels the tokens to come; after any exception vLLM's weights are unknown.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, Final

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
from vcpo_rollout.engines.loading_weights import changed_positions, read_weights, tensors_of
from vcpo_rollout.engines.vllm.exchange import patches_to_send, write_memory_file

logger = logging.getLogger(__name__)
_ADAPTER_PLACE: Final = 1
"""vLLM's number for the only adapter that it holds: the one of the version in use."""


class ParameterLoader:
    """Loads full sets of parameters, or the elements that changed.

    skeleton: the model in `transformers`, against which weights are checked.
    """

    lora_request = None
    """The adapter that a generation asks vLLM for; here the model itself."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        self._skeleton = skeleton
        self._obstacle: str | None = None
        """Why vLLM takes no patches; empty if it does, None before the first full set."""

    @contextmanager
    def update(self, weights: PolicyWeights, *, in_use: int | None) -> Iterator[dict[str, Any]]:
        """Write the changed elements; yields the fields of `vllm.worker.WeightFile`."""
        tensors = read_weights(self._skeleton, weights)
        sent = in_checkpoint_form(self._skeleton, tensors)
        changed = changed_positions(self._skeleton, weights, in_use=in_use)
        shapes = None
        if (
            changed is not None
            and self._obstacle == ""
            and all(sent.get(name) is each for name, each in tensors.items())
            and (patches := patches_to_send(tensors, changed)) is not None
        ):
            sent, shapes = patches, {name: list(tensors[name].shape) for name in changed}
        with write_memory_file(sent) as file:
            yield {"path": str(_path_for_vllm(file)), "shapes": shapes}

    async def load(self, llm: AsyncLLM, update: dict[str, Any], policy_version: int) -> None:
        """Load the file through vLLM's weight transfer."""
        if self._obstacle is None:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await llm.finish_weight_update(weight_version=str(policy_version))
        if self._obstacle is None:
            self._obstacle = next(filter(None, await llm.collective_rpc("obstacle_to_patches")), "")
            if self._obstacle:
                logger.info("vLLM loads the full set for each version: %s", self._obstacle)


class AdapterLoader:
    """Puts the adapters of each version in the place of the last ones.

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
        # Of several workers each may have some of the layers.
        lost = set.intersection(*map(set, await llm.collective_rpc("layers_without_place")))
        if lost:
            raise EngineError(
                f"vLLM has no place for the adapters of {', '.join(sorted(lost)[:3])} and would"
                " sample without them; leave such layers out of `spec.model.lora.targetModules`,"
                " or use `engine: hf`"
            )
        await llm.update_weight_version(str(policy_version))


def _path_for_vllm(file: IO[bytes]) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
