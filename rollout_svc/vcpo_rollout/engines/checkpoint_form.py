"""Tensors of a model in memory, as a checkpoint of it has them.

transformers holds all experts of a layer in one tensor, and names some modules otherwise than
files do: `block_sparse_moe` of Mixtral is `mlp` in memory. Versions have the names in memory.
Engines that read checkpoints get the form of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion


def in_checkpoint_form(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names and in the shapes of a checkpoint.

    model: may be without parameters.
    tensors: by the names that the model has for them; of a decoder layer all or none.
    """
    if not get_model_conversion_mapping(model, add_legacy=False):
        return dict(tensors)
    saved: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return saved
