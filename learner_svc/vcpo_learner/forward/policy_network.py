"""The model as training sees it: from a batch of tokens to numbers of its trained tokens.

The decoder gives hidden states. Those that predict a trained token go through the output head tile
by tile, so there are no logits of prompts, padding or whole responses. A model whose head is of no
known kind computes full logits, and so does a small one: for it tiles cost more than they save.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vcpo.service.vocabulary import vocabulary_of
from vcpo_learner.forward.fused_layers import difference
from vcpo_learner.forward.packed_rows import unpacked_mixers
from vcpo_learner.forward.router_replay import replayed_routes
from vcpo_learner.forward.token_batch import TokenBatch
from vcpo_learner.output_head.logit_tiles import LogitForm, TokenRows
from vcpo_learner.output_head.recorded_head import RecordedHead
from vcpo_learner.output_head.tiled_head import (
    HeadRequest,
    TokenScores,
    apply_head,
)
from vcpo_learner.per_sample_gradients.taps import active_recording

_LOGGER = logging.getLogger(__name__)

SMALL_LOGITS: Final = {"cpu": 1 << 23, "cuda": 1 << 24}
"""Numbers of logits up to which all of them are computed at once: 32 and 64 MiB in float32. On a
CPU, tiles are no faster below."""


class Wanted(NamedTuple):
    """What a pass computes; a model's last hidden states if no scores are wanted."""

    scores: bool = True
    temperature: float = 1.0
    """Above 0; of the distributions that tokens were drawn from."""
    entropies: bool = False
    tiles: bool | None = None
    """Whether the head is tiled; None decides by the number of logits."""


class NetworkOutput(NamedTuple):
    """What was wanted; a tuple, because FSDP looks for tensors in tuples only."""

    scores: TokenScores | None = None
    states: Tensor | None = None
    """[rows, tokens, hidden], in the layout that the model is given."""


class PolicyNetwork(nn.Module):
    """A causal language model of transformers, in evaluation mode, and its output head.

    It is the outermost module, the one to shard last: its forward runs with the parameters of
    embedding, norm and head gathered. It has no parameters of its own, and computes full logits
    until `compare_head` has found that tiles give the same numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._known = model_head(model)
        self._head: ModelHead | None = None

    @classmethod
    def of(cls, model: nn.Module) -> PolicyNetwork:
        return model if isinstance(model, cls) else cls(model)

    @property
    def is_tiled(self) -> bool:
        return self._head is not None

    def has_tiles(self, batch: TokenBatch) -> bool:
        """Return whether the logits of a batch are computed tile by tile."""
        if self._head is None:
            return False
        num_logits = batch.input_ids.numel() * self._head.linear.out_features
        return num_logits > SMALL_LOGITS.get(batch.input_ids.device.type, SMALL_LOGITS["cuda"])

    def score(self, batch: TokenBatch, wanted: Wanted) -> TokenScores:
        """Return numbers of the trained tokens, one trajectory after another."""
        scores: TokenScores | None = self(batch, wanted).scores
        assert scores is not None
        return scores

    def last_states(self, batch: TokenBatch) -> Tensor:
        """Return the last hidden states, [rows, tokens, hidden], in the model's layout."""
        states: Tensor | None = self(batch, Wanted(scores=False)).states
        assert states is not None
        return states

    def forward(self, batch: TokenBatch, wanted: Wanted) -> NetworkOutput:
        routes = replayed_routes(self.model, model_routes(batch))
        with routes, unpacked_mixers(self.model, batch.row):
            return self._output(batch, wanted)

    def _output(self, batch: TokenBatch, wanted: Wanted) -> NetworkOutput:
        if not wanted.scores:
            found = self.model(**model_inputs(batch), output_hidden_states=True)
            return NetworkOutput(states=found.hidden_states[-1])
        tiles = self.has_tiles(batch) if wanted.tiles is None else wanted.tiles
        if tiles and self._known is not None:
            return NetworkOutput(scores=_tiled_scores(self._known, batch, wanted, self._rows))
        return NetworkOutput(scores=_full_scores(self.model, batch, wanted, self._rows))

    @cached_property
    def _rows(self) -> TokenRows | None:
        """The rows of the head that are tokens; None if all are."""
        vocabulary = vocabulary_of(self.model)
        if vocabulary is None:
            return None
        is_hole = None
        if vocabulary.holes:
            device = next(self.model.parameters()).device
            is_hole = torch.zeros(vocabulary.num_tokens, dtype=torch.bool, device=device)
            is_hole[list(vocabulary.holes)] = True
        return TokenRows(count=vocabulary.num_tokens, is_hole=is_hole)

    @torch.no_grad()
    def compare_head(self) -> None:
        """Use tiles from now on, if they give the numbers of the model's own logits.

        A warning says so if they do not; the numbers are then right, and take more memory.
        """
        reason = "its output head is of no known kind"
        if self._known is not None:
            self._known = replace(self._known, is_fused=self._are_kernels_right(self._known.form))
            reason = self._difference()
        self._head = None if reason else self._known
        if not reason:
            return
        _LOGGER.warning(
            "%s: full logits are computed, [tokens, vocabulary] numbers at once: %s",
            type(self.model).__name__,
            reason,
        )

    def _are_kernels_right(self, form: LogitForm) -> bool:
        """Return whether a tile's functions may be kernels; say why if they may not."""
        like = next(self.model.parameters())
        ways = [partial(_made_up_scores, form, each) for each in (False, True)]
        is_half = _autocast_dtype(like.device) is not None
        if reason := difference(ways, [(5, 16), (7, 16)], like, is_half=is_half):
            _LOGGER.info("output head: no kernels of its tiles (%s)", reason)
        return not reason

    def _difference(self) -> str:
        """What is wrong with tiles on a few tokens; empty if nothing is."""
        batch = _few_tokens(next(self.model.parameters()).device)
        full = self.score(batch, Wanted(entropies=True, tiles=False))
        try:
            tiled = self.score(batch, Wanted(entropies=True, tiles=True))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a model's own code runs there
            return f"its decoder does not run alone ({error})"
        assert full.entropies is not None
        assert tiled.entropies is not None
        distance = torch.stack([tiled.logprobs - full.logprobs, tiled.entropies - full.entropies])
        largest = float(distance.abs().max())
        # A sharded model computes in another number type than it has.
        dtype = _autocast_dtype(distance.device) or self.last_states(batch).dtype
        # Full logits are rounded to it, by as much as they are large.
        rounding = 0.1 + 0.03 * float(full.logprobs.abs().mean())
        if largest <= (rounding if dtype.itemsize == 2 else 1e-3):
            return ""
        return f"with tiles, log-probabilities differ by {largest:.2g} nats"


def _tiled_scores(
    head: ModelHead, batch: TokenBatch, wanted: Wanted, rows: TokenRows | None
) -> TokenScores:
    states: Tensor = head.decoder(**model_inputs(batch)).last_hidden_state
    request = HeadRequest(
        targets=batch.input_ids[batch.response_mask],
        form=head.form,
        temperature=wanted.temperature,
        input_dtype=_autocast_dtype(states.device),
        rows=rows,
        entropies=wanted.entropies,
        observer=_recorded_head(head, batch),
        is_fused=head.is_fused,
    )
    hidden = states.flatten(0, 1).index_select(0, predicting_places(batch))
    return apply_head(hidden, head.linear.weight, head.linear.bias, request)


def _made_up_scores(form: LogitForm, is_fused: bool, hidden: Tensor, weight: Tensor) -> Tensor:
    request = HeadRequest(
        targets=torch.arange(len(hidden), device=hidden.device),
        form=form,
        temperature=0.7,
        input_dtype=_autocast_dtype(hidden.device),
        is_fused=is_fused,
    )
    return apply_head(hidden, weight, None, request).logprobs


def _recorded_head(head: ModelHead, batch: TokenBatch) -> RecordedHead | None:
    """An observer for the recording that runs, if it measures parameters of the head."""
    recording = active_recording()
    slots = {} if recording is None else recording.slots.of(head.linear)
    if recording is None or not slots:
        return None
    lengths = batch.response_mask.sum(dim=1).tolist()
    is_token = batch.attention_mask.bool()
    return RecordedHead(recording, slots, lengths, batch.input_ids, is_token)


def _full_scores(
    model: nn.Module, batch: TokenBatch, wanted: Wanted, rows: TokenRows | None
) -> TokenScores:
    logits: Tensor = model(**model_inputs(batch)).logits
    predictions = logits.flatten(0, 1).index_select(0, predicting_places(batch))
    predictions = predictions if rows is None else rows.of(predictions)
    precise = predictions.to(torch.promote_types(predictions.dtype, torch.float32))
    distributions = functional.log_softmax(precise / wanted.temperature, dim=-1)
    targets = batch.input_ids[batch.response_mask]
    # Not a view of it: FSDP hooks on to what a network returns.
    logprobs = distributions.gather(1, targets[:, None]).sum(dim=1)
    entropies = None
    if wanted.entropies:
        entropies = torch.special.entr(distributions.detach().exp()).sum(dim=-1)
    return TokenScores(logprobs=logprobs, entropies=entropies)


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _few_tokens(device: torch.device) -> TokenBatch:
    """Two trajectories of tokens that every vocabulary has."""
    input_ids = torch.tensor([[0, 1, 2, 1, 0], [2, 0, 1, 1, 0]], device=device)
    is_trained = torch.tensor([[False, True, True, True, True], [False, True, True, False, False]])
    is_token = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=is_token.to(device),
        response_mask=is_trained.to(device),
    )


def model_inputs(batch: TokenBatch) -> dict[str, Any]:
    """Return the arguments of a model's call."""
    if batch.row is None:
        return {
            # Padding is on the right, where causal attention does not look: no mask is needed.
            "input_ids": batch.input_ids,
            "position_ids": _positions(batch),
            "use_cache": False,
        }
    return {
        "input_ids": batch.row.pack(batch.input_ids),
        **batch.row.arguments,
        "use_cache": False,
    }


def model_routes(batch: TokenBatch) -> Tensor | None:
    """Return the experts of each token of the model's input, [tokens of all rows, layers, choices].

    None if the routers choose for themselves.
    """
    if batch.expert_routes is None:
        return None
    routes = batch.expert_routes
    return (routes if batch.row is None else batch.row.pack(routes)).flatten(0, 1)


def predicting_places(batch: TokenBatch) -> Tensor:
    """Return the places of the tokens before the trained ones, [sampled tokens] int64.

    A model's output there is its prediction. Places count through all rows of its input.
    """
    return _places(batch)[batch.response_mask] - 1


def _places(batch: TokenBatch) -> Tensor:
    """Index [batch, width] of each token in the model's flattened input."""
    if batch.row is not None:
        return batch.row.places
    return torch.arange(batch.input_ids.numel(), device=batch.input_ids.device).view_as(
        batch.input_ids
    )


def _positions(batch: TokenBatch) -> Tensor:
    """Positions [batch, width], one row per trajectory.

    Without them a model may share one row of positions among all trajectories; the gradient of a
    learned position embedding could then not be attributed to one of them.
    """
    width = batch.input_ids.shape[1]
    return torch.arange(width, device=batch.input_ids.device).expand_as(batch.input_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelHead:
    """A linear head on the last hidden states of a decoder."""

    decoder: nn.Module
    """Returns `.last_hidden_state` [rows, tokens, hidden]."""
    linear: nn.Linear
    form: LogitForm
    is_fused: bool = False
    """Whether a GPU computes each function of a tile in one kernel."""


def model_head(model: nn.Module) -> ModelHead | None:
    """Return a causal language model's head, or None if it is of no known kind.

    What its configuration does not say (a family that changes hidden states before the head) is not
    known here: compare its numbers with the model's own logits.
    """
    decoder = getattr(model, "base_model", None)
    named = getattr(model, "get_output_embeddings", None)
    linear = None if named is None else named()
    if not isinstance(decoder, nn.Module) or decoder is model:
        return None
    # An adapted or quantized layer has a forward of its own.
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return None
    return ModelHead(decoder=decoder, linear=linear, form=_form(model))


def _form(model: Any) -> LogitForm:
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = getattr(config, "logit_scale", None)  # Cohere
    softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
    scale = 1.0 if factor is None else float(factor)
    return LogitForm(scale=scale / float(divisor or 1.0), softcap=softcap)
