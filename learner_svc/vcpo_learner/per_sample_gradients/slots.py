"""A model's trainable parameters by name and shape, whatever tensor stands for one at the moment.

Sharding replaces a parameter's tensor between the forward and the backward pass, so a parameter's
object identifies nothing. Its module stays the same object, and so does its name in the module.
"""

from collections.abc import Hashable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from vcpo_learner.per_sample_gradients.module_calls import CallSite, is_mixer


class Slot(NamedTuple):
    """One trainable parameter; a tied one is one slot with several uses."""

    name: str
    """The first of its names in the model."""
    shape: torch.Size
    """Shape of the whole parameter, also if a rank holds only a shard of it."""


class Slots:
    """The slots of a model, in its order; make it before the model is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: dict[nn.Module, str] = {}
        self._by_module: dict[nn.Module, dict[str, Slot]] = {}
        self._within: dict[nn.Module | None, list[tuple[str, nn.Module]]] = {}
        """Modules by root."""
        self._slots_within: dict[nn.Module, list[Slot]] = {}
        self.sites: dict[nn.Module, CallSite] = {}
        """The last call of each module: the next one is most likely like it."""
        self.taps: dict[nn.Module, Any] = {}
        """Forwards with taps that the next pass takes over, of modules that are as they were."""
        self.forms: dict[Hashable, int] = {}
        """A number of each form of modules, and of each module whose form is known."""
        self._owners: dict[Slot, tuple[nn.Module, str]] = {}
        self.mixers = frozenset(filter(is_mixer, model.modules()))
        self.in_mixers = frozenset(chain.from_iterable(each.modules() for each in self.mixers))
        """Modules that are given one trajectory to a row, also where rows are packed."""
        known: dict[nn.Parameter, Slot] = {}
        for module_name, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own.items():
                if not parameter.requires_grad:
                    continue
                if parameter not in known:
                    full_name = f"{module_name}.{name}" if module_name else name
                    slot = Slot(name=full_name, shape=parameter.shape)
                    known[parameter], self._owners[slot] = slot, (module, name)
                self._by_module.setdefault(module, {})[name] = known[parameter]
            if module in self._by_module or module in self.mixers:
                self._modules[module] = module_name

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._owners)

    def modules(self, root: nn.Module | None = None) -> list[tuple[str, nn.Module]]:
        """Return the modules with trainable parameters, and all mixers, of all or of `root`."""
        if root not in self._within:
            chosen = self._modules if root is None else root.modules()
            self._within[root] = [
                (self._modules[each], each) for each in chosen if each in self._modules
            ]
        return self._within[root]

    def within(self, root: nn.Module) -> list[Slot]:
        if root not in self._slots_within:
            found = (self.of(module).values() for _, module in self.modules(root))
            self._slots_within[root] = list(dict.fromkeys(chain.from_iterable(found)))
        return self._slots_within[root]

    def of(self, module: nn.Module) -> Mapping[str, Slot]:
        return self._by_module.get(module, {})

    def parameter(self, slot: Slot) -> nn.Parameter:
        module, name = self._owners[slot]
        # As `getattr`, which searches.
        own: dict[str, Any] = module._parameters
        found: nn.Parameter = own[name]
        return found
