"""Checks before the first step run in the number type of the step too, and know its rounding."""

import logging

import pytest
import torch
from torch import nn

from tests.fixtures.families import family
from tests.fixtures.learner.models import PAD, llama, sampled_groups, seeded_model
from tests.fixtures.learner.updates import make_spec
from vcpo.api.algorithm import RowLayout
from vcpo.api.workloads import Precision
from vcpo.service.lifecycle import StartError
from vcpo.service.rotary_table import fix_rotary_table
from vcpo_learner.forward import attention
from vcpo_learner.output_head.logit_tiles import TiledLogits
from vcpo_learner.per_sample_gradients import factors
from vcpo_learner.update.micro_batches import MicroBatchRunner
from vcpo_learner.update.policy_update import PolicyUpdate


def bfloat16_spec(layout=RowLayout.PADDED):
    spec = make_spec()
    return spec.model_copy(
        update={
            "learner": spec.learner.model_copy(update={"precision": Precision.BFLOAT16}),
            "batch": spec.batch.model_copy(update={"row_layout": layout}),
        }
    )


class FailingInBfloat16(nn.Module):
    """A policy with a kernel that a GPU's branch would call: it fails for numbers of 16 bits."""

    def __init__(self):
        super().__init__()
        self.model = seeded_model(llama)

    def forward(self, **inputs):
        output = self.model(**inputs)
        if output.logits.dtype is torch.bfloat16:
            raise TypeError("varlen_attn() got an unexpected keyword argument 'enable_gqa'")
        return output


def test_what_fails_in_the_number_type_of_the_step_fails_at_the_start():
    MicroBatchRunner(FailingInBfloat16(), make_spec(), PAD)
    with pytest.raises(TypeError, match="enable_gqa"):
        MicroBatchRunner(FailingInBfloat16(), bfloat16_spec(), PAD)


def test_tiles_that_fail_in_the_number_type_of_the_step_are_not_used(monkeypatch, caplog):
    own = TiledLogits.product

    def product(self, left, right, out=None):
        if self.input_dtype is torch.bfloat16:
            raise RuntimeError("out_dtype is not supported")
        return own(self, left, right, out)

    monkeypatch.setattr(TiledLogits, "product", product)
    with caplog.at_level(logging.WARNING):
        runner = MicroBatchRunner(seeded_model(llama), bfloat16_spec(), PAD)
    assert not runner.network.is_tiled
    assert "full logits are computed" in caplog.text


def test_norms_that_fail_in_the_number_type_of_the_step_are_refused_at_the_start(monkeypatch):
    def product(first, second):
        if first.dtype is torch.bfloat16:
            raise RuntimeError("out_dtype is not supported")
        return factors.product(first, second.mT)

    monkeypatch.setattr(factors, "token_products", product)
    PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    with pytest.raises(StartError, match=r"cannot be measured \(out_dtype is not supported"):
        PolicyUpdate(seeded_model(llama), bfloat16_spec(), PAD)


@pytest.mark.parametrize("layout", RowLayout)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_families_pass_in_bfloat16(kind, layout):
    model = family(kind)
    fix_rotary_table(model)
    MicroBatchRunner(model, bfloat16_spec(layout), PAD)


def test_a_record_says_which_way_attention_took(monkeypatch):
    model = seeded_model(llama)
    groups = sampled_groups(model)
    plain = PolicyUpdate(seeded_model(llama), make_spec(), PAD)
    assert plain.step(groups, policy_version=9).attention_calls == {}
    packed = PolicyUpdate(model, bfloat16_spec(RowLayout.PACKED), PAD)
    assert set(packed.step(groups, policy_version=9).attention_calls) == {"one_by_one"}
    monkeypatch.setattr(attention, "_fits_kernel", lambda *_: True)
    monkeypatch.setattr(attention, "_by_kernel", lambda flat, *_: flat[0])
    calls = packed.step(groups, policy_version=9).attention_calls
    assert calls == {"kernel": len(model.model.layers)}
