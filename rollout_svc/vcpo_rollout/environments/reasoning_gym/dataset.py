"""A data set of the library, as the environment and its judge make it."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Final

from vcpo_rollout.environments.environment import missing_library

DEFAULT_SIZE: Final = 4096
"""Items of a data set; some make all of theirs at once."""

_OWN_FIELDS: Final = ("seed",)
_NEAREST: Final = 5


class GeneratedItems:
    """The items of one data set; any thread may ask for one.

    config: fields of the data set's configuration, without `seed`.

    Raises: ValueError, naming the field, when the library is missing, has no such data set, or
        refuses a setting.
    """

    def __init__(self, name: str, config: Mapping[str, Any], seed: int) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise missing_library("reasoning_gym", "'vcpo[reasoning-gym]'", error) from error
        if name not in DATASETS:
            nearest = get_close_matches(name, DATASETS, n=_NEAREST, cutoff=0.0)
            raise ValueError(
                f"environment.name: 'reasoning_gym:{name}' is none of the {len(DATASETS)} data sets"
                f" of the library; the nearest are {', '.join(nearest)}"
            )
        dataset_class, config_class = DATASETS[name]
        known = {each.name for each in dataclasses.fields(config_class)} - {*_OWN_FIELDS}
        if unknown := sorted(set(config) - known):
            raise ValueError(
                f"environment.parameters.config.{unknown[0]}: {name!r} has no such setting; it"
                f" takes {', '.join(sorted(known))}"
            )
        self.name = name
        settings = {"size": DEFAULT_SIZE, **config}
        try:
            self.dataset = dataset_class(config_class(**settings, seed=seed))
        except Exception as error:  # its checks are assertions, and others
            raise ValueError(
                f"environment.parameters.config: {name!r} refuses {dict(config)!r}"
                f" ({type(error).__name__}: {error}); correct it"
            ) from error
        self.size = len(self.dataset)
        # Some data sets use numpy's global generator.
        self._lock = threading.Lock()

    def at(self, index: int) -> dict[str, Any]:
        """Return item `index`, below `size`: question, answer, and what its scorer needs."""
        with self._lock:
            return dict(self.dataset[index])


def question_sum(item: Mapping[str, Any]) -> str:
    """Return a checksum of an item's question and answer."""
    text = f"{item['question']}\0{item['answer']}"
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
