"""The Job that downloads the model into the claim for it, and that claim.

A Job cannot change, and what it did stays done. So it is made once, and again only after a failure
(`decisions.model_download`).
"""

from __future__ import annotations

import math

from vcpo_operator.children.defaults import OperatorDefaults
from vcpo_operator.children.manifest import Child, Kind, Parent, build_child
from vcpo_operator.children.pod_template.template import RUN_FILE_PATH, Workload, pod_template
from vcpo_operator.names import Role, model_name

_RETRIES = 3
_LEAST_GIBIBYTES = 20
_GIBIBYTES_OF_BILLION = 5
"""Files have 4 bytes for each parameter at most."""


def model_job(parent: Parent, defaults: OperatorDefaults) -> Child | None:
    """Build the Job; None if the run has no cache.

    Raises: ValueError when the user's template cannot be merged.
    """
    spec = parent.run.spec
    if spec.model.cache is None:
        return None
    template = pod_template(parent, defaults, _workload(parent, defaults))
    template["spec"]["restartPolicy"] = "Never"
    body = {
        "backoffLimit": _RETRIES,
        "activeDeadlineSeconds": spec.load_deadline_seconds,
        "template": template,
    }
    name = model_name(parent.name)
    return build_child(Kind.JOB, parent, name, {"spec": body}, role=Role.MODEL)


def model_claim(parent: Parent) -> Child | None:
    """Build the run's own claim for the model; None if it has no cache, or the user's claim."""
    model = parent.run.spec.model
    cache = model.cache
    if cache is None or cache.claim_name is not None:
        return None
    needed = math.ceil(_GIBIBYTES_OF_BILLION * (model.size_billions or 0.0))
    size = cache.size_gibibytes or max(_LEAST_GIBIBYTES, needed)
    body = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": f"{size}Gi"}},
    }
    if cache.storage_class_name is not None:
        body["storageClassName"] = cache.storage_class_name
    name = model_name(parent.name)
    return build_child(Kind.CLAIM, parent, name, {"spec": body}, role=Role.MODEL)


def _workload(parent: Parent, defaults: OperatorDefaults) -> Workload:
    return Workload(
        role=Role.MODEL,
        group=None,
        image=parent.run.spec.learner.image or defaults.learner_image,
        command=["python", "-m", "vcpo.service.model_download", RUN_FILE_PATH],
        port=0,
        health_port=0,
        metrics_port=0,
        more_ports=[],
        drain_s=1,
        threads=None,
        gpus=0,
        gpus_by_default=0,
        needs=None,
        affinity={},
        variables=[],
        environment_secret=None,
        mounts=[],
        volumes=[],
        shares_memory=False,
        template={},
    )
