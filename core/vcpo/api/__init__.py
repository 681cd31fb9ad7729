"""The `VCPORun` model: one source for local files, cluster validation, defaults and the schema."""

from vcpo.api.advice import algorithm_warnings, batch_warnings, rollout_warnings
from vcpo.api.errors import FieldProblem, SpecError
from vcpo.api.files import load_document, load_run, parse_document, parse_run, run_to_yaml
from vcpo.api.gpu_defaults import (
    GpuUse,
    asks_for_accelerators,
    gpu_warnings,
    missing_gpus,
    with_gpu_defaults,
)
from vcpo.api.run import (
    API_VERSION,
    KIND,
    VCPORun,
    VCPORunSpec,
    continuation_changes,
    continuation_document,
    json_schema,
)

__all__ = [
    "API_VERSION",
    "KIND",
    "FieldProblem",
    "GpuUse",
    "SpecError",
    "VCPORun",
    "VCPORunSpec",
    "algorithm_warnings",
    "asks_for_accelerators",
    "batch_warnings",
    "continuation_changes",
    "continuation_document",
    "gpu_warnings",
    "json_schema",
    "load_document",
    "load_run",
    "missing_gpus",
    "parse_document",
    "parse_run",
    "rollout_warnings",
    "run_to_yaml",
    "with_gpu_defaults",
]
