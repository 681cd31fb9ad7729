"""Quantized and noisy weights, computed by hand."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcpo.algo.rollout_noise import NoiseSchedule
from vcpo.api.workloads import Quantization
from vcpo_rollout.weights.quantize_and_noise import (
    QuantizationAndNoise,
    round_to_fp8,
    round_to_int8,
)

NOISE = NoiseSchedule(initial_sigma=0.1, final_sigma=0.01, num_stages=10, total_steps=10)
WEIGHTS = {
    "model.embed_tokens.weight": torch.randn(8, 4),
    "model.layers.0.self_attn.q_proj.weight": torch.randn(4, 4),
    "model.layers.0.self_attn.q_proj.bias": torch.randn(4),
    "model.layers.0.input_layernorm.weight": torch.ones(4096),
    "model.norm.weight": torch.ones(4096),
    "lm_head.weight": torch.randn(8, 4),
}
NORMS = {"model.layers.0.input_layernorm.weight", "model.norm.weight"}


def quantization_and_noise(*, quantization=Quantization.NONE, noise=None, seed=0):
    return QuantizationAndNoise(quantization=quantization, noise=noise, seed=seed)


def changed_tensors(altered):
    return {name for name, tensor in WEIGHTS.items() if not torch.equal(tensor, altered[name])}


def test_e4m3_keeps_three_bits_behind_the_first():
    # The largest is 448, so the scale is 1: between 16 and 32 numbers are 2 apart, ties to even.
    rounded = round_to_fp8(torch.tensor([[448.0, 17.0, 19.0, 18.9, -21.5, 0.3]]))
    assert rounded.tolist() == [[448.0, 16.0, 20.0, 18.0, -22.0, 0.3125]]


def test_every_block_of_128_by_128_has_its_own_scale():
    matrix = torch.zeros(130, 129)
    matrix[0, 0], matrix[0, 128], matrix[129, 0] = 448.0, 4.48, 0.0448
    matrix[1, 128] = 0.17
    rounded = round_to_fp8(matrix)
    assert rounded[[0, 0, 129], [0, 128, 0]].tolist() == pytest.approx([448.0, 4.48, 0.0448])
    # 0.17 is 17 at this block's scale, and becomes 16; at the first block's it would be 0.171875.
    assert float(rounded[1, 128]) == pytest.approx(0.16)


def test_int8_has_127_steps_to_the_largest_of_a_row():
    rounded = round_to_int8(torch.tensor([[1.27, 0.014, -0.016], [254.0, 1.9, 0.0]]))
    torch.testing.assert_close(rounded, torch.tensor([[1.27, 0.01, -0.02], [254.0, 2.0, 0.0]]))


@pytest.mark.parametrize("rounded", [round_to_fp8, round_to_int8])
def test_a_matrix_of_zeros_stays_one(rounded):
    assert not rounded(torch.zeros(3, 5)).any()


@given(st.integers(0, 99))
def test_numbers_move_by_no_more_than_half_a_step(seed):
    matrix = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    largest = matrix.abs().amax(dim=1, keepdim=True)
    assert ((round_to_int8(matrix) - matrix).abs() <= largest / 254 * (1 + 1e-5)).all()
    # Three bits: 1/16 of a number, or half the smallest step, 2^-10, at the scale amax / 448.
    slack = torch.maximum(matrix.abs() / 16, matrix.abs().max() / 448 * 2**-10)
    assert ((round_to_fp8(matrix) - matrix).abs() <= slack * (1 + 1e-5)).all()


@pytest.mark.parametrize("quantization", [Quantization.FP8, Quantization.INT8])
def test_matrices_are_rounded_and_embeddings_and_head_are_not(quantization):
    altered = quantization_and_noise(quantization=quantization)(WEIGHTS, 5)
    assert changed_tensors(altered) == {"model.layers.0.self_attn.q_proj.weight"}


def test_noise_is_on_the_weights_of_normalizations_with_the_stages_deviation():
    altered = quantization_and_noise(noise=NOISE)(WEIGHTS, 1)
    assert changed_tensors(altered) == NORMS
    # 8,192 draws: the deviation of their deviation is 0.1 / sqrt(2 * 8192), 0.8 %.
    added = torch.cat([altered[name] - 1.0 for name in sorted(NORMS)])
    assert float(added.std()) == pytest.approx(0.1, rel=0.04)
    assert float(added.mean()) == pytest.approx(0.0, abs=0.1 * 4 / math.sqrt(8192))


def test_the_first_stage_has_no_noise():
    assert changed_tensors(quantization_and_noise(noise=NOISE)(WEIGHTS, 0)) == set()


def test_noise_is_drawn_for_every_version_tensor_and_seed_and_is_reproducible():
    first = quantization_and_noise(noise=NOISE)(WEIGHTS, 1)
    again = quantization_and_noise(noise=NOISE)(dict(reversed(WEIGHTS.items())), 1)
    assert all(torch.equal(first[name], again[name]) for name in WEIGHTS)
    others = [
        quantization_and_noise(noise=replace(NOISE, final_sigma=0.1))(WEIGHTS, 2)[
            "model.norm.weight"
        ],
        quantization_and_noise(noise=NOISE, seed=1)(WEIGHTS, 1)["model.norm.weight"],
        first["model.layers.0.input_layernorm.weight"],
    ]
    assert not any(torch.equal(first["model.norm.weight"], other) for other in others)


def test_what_was_given_is_left_alone_and_types_stay():
    given = {name: tensor.to(torch.bfloat16) for name, tensor in WEIGHTS.items()}
    before = {name: tensor.clone() for name, tensor in given.items()}
    altered = quantization_and_noise(quantization=Quantization.FP8, noise=NOISE)(given, 1)
    assert all(torch.equal(given[name], before[name]) for name in given)
    assert {tensor.dtype for tensor in altered.values()} == {torch.bfloat16}
