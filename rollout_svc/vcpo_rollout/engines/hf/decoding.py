"""Continuous batching, one decoding step at a time: sequences join, grow by a token, and leave.

`DecodeBatch` is synchronous and knows neither threads nor clocks. Its caller (the thread of
`HfEngine`, or a test) decides when sequences join and when weights change. Invariant between calls:
row i of the logits is the prediction of the weights in use after sequence i. One policy version
therefore samples, scores and labels each token.

    admit        step                 step                      swap            step
    prefill ->   draw, drop, extend   draw, drop, extend   ->   prefill all ->  draw, ...

The engine pads sequences on the left and keeps what the model's own cache keeps. A model with
another state, whose state sees the padding, or that counts positions by itself, would be sampled
from another distribution than its own, without any error. Families do not tell: some take a cache
that they do not read. So the first weights decode a few tokens in both ways (`require_decodable`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vcpo.algo.agreement import is_rounding
from vcpo.service.lifecycle import StartError
from vcpo.service.vocabulary import Vocabulary, vocabulary_of
from vcpo.wire.trajectory import FinishReason, PartialResponse, VersionSpan
from vcpo_rollout.engines.engine import (
    EngineError,
    Generation,
    GenerationRequest,
    NonFiniteLogitsError,
)
from vcpo_rollout.engines.hf.cache import DecodingCache
from vcpo_rollout.engines.hf.routes import RouteRecorder, packed_routes
from vcpo_rollout.engines.hf.time_steps import clamp_time_steps
from vcpo_rollout.engines.loading_weights import StagedWeights, copy_weights
from vcpo_rollout.engines.seeds import token_seed
from vcpo_rollout.engines.stop_strings import StopStrings

_PROMPTS: Final[tuple[tuple[int, ...], ...]] = ((7, 9, 4), (5, 3, 8, 6, 2, 9, 4, 7), (2,))
_RESPONSES: Final = ((5, 6, 8, 3, 9), (9, 4, 3, 2, 6), (7, 8, 5))
"""Sequences by which a model is checked."""


@dataclass(slots=True, kw_only=True, eq=False)
class PartialSequence:
    """A sequence that is being sampled; compared by identity.

    It starts with the tokens of its request's `partial_response`.
    """

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    """The tokens sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """The log-probability of each sampled token, after temperature."""
    labels: list[tuple[int, int]] = field(default_factory=list)
    """The version that sampled each token, and by how many versions the keys that it read may be
    older, as another engine kept them (`VersionSpan.key_age_versions`)."""
    routes: list[Tensor] = field(default_factory=list)
    """The experts of the tokens that were read, in order; [tokens, layers, choices] each."""

    def __post_init__(self) -> None:
        if (partial_response := self.request.partial_response) is not None:
            self.token_ids += partial_response.token_ids
            self.logprobs += partial_response.logprobs
            for span in partial_response.version_spans:
                label = (span.policy_version, span.key_age_versions)
                self.labels += [label] * span.num_tokens

    @property
    def context(self) -> list[int]:
        return [*self.request.prompt_token_ids, *self.token_ids]

    @property
    def next_seed(self) -> int | None:
        if self.request.seed is None:
            return None
        num_tokens = len(self.request.prompt_token_ids) + len(self.token_ids)
        return token_seed(self.request.seed, num_tokens)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        return tuple(
            VersionSpan(
                policy_version=version, num_tokens=len(list(tokens)), key_age_versions=key_age
            )
            for (version, key_age), tokens in groupby(self.labels)
        )

    def to_generation(self, finish_reason: FinishReason) -> Generation:
        """Return the finished sequence."""
        return Generation(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=self.version_spans,
            finish_reason=finish_reason,
            expert_routes=packed_routes(self.routes),
        )

    def read_again(self, routes: Tensor) -> None:
        """Take the experts of the tokens so far, which the policy after a swap has read.

        Tokens before the last one keep those by which the token after each was sampled.
        """
        self.routes[-1] = torch.cat([self.routes[-1][:-1], routes[-1:]])

    def to_partial_response(self) -> PartialResponse | None:
        """Return the sequence so far; None before its first token."""
        if not self.token_ids:
            return None
        return PartialResponse(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            version_spans=self.version_spans,
        )


Outcome = Generation | EngineError
"""How a sequence ended."""


class DecodeBatch:
    """Sequences that one model decodes together. It owns the model and its parameters.

    A request with a seed of its own samples the same tokens in any batch. Without one, two batches
    with the same seed and the same calls sample the same tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_token_ids: frozenset[int],
        pad_token_id: int,
        seed: int,
        stop_strings: StopStrings | None = None,
        routes: RouteRecorder | None = None,
    ) -> None:
        """routes: of the model; None if nobody wants them."""
        self._model = model.train(mode=False)
        clamp_time_steps(model)
        self._end_token_ids = end_token_ids
        self._stop_strings = stop_strings
        self._pad_token_id = pad_token_id
        self._cache = DecodingCache(model, pad_token_id=pad_token_id, recorder=routes)
        self._vocabulary = vocabulary_of(model)
        self._generator = torch.Generator().manual_seed(seed)
        self._sequences: list[PartialSequence] = []
        self._logits: Tensor | None = None
        self._policy_version: int | None = None

    @property
    def policy_version(self) -> int | None:
        return self._policy_version

    @property
    def sequences(self) -> tuple[PartialSequence, ...]:
        return tuple(self._sequences)

    @torch.inference_mode()
    def admit(self, sequences: Sequence[PartialSequence]) -> None:
        """Add sequences; they get their next token in the next step."""
        if self._policy_version is None:
            raise EngineError("no weights yet: nothing can be generated before the first swap")
        if sequences:
            logits = self._cache.join([sequence.context for sequence in sequences])
            self._logits = logits if self._logits is None else torch.cat((self._logits, logits))
            self._sequences += sequences
            for sequence, routes in self._cache.newest_routes_of(sequences):
                sequence.routes.append(routes)

    @torch.inference_mode()
    def step(self) -> Mapping[PartialSequence, Outcome]:
        """Sample one token per sequence; remove and return the sequences that ended.

        A sequence whose logits are not finite ends with a NonFiniteLogitsError; the others go on.
        """
        if self._logits is None or self._policy_version is None:
            return {}
        temperatures = [sequence.request.temperature for sequence in self._sequences]
        seeds = [sequence.next_seed for sequence in self._sequences]
        logits = logits_of_tokens(self._logits, self._vocabulary)
        token_ids, logprobs = sample_tokens(logits, temperatures, seeds, self._generator)
        ended: dict[PartialSequence, Outcome] = {}
        for sequence, token_id, logprob in zip(self._sequences, token_ids, logprobs, strict=True):
            outcome = self._record(sequence, token_id, logprob, self._policy_version)
            if outcome is not None:
                ended[sequence] = outcome
        self._remove(ended.keys())
        if self._sequences:
            self._logits = self._cache.extend(
                [sequence.token_ids[-1] for sequence in self._sequences]
            )
            for sequence, routes in self._cache.newest_routes_of(self._sequences):
                sequence.routes.append(routes)
        return ended

    @torch.inference_mode()
    def drop(self, sequences: Sequence[PartialSequence]) -> None:
        self._remove(sequences)

    @torch.inference_mode()
    def swap(self, policy_version: int, weights: StagedWeights) -> None:
        """Copy new weights into the model; all sequences continue with them.

        weights: the result of `stage_weights` for this model and the version in use.
        """
        copy_weights(self._model, weights)
        if self._policy_version is None:
            require_decodable(self._model, self._pad_token_id)
        self._policy_version = policy_version
        self._cache.clear()
        if self._sequences:
            self._logits = self._cache.join([sequence.context for sequence in self._sequences])
            for sequence, routes in self._cache.newest_routes_of(self._sequences):
                sequence.read_again(routes)

    def _record(
        self, sequence: PartialSequence, token_id: int, logprob: float, policy_version: int
    ) -> Outcome | None:
        """Append a token; return how the sequence ended, or None if it continues."""
        if not math.isfinite(logprob):
            return NonFiniteLogitsError(
                f"policy version {policy_version} gives logits that are not finite after "
                f"{len(sequence.context)} tokens; look at the learner's last steps"
            )
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        sequence.labels.append((policy_version, 0))
        stops = self._stop_strings
        if token_id in self._end_token_ids or (
            stops is not None and stops.completed_by_last(sequence.token_ids)
        ):
            return sequence.to_generation(FinishReason.STOP)
        if len(sequence.token_ids) >= sequence.request.max_new_tokens:
            return sequence.to_generation(FinishReason.LENGTH)
        return None

    def _remove(self, sequences: Collection[PartialSequence]) -> None:
        removed = {row for row, sequence in enumerate(self._sequences) if sequence in sequences}
        if removed:
            order = self._cache.remove(removed)
            self._sequences = [self._sequences[row] for row in order]
            self._logits = self._logits[order] if order and self._logits is not None else None


def logits_of_tokens(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Return the logits that a softmax may see, of those of all rows of the head.

    logits: [rows, vocab]; the columns of holes are overwritten.
    vocabulary: None if every row is a token.
    """
    if vocabulary is None:
        return logits
    if vocabulary.holes:
        logits[:, list(vocabulary.holes)] = -math.inf
    return logits[:, : vocabulary.num_tokens]


def sample_tokens(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int | None],
    generator: torch.Generator,
) -> tuple[list[int], list[float]]:
    """Draw one token per row from softmax(logits / temperature), over all columns.

    logits: [rows, tokens], any float type; logarithms are of float32.
    seeds: of each row's draw, 63 bits; a row without one draws from `generator`, of the CPU.

    Returns: token ids, and the natural logarithms of the probabilities they were drawn with. A
        log-probability is not finite where the logits are not.

    The draw inverts the distribution function (Devroye 1986, "Non-Uniform Random Variate
    Generation", III.2): the first token at which the sum of the probabilities exceeds a uniform
    number of 53 bits. The probabilities are those of the returned logarithms, summed in float64;
    one of 0 does not raise the sum, so its token is never drawn.
    """
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)[:, None]
    logprobs = torch.log_softmax((logits / scale).float(), dim=-1)
    sums = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    fresh = torch.rand(len(seeds), dtype=torch.float64, generator=generator).tolist()
    uniform = [
        number if seed is None else (seed >> 10) / 2**53
        for seed, number in zip(seeds, fresh, strict=True)
    ]
    drawn = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None]
    # Each has 53 bits and is below 1, so its product with the sum of all never rounds to that sum.
    reached = drawn * sums[:, -1:]
    token_ids = torch.searchsorted(sums, reached, right=True)
    # A row that has no number has no place either: any token shows that its logarithms are none.
    token_ids = token_ids.clamp(max=logits.shape[-1] - 1)
    return token_ids[:, 0].tolist(), logprobs.gather(1, token_ids)[:, 0].tolist()


@torch.inference_mode()
def require_decodable(model: PreTrainedModel, pad_token_id: int) -> None:
    """Check that a model's log-probabilities are those of its sequences alone.

    The check takes about ten forward passes of a few tokens. Weights whose numbers are not finite
    say nothing, and pass.
    """
    family = model.config.model_type
    fix = "use `engine: vllm` if it has the family, or another model"
    try:
        padded, cached, size = _gaps(model, pad_token_id)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # a model's own code runs there
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StartError(
            f"spec.model.name: engine hf cannot decode models of family {family} ({reason}); {fix}"
        ) from error
    gap, is_half = max(padded, cached), model.dtype.itemsize == 2
    if math.isfinite(size) and not is_rounding(gap, size, is_half=is_half):
        raise StartError(
            f"spec.model.name: engine hf would sample wrongly from a model of family {family}: its"
            f" log-probabilities of a sequence alone differ by {padded:.2g} nats from those beside"
            f" a longer one, and by {cached:.2g} nats from those of token after token; {fix}"
        )


def _gaps(model: PreTrainedModel, pad_token_id: int) -> tuple[float, float, float]:
    """Root mean squares, nats: of both gaps, and of the log-probabilities of sequences alone."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    cache = DecodingCache(model, pad_token_id=pad_token_id)
    first, longest, last = _PROMPTS
    if chunk := cache.chunk_tokens:
        # One prompt passes a chunk, and a response begins where one ends: states pass in two ways.
        longest, last = longest * (chunk // 8 + 1), (longest * chunk)[:chunk]
    prompts, responses = (
        [[token % vocabulary for token in row] for row in rows]
        for rows in ((first, longest, last), _RESPONSES)
    )
    alone = [
        _alone(model, [*prompt, *response])[len(prompt) - 1 :]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    num_read = [0, 0, 0]

    def gap(rows: Sequence[int], logits: Tensor) -> Tensor:
        expected = torch.stack([alone[row][num_read[row]] for row in rows])
        return (_logprobs(logits) - expected).flatten()

    def extend_rows(rows: Sequence[int]) -> Tensor:
        logits = cache.extend([responses[row][num_read[row]] for row in rows])
        for row in rows:
            num_read[row] += 1
        return gap(rows, logits)

    padded = gap([0, 1], cache.join(prompts[:2]))
    cached = [extend_rows([0, 1]), extend_rows([0, 1])]
    cached += [gap([2], cache.join(prompts[2:])), extend_rows([0, 1, 2])]
    # The longest leaves, and the padding of the others shrinks.
    cached.append(extend_rows([[0, 1, 2][row] for row in cache.remove({1})]))
    size = torch.cat([row.flatten() for row in alone])
    return _root_mean_square(padded), _root_mean_square(torch.cat(cached)), _root_mean_square(size)


def _alone(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    tokens = torch.tensor([token_ids], device=model.device)
    return _logprobs(model(input_ids=tokens, use_cache=False).logits[0])


def _logprobs(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1)


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
