"""The compared steps train alike, and the summary names the worst size."""

import torch

from benchmarks.harness.group_tokens import tokens_of
from benchmarks.harness.random_llama import shorten
from benchmarks.learner_step.__main__ import cell, measure, summary
from benchmarks.learner_step.batch import QUICK_SIZES, make_groups, make_model
from benchmarks.learner_step.sides import LearnerStep, PlainStep, Side

SIZE = QUICK_SIZES["128x32"]


def test_the_plain_step_moves_the_parameters_as_the_learners_step_with_the_groups_mean():
    groups, before = make_groups(SIZE), list(make_model(SIZE).parameters())
    moved = []
    for step in (PlainStep(SIZE), LearnerStep(SIZE, "sequenceTis")):
        step.take(groups)
        rows = zip(step.model.parameters(), before, strict=True)
        moved.append(torch.cat([(now - was).detach().flatten() for now, was in rows]))
    assert float(moved[0].norm()) > 0.0
    # AdamW moves every parameter by about 1e-6, of which float32 keeps two digits.
    assert float((moved[0] - moved[1]).norm() / moved[0].norm()) < 0.02


def test_the_rollout_log_probabilities_of_a_batch_are_those_of_its_model():
    groups, model = make_groups(SIZE), make_model(SIZE)
    batch = tokens_of(groups)
    with torch.no_grad():
        logprobs = model(batch.input_ids).logits.log_softmax(dim=-1)
    first = batch.num_prompt_tokens
    expected = logprobs[:, first - 1 : -1].gather(2, batch.input_ids[:, first:, None])[..., 0]
    torch.testing.assert_close(batch.rollout_logprobs, expected)


def test_a_shortened_trajectory_has_the_first_tokens_of_its_response():
    one = make_groups(SIZE)[0][0]
    short = shorten(one, 3)
    assert list(short.response_token_ids) == list(one.response_token_ids)[:3]
    assert len(short.rollout_logprobs) == sum(each.num_tokens for each in short.version_spans) == 3


def test_every_side_runs_in_a_process_of_its_own():
    sides = [Side.PLAIN, Side.MEAN, Side.OPOB]
    found = measure("128x32", SIZE, sides, repeats=1)
    assert list(found["tokens_per_s"]) == list(found["peak_mib"]) == sides
    assert found["ratio_vs_plain"] > 0.0
    assert found["ratio_vs_trl"] is None


def test_the_summary_has_the_worst_size_and_the_memory_of_large_vocabularies():
    # 64 tokens in 1 s and in 2 s: half as fast. Memory: 3 of 4 bytes.
    small = cell(SIZE, {Side.PLAIN: [1.0], Side.OPOB: [2.0]}, {Side.PLAIN: 4, Side.OPOB: 8})
    large = small | {
        "vocabulary": 131_072,
        "ratio_vs_plain": 0.9,
        "peak_memory_ratio_vs_plain": 0.75,
    }
    found = summary({"small": small, "large": large})
    assert small["tokens_per_s"] == {Side.PLAIN: 64.0, Side.OPOB: 32.0}
    assert found["ratio_vs_plain_min"] == 0.5
    assert found["peak_memory_ratio_vs_plain_max"] == 0.75
    assert found["ratio_vs_trl_min"] is None
