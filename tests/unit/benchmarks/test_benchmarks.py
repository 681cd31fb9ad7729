"""Every benchmark can be imported, and the GPU suite times a step and nothing else."""

import importlib
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.random_models import TINY, make_groups, make_model
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stages import covered, stages_ms
from benchmarks.gpu.steps import OwnTrainer

ROOT = Path(__file__).parents[3]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "benchmarks").rglob("*.py"))
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_has_a_main_function(module):
    assert callable(importlib.import_module(module).main)


def test_a_step_of_the_gpu_suite_runs_the_model_once_and_has_all_stages():
    setting = Setting(device=torch.device("cpu"), is_tiny=True)
    model = make_model(TINY, setting.device)
    groups = make_groups(model, setting, group_size=4, tokens=16)
    trainer = OwnTrainer(model, setting, group_size=4, tokens=16)
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(trainer))
    found = [stages_ms(setting, lambda: trainer.take(groups)) for _ in range(5)]
    assert len(passes) == 5
    assert all(set(each) == {"forward", "backward", "clip", "step", "rest"} for each in found)


def test_intervals_that_overlap_cover_their_union():
    assert covered([(20.0, 30.0), (0.0, 10.0), (5.0, 12.0), (6.0, 7.0)]) == 22.0
