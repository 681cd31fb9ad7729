"""The GPU suite's checks run on a CPU, tiny; a slow or failing one costs only its own line."""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import main, summary
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.suite import CHECKS, ENVIRONMENT, Check, run_check

TINY = Setting(device=torch.device("cpu"), is_tiny=True)
BY_NAME = {check.name: check for check in CHECKS}


def line_of(name: str) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for part in BY_NAME[name].load()(TINY):
        line |= part
    return line


def slow_check(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    time.sleep(600.0)
    yield {"second": 2}


def failing_check(setting: Setting) -> Iterator[dict[str, Any]]:
    yield {"first": 1}
    raise ValueError("no such thing")


def local_check(name: str) -> Check:
    return Check(number=99, name=name, place=f"{__name__}:{name}")


def test_every_check_can_be_imported():
    assert [check.number for check in CHECKS] == list(range(1, 13))
    assert all(callable(check.load()) for check in [ENVIRONMENT, *CHECKS])


def test_products_of_rounded_factors_have_the_norm_of_their_exact_product():
    line = line_of("norm_products")
    assert line["bfloat16"]["norm_relative_error"] < 1e-6
    assert line["tf32"] == {"skipped": "needs a GPU"}


def test_the_tiled_head_agrees_with_full_logits():
    line = line_of("output_head")
    assert line["tokens_48"]["logprob_max_difference_nats"] < 1e-5
    assert line["tokens_48"]["gradient_relative_error"] < 1e-5


def test_a_step_is_timed_in_every_mode():
    line = line_of("step_speed")
    ways = ["plain", "group_mean", "opob_one_pass", "opob_two_passes", "opob_logit_energy"]
    assert [line[way]["tokens_per_s"] > 0.0 for way in ways] == [True] * 5
    assert not any("skipped_step" in line[way] for way in ways)


def test_attention_is_timed_padded_and_packed():
    line = line_of("attention")
    assert line["tokens_32"]["padded_sdpa"]["seconds"] > 0.0
    assert line["tokens_32"]["varlen"]["seconds"] > 0.0


def test_the_search_for_the_longest_trajectory_ends_at_its_limit():
    line = line_of("longest_trajectory")
    assert line["full_1_5b"] == {"tokens": 32, "limit_of_this_check": 32}
    assert line["lora_7b"] == {"tokens": 32, "limit_of_this_check": 32}


def test_both_forms_of_a_norm_are_timed():
    line = line_of("break_even")
    assert list(line["lengths"]) == [8, 16]
    assert line["ns_per_touch"] > 0.0


def test_a_sharded_step_is_the_unsharded_one():
    line = line_of("sharded_step")["twoPass"]
    assert line["plain"]["skipped"] is None
    names = ("gradient_norm", "ess_ratio", "learning_rate", "moved")
    assert all(line[f"{name}_relative_error"] < 1e-5 for name in names)


def test_a_patched_set_has_the_models_parameters_and_few_elements_change():
    line = line_of("publishing")
    assert line["parameters_match"]
    assert 0.0 < line["changes_share"] < 0.02


def test_a_check_that_the_time_limit_ends_has_what_it_found_until_then():
    line = run_check(local_check("slow_check"), TINY, limit_s=1.0)
    assert (line["first"], line["stopped"]) == (1, "time limit")
    assert "second" not in line


def test_a_failing_check_says_why():
    line = run_check(local_check("failing_check"), TINY, limit_s=60.0)
    assert (line["first"], line["error"]) == (1, "ValueError: no such thing")


def test_the_summary_says_which_checks_are_complete_and_why_others_are_not():
    lines = [
        {"check": 1},
        {"check": 2, "stopped": "time limit"},
        {"check": 3, "error": "ValueError: x"},
        {"check": 4, "skipped": "needs TRL"},
    ]
    assert summary(lines) == {
        "benchmark": "gpu",
        "complete": [1],
        "error": {"3": "ValueError: x"},
        "skipped": {"4": "needs TRL"},
        "stopped": {"2": "time limit"},
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_line_says_that_it_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "torch sees no GPU" in lines[0]["missing"][0]
    assert {line["skipped"] for line in lines[1:-1]} == {"needs a GPU"}
    assert lines[-1]["complete"] == []


def test_the_sizes_of_a_gpu_are_refused_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main()
    assert "add --tiny for a CPU" in capsys.readouterr().err
