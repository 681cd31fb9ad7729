"""Warnings of a number format that a CPU only emulates."""

from __future__ import annotations

import pytest

from vcpo.api import GpuUse, VCPORunSpec
from vcpo.local.cpu_formats import cpu_flags, cpu_warnings

OLD = frozenset({"fma", "avx2"})
CPU = GpuUse(learner=False, groups=frozenset(), has_vllm=False)
GPU = GpuUse(learner=True, groups=frozenset({"b"}), has_vllm=True)


def spec(precision):
    return VCPORunSpec.model_validate(
        {
            "model": {"name": "m"},
            "environment": {"name": "sort_digits"},
            "steps": 1,
            "learner": precision,
            "rollouts": [{"name": "a"}, {"name": "b", **precision}],
        }
    )


def fields(*uses, flags=OLD, precision="bfloat16"):
    found = cpu_warnings(spec({"precision": precision}), uses, flags)
    return [each.split(":")[0] for each in found]


def test_learner_and_workers_in_bfloat16_are_named_with_the_cure_on_a_cpu_without_avx_512():
    assert fields(CPU) == ["spec.learner.precision", "spec.rollouts[1].precision"]
    assert [
        each.split("; ")[1] for each in cpu_warnings(spec({"precision": "bfloat16"}), [CPU], OLD)
    ] == ["remove the field"] * 2


@pytest.mark.parametrize("flags", [OLD | {"avx512bw"}, OLD | {"avx_ne_convert"}, None])
def test_a_cpu_that_has_it_or_is_unknown_is_not(flags):
    assert fields(CPU, flags=flags) == []


def test_float32_is_well_everywhere():
    assert fields(CPU, precision="float32") == []


def test_what_has_a_gpu_on_one_of_the_machines_is_not_meant():
    assert fields(CPU, GPU) == []


def test_flags_are_those_of_the_first_processor(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nflags\t\t: fpu avx2\nbugs\t: x\n\nprocessor\t: 1\nflags\t: fpu\n"
    )
    assert cpu_flags(file) == {"fpu", "avx2"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(file) is None
    assert cpu_flags(tmp_path / "none") is None
