"""What a generation's log-probabilities are compared with."""

import pytest

TOLERANCE = 1e-4


def assert_scored_by_its_versions(generation, request, models, reference_logprobs):
    """Every span's log-probabilities are those of a full forward of the version it names."""
    first = 0
    for span in generation.version_spans:
        last = first + span.num_tokens
        expected = reference_logprobs(
            models[span.policy_version],
            request.prompt_token_ids,
            generation.token_ids[:last],
            request.temperature,
        )
        assert generation.logprobs[first:last] == pytest.approx(expected[first:], abs=TOLERANCE)
        first = last
    assert first == len(generation.token_ids)
