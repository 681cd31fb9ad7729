"""A model that cannot be the policy is refused by validation, learner and worker, with one text."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import dynamic_module_utils

from vcpo.api import parse_run
from vcpo.local.models import model_problems
from vcpo.service.lifecycle import StartError
from vcpo_learner.model.loading import load_policy
from vcpo_learner.model.skeleton import build_skeleton
from vcpo_rollout.engines.loading import load_model_skeleton, load_state, load_tokenizer

TINY = Path("examples/models/tiny")
CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path(__file__).with_name("ran").touch()
class HouseConfig(LlamaConfig):
    model_type = "house_model"
class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig
"""


def model_with(folder, **changes):
    """A copy of the tiny model whose configuration says other things."""
    shutil.copytree(TINY, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def said_by_all(name):
    run = parse_run(f"""
        metadata: {{name: r}}
        spec:
          model: {{name: "{name}"}}
          environment: {{name: sort_digits}}
          sampling: {{maxNewTokens: 4}}
          steps: 1
          rollouts: [{{name: main}}]
    """)
    said = {str(problem) for problem in model_problems(run)}
    for load in (load_policy, build_skeleton):
        with pytest.raises(StartError) as caught:
            load(name, None)
        said.add(str(caught.value))
    for load in (load_model_skeleton, load_state):
        with pytest.raises(ValueError, match="spec") as caught:
            load(name)
        said.add(str(caught.value))
    return said


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is a quantized checkpoint"),
        ({"model_type": "house_model"}, "is of a family (house_model)"),
    ],
)
def test_validation_learner_and_worker_refuse_a_model_with_the_same_text(tmp_path, changes, begins):
    (problem,) = said_by_all(model_with(tmp_path / "model", **changes))
    assert problem.startswith(f"spec.model.name: {begins}")


@pytest.fixture
def model_with_code(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    auto = {"AutoConfig": "house.HouseConfig", "AutoModelForCausalLM": "house.HouseForCausalLM"}
    name = model_with(
        tmp_path / "model",
        model_type="house_model",
        architectures=["HouseForCausalLM"],
        auto_map=auto,
    )
    Path(name, "house.py").write_text(CODE)
    return name


def test_code_of_a_model_runs_where_the_user_says_so_and_nobody_asks(model_with_code, tmp_path):
    (problem,) = said_by_all(model_with_code)
    assert problem.startswith("spec.model.trustRemoteCode: ")
    assert not list(tmp_path.rglob("ran"))
    policy, _ = load_policy(model_with_code, None, trust_remote_code=True)
    sampler = load_model_skeleton(model_with_code, trust_remote_code=True)
    assert type(policy).__name__ == type(sampler).__name__ == "HouseForCausalLM"
    assert list(tmp_path.rglob("ran"))


def test_code_of_a_tokenizer_is_refused_by_the_same_field(tmp_path):
    name = model_with(tmp_path / "model")
    path = Path(name, "tokenizer_config.json")
    settings = json.loads(path.read_text()) | {
        "tokenizer_class": "HouseTokenizer",
        "auto_map": {"AutoTokenizer": ["house.HouseTokenizer", None]},
    }
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"^spec\.model\.trustRemoteCode: .*Python code"):
        load_tokenizer(name)
    with pytest.raises(StartError, match=r"^spec\.model\.trustRemoteCode: .*Python code"):
        load_policy(name, None)
