"""The GPU suite's parts run on a CPU, tiny; a slow or failing one costs only its own."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu import random_models, steps
from benchmarks.gpu.__main__ import PARTS, Part, main, run_part, run_parts, summary
from benchmarks.gpu.setting import Setting

TINY = Setting(device=torch.device("cpu"), is_tiny=True)
QUICK = Setting(device=torch.device("cpu"), is_tiny=True, is_quick=True)
BY_NAME = {part.name: part for part in PARTS}


def found_by(name: str, setting: Setting = TINY) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in BY_NAME[name].load()(setting):
        found |= part
    return found


def slow(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    time.sleep(600.0)
    yield {"second": 2}


def failing(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    raise ValueError("no such thing")


@pytest.fixture
def own_part(monkeypatch):
    """A part that is a function of this module."""

    def part(name, limit_s):
        monkeypatch.setitem(sys.modules, "benchmarks.gpu.own", sys.modules[__name__])
        return Part(place=f"own:{name}", limit_s=limit_s)

    return part


def test_every_part_can_be_imported_and_correctness_comes_first():
    assert [part.name for part in PARTS][:3] == ["gradient", "step_speed", "whole_run"]
    assert all(callable(part.load()) for part in PARTS)


def test_every_way_of_a_step_is_as_near_to_float64_as_plain_autocast_is():
    found = found_by("gradient")
    assert found["float32_untied"]["gradient_rel"] < 1e-5
    assert found["float32_untied"]["norm_rel"] < 1e-5
    ways = ["one_pass", "packed", "two_pass", "checkpointed"]
    lines = [found[f"{way}_{head}"] for way in ways for head in ("tied", "untied")]
    assert all(0.2 < line["gradient_over_plain"] < 3.0 for line in lines)
    assert list(found["packed_tied"]["attention"]) == ["one_by_one"]


def test_a_step_is_timed_in_every_mode():
    found = found_by("step_speed")
    ways = ["plain", "group_mean", "opob_one_pass", "opob_two_passes", "opob_logit_energy"]
    lines = [found[f"{way}_0.5b"] for way in ways]
    assert all(line["tokens_per_s"] > 0.0 for line in lines)
    assert not any("skipped_step" in line for line in lines)


def test_a_plain_step_in_pieces_is_that_of_the_whole_batch(monkeypatch):
    def weights_after_a_step():
        model = random_models.make_model(random_models.TINY, TINY.device)
        groups = random_models.make_groups(model, TINY, group_size=4, tokens=32)
        trainer = steps.PlainTrainer(model, TINY)
        trainer.take(groups)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    whole = weights_after_a_step()
    monkeypatch.setattr(steps, "_MOST_LOGITS", 3 * 32 * random_models.TINY.vocabulary)
    # AdamW's first step is the rate, 1e-6, toward each gradient's sign: rounding may turn a few.
    assert float((weights_after_a_step() - whole).abs().mean()) < 1e-8


def test_attention_is_timed_padded_and_packed():
    found = found_by("attention")
    assert found["padded_32"]["seconds"] > 0.0
    assert list(found["packed_32"]["attention"]) == ["one_by_one"]


def test_both_forms_of_a_norm_are_timed():
    assert found_by("break_even")["tokens_16"]["kept_ms"] > 0.0


def test_a_sharded_step_is_the_unsharded_one():
    line = found_by("sharded_step")["twoPass"]
    assert line["plain"]["skipped"] is None
    names = ("gradient_norm", "ess_ratio", "learning_rate", "moved")
    assert all(line[f"{name}_relative_error"] < 1e-5 for name in names)


def test_a_patched_set_has_the_models_parameters_and_few_elements_change():
    found = found_by("publishing")
    assert found["parameters_match"]
    assert 0.0 < found["changes_share"] < 0.02


def test_a_whole_run_takes_its_steps_and_ends():
    found = found_by("whole_run", QUICK)
    assert found.get("error") is None
    assert (found["exit_status"], found["summary"]["steps"]) == (0, 2)
    assert found["last_step"]["step"] == 2


def test_what_a_part_found_is_printed_before_its_time_is_up(own_part, capsys):
    line = run_part(own_part("slow", 0.5), TINY, left_s=60.0)
    assert (line["status"], line["why"]) == ("failed", "time limit")
    assert json.loads(capsys.readouterr().out) == {"part": "slow", "first": 1}


def test_a_part_that_fails_says_why_and_the_next_one_runs(own_part, capsys):
    lines = run_parts([own_part("failing", 15.0), BY_NAME["memory_plan"]], TINY, limit_s=60.0)
    assert [line["status"] for line in lines] == ["failed", "skipped"]
    assert summary(lines) == {
        "benchmark": "gpu",
        "ran": 0,
        "skipped": 1,
        "failed": 1,
        "why": {
            "failing": "ValueError: no such thing",
            "memory_plan": "needs a GPU: a CPU has no plan",
        },
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_part_says_that_it_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "torch sees no GPU" in lines[0]["missing"]
    assert (lines[-1]["skipped"], lines[-1]["failed"], ended.value.code) == (len(PARTS), 0, 0)
    assert set(lines[-1]["why"].values()) == {"needs a GPU"}


def test_the_sizes_of_a_gpu_are_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main()
    assert "add --tiny for a CPU" in capsys.readouterr().err
