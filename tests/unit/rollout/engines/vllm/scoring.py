"""What a generation's log-probabilities are compared with."""

import pytest
import torch
from transformers import DynamicCache

from tests.fixtures.rollout.models import forward_logprobs

TOLERANCE = 1e-4


def assert_scored_by_its_versions(generation, request, models):
    """Every span's log-probabilities are those of a full forward of the version it names."""
    first = 0
    for span in generation.version_spans:
        last = first + span.num_tokens
        expected = forward_logprobs(
            models[span.policy_version],
            request.prompt_token_ids,
            generation.token_ids[:last],
            request.temperature,
        )
        assert generation.logprobs[first:last] == pytest.approx(expected[first:], abs=TOLERANCE)
        first = last
    assert first == len(generation.token_ids)


@torch.no_grad()
def assert_scored_with_kept_keys(generation, request, models):
    """Every span's log-probabilities are its version's, over keys that earlier spans' left.

    A token's keys come with the step that samples the next one, so the last token before a new
    version is read by that version.
    """
    prompt = request.prompt_token_ids
    tokens = [*prompt, *generation.token_ids]
    cache, read, first = DynamicCache(), 0, 0
    for span in generation.version_spans:
        last = first + span.num_tokens
        until = len(prompt) + last - 1
        new = torch.tensor([tokens[read:until]])
        logits = models[span.policy_version](input_ids=new, past_key_values=cache).logits[0]
        scored = (logits[-span.num_tokens :] / request.temperature).log_softmax(dim=-1)
        found = torch.tensor(generation.logprobs[first:last])
        sampled = torch.tensor(generation.token_ids[first:last])
        expected = scored.gather(1, sampled[:, None])[:, 0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0.0)
        read, first = until, last
    assert first == len(generation.token_ids)
