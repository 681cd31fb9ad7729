"""Behavior policies with numerics close to the learner's are accepted; mistakes are detected."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from research.cells.sampling import Sampler
from research.cells.versions import Version, policy_tensors
from tests.fixtures.families import ORIGINAL, family
from vcpo.algo.health.mismatch_review import MISMATCH_LIMITS_NATS, MismatchClass
from vcpo.api import load_run
from vcpo.api.workloads import Precision, Quantization, RolloutNoise
from vcpo.wire.trajectory import FinishReason
from vcpo_learner.model.loading import load_policy, pad_token_id
from vcpo_learner.update.policy_update import PolicyUpdate
from vcpo_rollout.engines.engine import GenerationRequest
from vcpo_rollout.engines.hf.decoding import DecodeBatch, PartialSequence
from vcpo_rollout.engines.loading import load_model_skeleton
from vcpo_rollout.environments import Split, make_environment
from vcpo_rollout.weights.postprocess import NoiseSchedule, QuantizationAndNoise

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = str(EXAMPLES / "models" / "tiny")
ALTERED = MISMATCH_LIMITS_NATS[MismatchClass.QUANTIZED_OR_NOISY]
HALF = Precision.BFLOAT16
NOISE = NoiseSchedule(initial_sigma=0.05, final_sigma=0.05, num_stages=3, total_steps=3)
GIVEN_NOISE = RolloutNoise(initialSigma=0.05, finalSigma=0.05, stages=3)
"""The same as a run's file has it."""


class Bench:
    """A learner of the tiny model, and a behavior policy of the same version that may differ."""

    def __init__(self, *stop_strings, **group):
        """Take the tiny model and a rollout group with these settings."""
        torch.manual_seed(0)
        spec = load_run(EXAMPLES / "sort_digits.yaml").spec
        sampling = spec.sampling.model_copy(update={"stop_strings": stop_strings})
        rollouts = (spec.rollouts[0].model_copy(update=group),)
        self.spec = spec.model_copy(update={"sampling": sampling, "rollouts": rollouts})
        self.model, self.tokenizer = load_policy(TINY, None)
        tokenizer = self.tokenizer
        pad = pad_token_id(tokenizer)
        self.update = PolicyUpdate(self.model, self.spec, pad)
        self.sampler = Sampler(self.spec, TINY, tokenizer, pad)
        task = self.spec.environment
        self.environment = make_environment(task.name, task.parameters, 0)
        self.version = 0

    def groups(self, transform=None, *, temperature=1.0):
        """Fresh trajectories of the version, as the behavior policy samples them."""
        weights = policy_tensors(self.model)
        if transform is not None:
            weights = transform(weights, 1)
        self.sampler.use(Version(number=self.version, weights=weights))
        indices = range(8 * self.version, 8 * self.version + 8)
        prompts = self.sampler.prompts(self.environment, Split.TRAIN, indices)
        return self.sampler.groups(self.environment, prompts, samples=8, temperature=temperature)

    def step(self, transform=None, *, temperature=1.0):
        """One step on fresh trajectories of the version."""
        groups = self.groups(transform, temperature=temperature)
        result = self.update.step(groups, policy_version=self.version)
        self.version += 1
        return result


def quantize_and_noise(quantization=Quantization.NONE, noise=None):
    return QuantizationAndNoise(quantization=quantization, noise=noise, seed=0)


def test_engine_and_learner_agree_to_float32():
    found = Bench().step().mismatch
    assert found.gap_nats < 1e-5 < found.limit_nats
    assert not found.is_exceeded


@pytest.mark.parametrize("kind", ["phi3 longrope", "phimoe longrope"])
def test_answers_that_cross_the_length_of_pretraining_have_the_learners_numbers(kind, tmp_path):
    family(kind).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(tmp_path)
    learner, _ = load_policy(str(tmp_path), None)
    batch = DecodeBatch(
        load_model_skeleton(str(tmp_path)), end_token_ids=frozenset(), pad_token_id=0, seed=0
    )
    batch.swap(1, policy_tensors(learner))
    requests = [
        GenerationRequest(
            prompt_token_ids=(5, 6, 7)[:tokens], temperature=1.0, max_new_tokens=ORIGINAL + 8
        )
        for tokens in (1, 3)
    ]
    batch.admit([PartialSequence(request=each) for each in requests])
    found = [batch.step() for _ in range(ORIGINAL + 8)][-1]
    for sequence in found:
        tokens = torch.tensor([sequence.context])
        with torch.no_grad():
            logits = learner(input_ids=tokens, use_cache=False).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        sampled = own[-len(sequence.token_ids) :]
        torch.testing.assert_close(torch.tensor(sequence.logprobs), sampled, rtol=0, atol=1e-4)
    assert len(found) == len(requests)


def test_responses_that_a_stop_string_ended_weigh_one_without_lag():
    strings = ("12", "34", "7")
    bench = Bench(*strings)
    groups = bench.groups()
    responses = [each for group in groups for each in group]
    texts = [bench.tokenizer.decode(each.response_token_ids) for each in responses]
    stopped = [
        each
        for each, text in zip(responses, texts, strict=True)
        if any(string in text for string in strings)
    ]
    assert 0 < len(stopped) < len(responses)
    assert {each.finish_reason for each in stopped} == {FinishReason.STOP}
    result = bench.update.step(groups, policy_version=0)
    # Of whole responses: sums over their tokens, the last one too, in float32.
    assert result.log_weights == pytest.approx([0.0] * len(responses), abs=1e-4)
    assert {len(each.rollout_logprobs) - len(each.response_token_ids) for each in stopped} == {0}


def test_a_behavior_policy_at_another_temperature_is_detected_even_beside_bfloat16():
    found = Bench(precision=HALF).step(temperature=0.7).mismatch
    assert found.is_exceeded
    assert "temperature" in found.message


def rounded(weights, _):
    return {name: each.bfloat16().float() for name, each in weights.items()}


def test_weights_rounded_to_bfloat16_are_no_float32():
    found = Bench().step(rounded).mismatch
    assert found.is_exceeded
    expected = Bench(precision=HALF).step(rounded).mismatch
    # A sampler in bfloat16 rounds activations too, and that is expected of it.
    assert not expected.is_exceeded
    assert expected.gap_nats > found.gap_nats


def test_a_behavior_policy_of_another_model_is_detected_whatever_the_format():
    found = Bench(quantization=Quantization.FP8).step(
        lambda weights, _: {name: torch.randn_like(each) / 8 for name, each in weights.items()}
    )
    assert (found.mismatch.is_exceeded, found.mismatch.limit_nats) == (True, ALTERED)


@pytest.mark.parametrize(
    ("transform", "settings"),
    [
        (quantize_and_noise(Quantization.FP8), {"quantization": Quantization.FP8}),
        (quantize_and_noise(Quantization.INT8), {"quantization": Quantization.INT8}),
        (quantize_and_noise(noise=NOISE), {"noise": GIVEN_NOISE}),
    ],
    ids=["fp8", "int8", "noise"],
)
def test_quantization_and_noise_of_a_spec_are_no_mistake_and_no_staleness(transform, settings):
    bench = Bench(**settings)
    results = [bench.step(transform) for _ in range(6)]
    assert results[0].mismatch.gap_nats > MISMATCH_LIMITS_NATS[MismatchClass.EXACT]
    assert not any(each.mismatch.is_exceeded for each in results)
    last = results[-1]
    # Mismatch costs part of the sample size, and the rate is not cut for it.
    assert last.on_policy_ess_ratio < 0.9999
    assert last.learning_rate_scale > 0.95
