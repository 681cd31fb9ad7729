"""Checks of requests before they reach an engine."""

from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedModel

from vcpo.service.vocabulary import num_tokens
from vcpo_rollout.engines.engine import (
    GenerationRequest,
    InvalidRequestError,
    PromptTooLongError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a model; a request beyond them could end the whole batch."""

    vocabulary_size: int
    context_tokens: int | None
    """Longest prompt and response together; None when nothing names a limit."""

    @classmethod
    def of(cls, model: PreTrainedModel, max_model_len: int | None = None) -> Self:
        """Return the limits in a model's configuration, with a shorter context if one is given."""
        config = model.config.get_text_config(decoder=True)
        contexts = getattr(config, "max_position_embeddings", None), max_model_len
        return cls(
            vocabulary_size=num_tokens(model),
            context_tokens=min((each for each in contexts if each is not None), default=None),
        )

    def check(self, request: GenerationRequest) -> None:
        """Check a request.

        Raises:
            PromptTooLongError: if prompt and response do not fit into the context.
            InvalidRequestError: naming the first field that is wrong.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError(
                "prompt_token_ids: empty; the prompt needs at least one token"
            )
        if min(prompt) < 0 or max(prompt) >= self.vocabulary_size:
            raise InvalidRequestError(
                f"prompt_token_ids: {min(prompt)} to {max(prompt)} are not all tokens of the model "
                f"(0 to {self.vocabulary_size - 1}); use the model's own tokenizer"
            )
        num_tokens = len(prompt) + request.max_new_tokens
        if self.context_tokens is not None and num_tokens > self.context_tokens:
            raise PromptTooLongError(
                f"max_new_tokens: {request.max_new_tokens} after a prompt of {len(prompt)} exceeds "
                f"the model's context of {self.context_tokens} tokens; "
                "lower spec.sampling.maxNewTokens or shorten the prompts"
            )
