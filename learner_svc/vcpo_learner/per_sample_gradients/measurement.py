"""The measurement of every slot's per-sample gradients, as a backward pass hands them over."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement, islice
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from vcpo_learner.per_sample_gradients.experts import ExpertCall, ExpertGradients, ExpertSite
from vcpo_learner.per_sample_gradients.factors import Factors, TokenProducts, concatenated, is_same
from vcpo_learner.per_sample_gradients.layer_gradients import (
    LayerGradients,
    join,
    known_form,
    layer_gradients,
)
from vcpo_learner.per_sample_gradients.module_calls import CallSite, ModuleCall, in_rows
from vcpo_learner.per_sample_gradients.slots import Slot
from vcpo_learner.per_sample_gradients.taps import (
    LostGradientError,
    Recording,
    require_coverage,
)
from vcpo_learner.per_sample_gradients.weighted_sum import Part, WeightedSum

if TYPE_CHECKING:
    from vcpo_learner.output_head.gradient_tiles import OwnRows

_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements of per-trajectory gradients in memory at once: about a CPU's cache (4 MiB in float32),
and enough to keep a GPU busy (256 MiB)."""

_FLOPS_PER_TOUCH = {"cpu": 24.0, "cuda": 400.0}
"""Multiplications in the time of reading and writing one number of main memory."""

_SMALL_ELEMENTS = 1 << 16
"""Slots of at most so many elements, vectors and adapters, are added up together."""

_TOUCHES = 3.0
"""Times that `reduced` reads or writes each element of a gradient: form, square, add."""


@dataclass(slots=True, kw_only=True, eq=False)
class Packing:
    """The places of each trajectory's tokens in a packed row, which is unpacked to be measured.

    So padding costs memory while a module is measured, and nothing else. The model must keep
    trajectories apart; the code cannot detect those that attend to each other.
    """

    segments: Tensor
    """[1, tokens] int64; the number of a trajectory."""
    places: Tensor
    """[num_trajectories, longest] int64 index of the row's tokens. Shorter trajectories are filled
    up with a token of the row, so every module gets numbers it has seen."""
    is_own: Tensor
    """[num_trajectories, longest] bool; False where a shorter trajectory is filled up."""
    _last: tuple[Tensor, Tensor] | None = None

    def require_per_token(self, call: CallSite) -> None:
        """Refuse a call whose output or arguments do not have one entry per token.

        Raises: ValueError, naming the module and the argument.
        """
        front = tuple(self.segments.shape)
        shape = call.output_shape
        if shape is not None and shape[:1] == (self.segments.numel(),) and call.is_flat(front[0]):
            return
        with_heads = front[0], 1, front[1]
        if all(each[:3] == with_heads for each in (shape or (), *call.argument_shapes.values())):
            return
        if shape is None or shape[:2] != front:
            raise ValueError(
                f"{call.place} returned shape {shape} for packed rows {front}: "
                "gradient norms need a tensor with one token per entry of the first two axes"
            )
        for key, shape in call.argument_shapes.items():
            if len(shape) > 0 and shape[:2] != front:
                raise ValueError(
                    f"argument {key!r} of {call.place} has shape {tuple(shape)} for packed "
                    f"rows {front}: gradient norms cannot tell which trajectory it belongs to; "
                    "give it one entry per token, or one trajectory to each row"
                )

    def unpack(self, call: ModuleCall, output_gradient: Tensor) -> tuple[ModuleCall, Tensor]:
        """Return a call and the gradient at its output with one trajectory per row.

        output_gradient: [1, tokens, ...]; returned as [num_trajectories, longest, ...] with zeros
            behind shorter trajectories.
        """
        behind = ~self.is_own.view(*self.is_own.shape, *[1] * (output_gradient.ndim - 2))
        gradient = self._unpack_values(output_gradient).masked_fill(behind, 0.0)
        return call.with_tensors(self._argument), gradient

    def _argument(self, value: Tensor) -> Tensor:
        """An argument, unpacked; neighboring layers share an input, and then its unpacked copy."""
        if self._last is None or not is_same(self._last[0], value):
            # The argument is held too, so that no other tensor can reuse its memory.
            self._last = (value, self._unpack_values(value))
        return self._last[1]

    def _unpack_values(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1)[self.places]


_Layer = LayerGradients | ExpertGradients


@dataclass(slots=True, eq=False)
class _Uses:
    """What has arrived of one slot."""

    layers: list[_Layer] = field(default_factory=list)
    cross_terms: list[OwnRows | None] = field(default_factory=list)
    """The cross terms of uses that were measured and summed before they arrived."""
    num_arrived: int = 0


class _Use(NamedTuple):
    """A call's use of a slot, as of all calls like it."""

    name: str
    """Of the parameter in its module."""
    alike: list[tuple[Slot, LayerGradients]] | None = None
    """Where a small use waits for its like; None for other uses."""
    size: int = 0
    """Elements of the use, and of the products that measure it, if it waits."""
    is_small: bool = False
    """Whether its slot is small."""


class Kept(NamedTuple):
    """Matrices of one shape, by their factors."""

    slots: list[Slot]
    factors: Factors
    """With the trajectories of one slot after those of another."""


class Measurement:
    """Collects the gradients of each slot's uses, and measures the slot at the last one."""

    def __init__(
        self,
        recording: Recording,
        objectives: Tensor,
        weighted_sum: WeightedSum | None,
        packed: Packing | None,
    ) -> None:
        self.num_trajectories = len(objectives)
        """Trajectories of the forward pass."""
        self.squared_norms = torch.zeros(
            self.num_trajectories, dtype=torch.float64, device=objectives.device
        )
        self.weighted_sum = weighted_sum
        self._keeps_factors = weighted_sum is None or weighted_sum.sums.keeps_factors
        self.kept: list[Kept] = []
        """Matrices whose sum waits for the slopes."""
        self.unused: set[Slot] = set()
        """Slots on which the objectives do not depend."""
        self._recording = recording
        self._packed = packed
        self._products = TokenProducts()
        self._arrived: dict[Slot, _Uses] = {}
        self._measured: dict[Slot, None] = {}
        """Slots in the order in which their last use arrived; it is the same on all ranks."""
        self._norms: list[Tensor] = []
        """[parts, batch] norms, added up at the end: a launch costs more than the addition."""
        self._squares: list[Tensor] = []
        """[parts, batch] squared norms of other parts."""
        self._alike: dict[Hashable, list[tuple[Slot, LayerGradients]]] = {}
        """Small uses that wait for others of their kind."""
        self._plans: dict[Hashable, list[_Use]] = {}
        """By what tells calls apart."""
        self._num_alike = 0
        """Elements in `_alike`, and of the products that measure them."""
        self._most = _CHUNK_ELEMENTS.get(objectives.device.type, _CHUNK_ELEMENTS["cuda"])
        """Elements of per-trajectory gradients in memory at once."""
        self._num_gathered = 0
        """Elements in `_gathered`."""
        self._gathered: list[tuple[Part, Tensor]] = []
        """Gradients [batch, elements] of small parts that wait for others."""

    def _chunks(self, elements_each: int) -> Iterator[slice]:
        size = max(1, self._most // elements_each)
        for start in range(0, self.num_trajectories, size):
            yield slice(start, min(start + size, self.num_trajectories))

    def require(self, site: CallSite) -> None:
        """Refuse a call that cannot be measured.

        Raises: ValueError, naming the module.
        """
        if (packed := self._packing(site.module)) is None:
            site.require_per_trajectory(self.num_trajectories)
        else:
            packed.require_per_token(site)

    def _packing(self, module: nn.Module) -> Packing | None:
        return None if module in self._recording.slots.in_mixers else self._packed

    def receive(self, call: ModuleCall | ExpertCall, output_gradient: Tensor) -> None:
        """Take a call and the gradient at its output, in the output's shape.

        In a backward pass, which makes no graph.
        """
        if isinstance(call, ExpertCall):
            self._receive_experts(call, output_gradient)
            return
        packed = self._packing(call.site.module)
        front = (self.num_trajectories,) if packed is None else tuple(packed.segments.shape)
        if packed is not None and output_gradient.shape[:3] == (front[0], 1, front[1]):
            # Keys and values of all heads at once, before they are told apart.
            call = call.with_tensors(lambda each: each.squeeze(1))
            output_gradient = output_gradient.squeeze(1)
        if output_gradient.shape[: len(front)] != front:
            call = call.with_tensors(lambda each: in_rows(each, front[0]))
            output_gradient = in_rows(output_gradient, front[0])
        if packed is not None:
            call, output_gradient = packed.unpack(call, output_gradient)
        slots = self._recording.slots
        own = slots.of(call.site.module)
        for use in self._plan(call, output_gradient, own):
            slot = own[use.name]
            if use.alike is None or self._recording.num_uses[slot] > 1:
                self._take(slot, [layer_gradients(call, use.name, output_gradient)])
                continue
            parameter = slots.parameter(slot)
            if self._num_alike + use.size > self._most:
                self._measure_alike()
            use.alike.append((slot, LayerGradients(call, use.name, parameter, output_gradient)))
            self._num_alike += use.size
            self._measured[slot] = None
            if self.weighted_sum is not None and not use.is_small:
                self.weighted_sum.sums.close(slot)

    def _plan(
        self, call: ModuleCall, output_gradient: Tensor, own: Mapping[str, Slot]
    ) -> Sequence[_Use]:
        """Return a call's uses of slots; those of the last call like it, as a host is slow.

        own: the module's slots by name.
        """
        site, inputs, forms = call.site, call.arguments.get(0), self._recording.slots.forms
        form = forms.get(site.module)
        if form is None and (known := known_form(site, own)) is not None:
            form = forms[site.module] = forms.setdefault(known, len(forms))
        names = filter(own.__contains__, site.parameter_names)
        is_simple = len(call.arguments) == 1 and not site.is_of_mixer
        if form is None or not is_simple or not isinstance(inputs, Tensor):
            return [_Use(name) for name in names]
        key = form, inputs.shape, inputs.dtype, output_gradient.shape, output_gradient.dtype
        if key not in self._plans:
            found = [layer_gradients(call, name, output_gradient) for name in names]
            self._plans[key] = [self._use(own[each.parameter_name], each) for each in found]
        return self._plans[key]

    def _use(self, slot: Slot, found: LayerGradients) -> _Use:
        kind, factors, size = found.kind, found.factors, 2 * found.output_gradient.numel()
        waits = factors is None and _is_small(slot)
        if factors is not None:
            batch, tokens, _ = factors.columns.shape
            size = factors.rows.numel() + factors.columns.numel() + batch * tokens**2
            waits = self._keeps_factors and is_kept_cheaper(slot, [factors])
        if kind is None or not waits or size + slot.shape.numel() > self._most // 16:
            return _Use(found.parameter_name)
        # A launch costs more than the products of a small matrix or vector.
        alike = self._alike.setdefault(kind, [])
        return _Use(found.parameter_name, alike, size, _is_small(slot))

    def _receive_experts(self, call: ExpertCall, output_gradient: Tensor) -> None:
        slot = self._recording.slots.of(call.site.module)[call.site.parameter_name]
        owners = self._owners(call.site)
        self._take(slot, call.gradients(output_gradient, owners, self.num_trajectories))

    def _owners(self, site: ExpertSite) -> Tensor:
        """The trajectory of each token of all rows."""
        num_rows = self.num_trajectories
        if self._packed is not None:
            owners = self._packed.segments.flatten()
        else:
            owners = torch.arange(num_rows, device=self.squared_norms.device)
            owners = owners.repeat_interleave(site.num_tokens // num_rows)
        if len(owners) != site.num_tokens:
            raise ValueError(
                f"{site.place} got {site.num_tokens} tokens for rows of {len(owners)} tokens:"
                " gradient norms cannot tell which trajectory each belongs to"
            )
        return owners

    @torch.no_grad()
    def receive_measured(
        self, slot: Slot, squared_norms: Tensor, cross_term: OwnRows | None = None
    ) -> None:
        """Take the norms [num_trajectories] of a use that was announced, and has measured itself.

        It has added its gradients to `weighted_sum`. cross_term: for products with another use.
        """
        self.squared_norms += squared_norms
        self._take(slot, [], [cross_term])

    @torch.no_grad()
    def finish(self, objective: Tensor) -> None:
        """Measure slots with uses that have no gradient, and check that none was lost.

        objective: of the backward pass, with its graph.
        Raises: LostGradientError.
        """
        rest = [slot for slot in self._recording.slots if slot not in self._measured]
        if rest:
            require_coverage(objective, self._recording)
        for slot in rest:
            uses = self._arrived.pop(slot, _Uses())
            if len(uses.cross_terms) < self._recording.num_expected[slot]:
                raise LostGradientError([slot.name], "its use outside of its module has none")
            self._measure(slot, uses)
        self._measure_alike()
        self._take_gathered()
        for slot in self._measured:
            if _is_small(slot) and self.weighted_sum is not None:
                self.weighted_sum.sums.close(slot)
        self._add_up()

    def _add_up(self) -> None:
        for norms in _stacks(self._norms):
            self.squared_norms += norms.double().square_().sum(dim=0)
        for squares in _stacks(self._squares):
            # Rounding may leave the square of a vanishing gradient just under zero.
            self.squared_norms += squares.clamp_min_(0.0).sum(dim=0, dtype=torch.float64)

    def _take(
        self, slot: Slot, layers: Sequence[_Layer], cross_terms: Sequence[OwnRows | None] = ()
    ) -> None:
        """Take what one use of a slot has; measure the slot if it is the last use."""
        uses = self._arrived.get(slot) or self._arrived.setdefault(slot, _Uses())
        uses.layers += layers
        uses.cross_terms += cross_terms
        uses.num_arrived += 1
        if uses.num_arrived == self._recording.num_uses[slot]:
            self._measure(slot, self._arrived.pop(slot))

    def _measure(self, slot: Slot, uses: _Uses) -> None:
        self._measured[slot] = None
        if uses.cross_terms:
            self._measure_beside(slot, uses)
        elif not uses.layers:
            self.unused.add(slot)
        for matrix in () if uses.cross_terms else {use.matrix: None for use in uses.layers}:
            self._measure_matrix(slot, [use for use in uses.layers if use.matrix == matrix])
        if self.weighted_sum is not None and not _is_small(slot):
            self.weighted_sum.sums.close(slot)

    def _measure_matrix(self, slot: Slot, uses: Sequence[_Layer]) -> None:
        """Measure a slot, or one of its matrices, that has nothing to do with the others."""
        factors = [use.factors for use in uses if use.factors is not None]
        if len(factors) == len(uses) and is_kept_cheaper(slot, factors):
            self._measure_kept(factors)
            self._sum_kept(slot, factors)
        else:
            self._measure_reduced(slot, uses)

    def _measure_beside(self, slot: Slot, uses: _Uses) -> None:
        """Measure an embedding whose matrix has another use, which has measured itself."""
        if not uses.layers:
            return
        factors = [use.factors for use in uses.layers if use.factors is not None]
        cross_terms = [each for each in uses.cross_terms if each is not None]
        is_embedding = [each.is_one_hot for each in factors]
        if (
            len(uses.cross_terms) > 1
            or not cross_terms
            or is_embedding != [True] * len(uses.layers)
        ):
            raise ValueError(
                f"parameter {slot.name!r} is used by the output head and by another module that is"
                " no embedding: gradient norms cannot be measured"
            )
        self._measure_kept(factors)
        for each in factors:
            self.squared_norms += 2.0 * cross_terms[0].inner_products(each.rows, each.columns)
        self._sum_kept(slot, factors)

    def _measure_kept(self, factors: Sequence[Factors]) -> None:
        tokens = max(each.columns.shape[1] for each in factors)
        chunks = []
        for samples in self._chunks(tokens**2):
            parts = [each.part(samples) for each in factors]
            total = parts[0].inner_products(parts[0], self._products)
            for first, second in islice(combinations_with_replacement(parts, 2), 1, None):
                found = first.inner_products(second, self._products).double()
                total = total.double() + (found if first is second else 2.0 * found)
            chunks.append(total)
        self._squares.append(concatenated(chunks)[None])

    def _measure_alike(self) -> None:
        for waiting in filter(None, self._alike.values()):
            slots, together = [slot for slot, _ in waiting], join([use for _, use in waiting])
            waiting.clear()
            if (factors := together.factors) is None:
                gradients = together.gradients(slice(0, len(together.output_gradient)))
                for slot, each in zip(
                    slots, gradients.view(len(slots), -1, *slots[0].shape), strict=True
                ):
                    self._gather(Part(slot), each)
                continue
            squares = factors.inner_products(factors, TokenProducts())
            self._squares.append(squares.view(len(slots), -1))
            if self.weighted_sum is not None:
                self.kept.append(Kept(slots, factors))
        self._num_alike = 0

    def _sum_kept(self, slot: Slot, factors: Sequence[Factors]) -> None:
        if self.weighted_sum is None:
            return
        for each in factors:
            if self.weighted_sum.sums.keeps_factors:
                self.kept.append(Kept([slot], each))
            else:
                self.weighted_sum.add_factors(slot, each)

    def _measure_reduced(self, slot: Slot, uses: Sequence[_Layer]) -> None:
        part, norms = Part(slot, uses[0].matrix), []
        for samples in self._chunks(part.shape.numel()):
            gradients = uses[0].gradients(samples).flatten(1)
            for use in uses[1:]:
                gradients = gradients + use.gradients(samples).flatten(1)
            if _is_small(slot) and len(self.squared_norms) * gradients.shape[1] <= self._most / 8:
                self._gather(part, gradients)
            else:
                self._add([part], gradients, samples)
                norms.append(torch.linalg.vector_norm(gradients, dim=1))
        if norms:
            self._norms.append(concatenated(norms)[None])

    def _gather(self, part: Part, gradients: Tensor) -> None:
        """Let the gradients of a small part [batch, elements] wait for others."""
        last = self._gathered[-1][1] if self._gathered else gradients
        is_full = self._num_gathered + gradients.numel() > self._most
        if is_full or last.dtype != gradients.dtype:
            self._take_gathered()
        self._gathered.append((part, gradients))
        self._num_gathered += gradients.numel()

    def _take_gathered(self) -> None:
        if not self._gathered:
            return
        parts = [part for part, _ in self._gathered]
        gradients = concatenated([each for _, each in self._gathered], dim=1)
        self._add(parts, gradients, slice(0, len(gradients)))
        # A norm of many parts keeps the digits that it has as a sum of their squares.
        norms: Tensor = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        self._norms.append(norms[None])
        self._gathered.clear()
        self._num_gathered = 0

    def _add(self, parts: Sequence[Part], gradients: Tensor, samples: slice) -> None:
        if self.weighted_sum is not None:
            self.weighted_sum.add_samples(parts, gradients, samples)


def is_kept_cheaper(slot: Slot, factors: Sequence[Factors]) -> bool:
    """Return whether products of tokens cost less than forming each trajectory's gradient."""
    if all(each.is_one_hot for each in factors):
        return True
    num_rows, num_columns = slot.shape[-2:]
    tokens = sum([each.columns.shape[1] for each in factors])
    device = factors[0].columns.device.type
    touch = _FLOPS_PER_TOUCH.get(device, _FLOPS_PER_TOUCH["cuda"])
    return tokens**2 * (num_rows + num_columns) <= _TOUCHES * touch * num_rows * num_columns


def _is_small(slot: Slot) -> bool:
    return slot.shape.numel() <= _SMALL_ELEMENTS


def _stacks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        yield torch.cat([each for each in tensors if each.dtype is dtype])
