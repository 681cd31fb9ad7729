"""On a GPU unset fields mean bfloat16 and vLLM; what is set stays, and a CPU changes nothing."""

import pytest

from vcpo.api import (
    GpuUse,
    VCPORunSpec,
    gpu_warnings,
    missing_gpus,
    parse_run,
    run_to_yaml,
    with_gpu_defaults,
)
from vcpo.api.workloads import Precision

FLOAT32, BFLOAT16 = Precision.FLOAT32, Precision.BFLOAT16


def spec_of(**fields) -> VCPORunSpec:
    given = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 3}
    return VCPORunSpec.model_validate(given | fields)


def groups(*fields):
    return [{"name": name, **each} for name, each in zip("ab", fields, strict=False)]


def asking(container, **resources):
    return {"spec": {"containers": [{"name": container, "resources": resources}]}}


def machine(spec, *, has_gpus=True, has_vllm=True):
    return GpuUse.of_machine(spec, has_gpus=has_gpus, has_vllm=has_vllm)


def chosen(spec, use):
    fitted = with_gpu_defaults(spec, use)
    of_groups = [(group.precision, group.engine) for group in fitted.rollouts]
    return fitted.learner.precision, of_groups


def test_a_machine_with_gpus_computes_in_bfloat16_and_generates_with_vllm():
    spec = spec_of(rollouts=groups({}, {}))
    assert chosen(spec, machine(spec)) == (BFLOAT16, [(BFLOAT16, "vllm")] * 2)


def test_without_vllm_it_generates_with_hf_and_says_so():
    spec = spec_of(rollouts=groups({}))
    use = machine(spec, has_vllm=False)
    assert chosen(spec, use) == (BFLOAT16, [(BFLOAT16, "hf")])
    (said,) = gpu_warnings(spec, use)
    assert said.startswith("spec.rollouts[0].engine: 'hf' is used, because vLLM")
    assert list(gpu_warnings(with_gpu_defaults(spec, use), use)) == []


def test_a_machine_without_gpus_has_the_defaults_of_a_cpu():
    spec = spec_of(rollouts=groups({}, {"kvCacheGibibytes": 1.0}))
    use = machine(spec, has_gpus=False)
    assert chosen(spec, use) == (FLOAT32, [(FLOAT32, "hf"), (FLOAT32, "vllm")])
    assert (spec.learner.number_format, spec.rollouts[0].number_format) == (FLOAT32, FLOAT32)
    assert [group.engine_name for group in spec.rollouts] == ["hf", "vllm"]
    assert list(gpu_warnings(spec, use)) == []


def test_what_is_set_stays_and_float32_on_a_gpu_is_warned_about():
    own = {"engine": "own:Engine", "precision": "bfloat16"}
    spec = spec_of(
        learner={"precision": "float32"},
        rollouts=groups({"engine": "hf", "precision": "float32"}, own),
    )
    use = machine(spec)
    assert chosen(spec, use) == (FLOAT32, [(FLOAT32, "hf"), (BFLOAT16, "own:Engine")])
    fields = [each.partition(": ")[0] for each in gpu_warnings(spec, use)]
    assert fields == ["spec.learner.precision", "spec.rollouts[0].precision"]


@pytest.mark.parametrize(
    ("learner", "group", "expected"),
    [
        ({}, {}, (FLOAT32, (FLOAT32, "hf"))),
        ({"gpusPerReplica": 2}, {"tensorParallelSize": 2}, (BFLOAT16, (BFLOAT16, "vllm"))),
        (
            {"template": asking("learner", limits={"nvidia.com/gpu": 1})},
            {"template": asking("rollout", requests={"amd.com/gpu": "1"})},
            (BFLOAT16, (BFLOAT16, "vllm")),
        ),
        (
            {"template": asking("learner", claims=[{"name": "gpu"}])},
            {"template": asking("rollout", limits={"nvidia.com/mig-1g.10gb": 1})},
            (BFLOAT16, (BFLOAT16, "vllm")),
        ),
        (
            {"template": asking("learner", limits={"nvidia.com/gpu": 0})},
            {"template": asking("rollout", limits={"rdma/hca": 1, "cpu": "4"})},
            (FLOAT32, (FLOAT32, "hf")),
        ),
        (
            {"template": asking("a-sidecar", limits={"nvidia.com/gpu": 1})},
            {"template": {"spec": {"containers": {"name": "rollout"}}}},
            (FLOAT32, (FLOAT32, "hf")),
        ),
    ],
)
def test_in_a_cluster_what_the_pods_ask_for_decides(learner, group, expected):
    spec = spec_of(learner=learner, rollouts=groups(group))
    precision, (of_group,) = chosen(spec, GpuUse.from_spec(spec))
    assert (precision, of_group) == expected


def test_chosen_defaults_are_written_into_the_file_and_chosen_once():
    run = parse_run(run_to_yaml(parse_run("metadata: {name: r}\nspec: " + repr(SHORT))))
    use = machine(run.spec)
    fitted = run.model_copy(update={"spec": with_gpu_defaults(run.spec, use)})
    read = parse_run(run_to_yaml(fitted))
    assert read == fitted
    assert with_gpu_defaults(read.spec, machine(read.spec, has_gpus=False)) == read.spec


SHORT = {"model": {"name": "m"}, "environment": {"name": "countdown"}, "steps": 3}


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ({}, []),
        ({"model": {"name": "m", "sizeBillions": 7.6}}, ["learner", "a"]),
        ({"rollouts": groups({"engine": "vllm"})}, ["learner"]),
        ({"rollouts": groups({"engine": "vllm", "gpus": 0})}, ["a"]),
        ({"rollouts": groups({"engine": "vllm"}), "learner": {"gpusPerReplica": 1}}, []),
        ({"learner": {"gpusPerReplica": 1}}, ["a"]),
        ({"learner": {"precision": "bfloat16"}, "rollouts": groups({}, {})}, ["learner"]),
        ({"rollouts": groups({}, {"precision": "bfloat16"})}, ["b"]),
        (
            {
                "learner": {"precision": "bfloat16", "template": asking("learner", claims=["g"])},
                "rollouts": groups({"template": asking("rollout", limits={"gpu.intel.com/xe": 1})}),
            },
            [],
        ),
        (
            {
                "learner": {"precision": "bfloat16"},
                "pods": {"template": asking("learner", limits={"rdma/hca": 1})},
            },
            ["learner"],
        ),
        (
            {"learner": {"precision": "bfloat16", "template": asking("learner", limits=[1])}},
            ["learner"],
        ),
    ],
)
def test_pods_that_need_a_gpu_and_ask_for_none_are_named_with_the_field(spec, fields):
    spec = {"rollouts": groups({}), **spec}
    found = [each.rpartition("set `")[2] for each in missing_gpus(spec_of(**spec))]
    names = {"learner": "learner.gpusPerReplica", "a": "rollouts[0].gpus", "b": "rollouts[1].gpus"}
    assert found == [f"{names[each]}`." for each in fields]
