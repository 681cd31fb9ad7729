"""Accounts for the tensors of a model's files: each has a place in the model, or is named."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from transformers import PreTrainedModel

from vcpo.service.lifecycle import StartError

_LOGGER = logging.getLogger(__name__)
_MAX_SHOWN = 5


def account_for(
    name: str, model: PreTrainedModel, *, missing: Collection[str], unused: Collection[str]
) -> None:
    """Check that the files of a model hold its parameters; log what else does not fit.

    A buffer that the files do not have keeps the value that the architecture gives it, and is
    published. A tensor that the architecture has no place for is left out on both sides, such as
    layers that predict several tokens.

    name: of the model, in the run file.
    missing: tensors of the model that the files do not hold.
    unused: tensors of the files that the model has no place for.

    Raises:
        StartError: naming parameters without values, which would be random.
    """
    parameters = {each for each, _ in model.named_parameters(remove_duplicate=False)}
    if random := sorted(parameters & set(missing)):
        raise StartError(
            f"spec.model.name: the files of '{name}' have no values for {_list_names(random)}; they"
            " belong to another architecture than its config.json names, or are incomplete: save"
            " the model again with transformers, or fetch its files again"
        )
    if initial := sorted(set(missing) - parameters):
        _LOGGER.warning(
            "the files of '%s' do not hold the buffers %s; they have their initial values",
            name,
            _list_names(initial),
        )
    ignored = "|".join(f"({each})" for each in model._keys_to_ignore_on_load_unexpected or ())
    left = sorted(each for each in unused if not ignored or re.search(ignored, each) is None)
    if left:
        _LOGGER.warning(
            "the files of '%s' hold tensors that the model has no place for: %s; they are neither"
            " trained nor sampled with",
            name,
            _list_names(left),
        )


def _list_names(names: list[str]) -> str:
    more = len(names) - _MAX_SHOWN
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {more} more" if more > 0 else "")
