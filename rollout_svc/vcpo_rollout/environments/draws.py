"""Draws a task's items by index, and keeps the two splits disjoint.

A hash of an item's content decides its split; index and seed do not matter. An item used for
training is therefore never an evaluation item, in this run or in one with another seed.
"""

import hashlib
from collections.abc import Callable
from random import Random
from typing import Final, TypeVar

from vcpo_rollout.environments.environment import Split

EVALUATION_SHARE: Final = 0.1
MAX_PROPOSALS: Final = 100_000
"""Largest number of proposals in a draw; reached only if hardly any item fits the settings."""

_HASH_BYTES: Final = 8

Item = TypeVar("Item")


def position_of(item_key: str) -> float:
    """Return where in [0, 1) the item with this key lies, by its hash."""
    digest = hashlib.blake2b(item_key.encode(), digest_size=_HASH_BYTES).digest()
    return int.from_bytes(digest) / 256**_HASH_BYTES


def split_of(item_key: str) -> Split:
    """Return the split of the item with this key."""
    return Split.EVALUATION if position_of(item_key) < EVALUATION_SHARE else Split.TRAIN


def draw_item(
    *,
    seed: int,
    split: Split,
    index: int,
    propose: Callable[[Random], Item | None],
    key: Callable[[Item], str],
    max_proposals: int = MAX_PROPOSALS,
) -> Item:
    """Return item `index` (>= 0) of a split: the first proposal that belongs to the split.

    propose: makes an item from a random generator; None is a failed attempt.
    key: identifies an item; two items with equal keys are the same.
    """
    if index < 0:
        raise ValueError(f"index: {index} is negative; prompts are numbered from 0")
    random = Random(f"{seed}/{split}/{index}")  # noqa: S311 - repeatable on purpose
    for _ in range(max_proposals):
        item = propose(random)
        if item is not None and split_of(key(item)) is split:
            return item
    found = f"no {split} item was found in {max_proposals} attempts"
    raise ValueError(f"environment.parameters: {found}; widen the ranges of the task")
