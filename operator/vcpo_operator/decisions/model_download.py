"""The download of the model: what waits for it, and what its failure does. Pure.

Learner and workers start when the Job is complete. A Job that fails has tried several times, so the
run fails with its cause. It is downloaded again when the run is tried again: a failure of an
earlier attempt is over, and its Job goes.
"""

from __future__ import annotations

from vcpo.api import VCPORunSpec
from vcpo_operator.names import Role
from vcpo_operator.observed.records import Cause, ObservedState

FAILED_REASON = "ModelDownloadFailed"


def awaits_model(spec: VCPORunSpec, observed: ObservedState) -> bool:
    """Whether the run has a cache that no Job has filled yet."""
    job = observed.model_job
    return spec.model.cache is not None and (job is None or not job.is_complete)


def failure_of_download(observed: ObservedState, start_s: float | None) -> str:
    """Return why the model of this attempt cannot be downloaded, in sentences; empty if it can.

    start_s: Unix time at which the attempt began; None while the run is suspended.
    """
    job = observed.model_job
    if job is None or not job.failure or is_of_earlier_attempt(observed, start_s):
        return ""
    ends = (pod.last_end for pod in observed.pods if pod.role is Role.MODEL)
    told = next((end.message.splitlines()[-1] for end in ends if end and end.message), "")
    return f"The model was not downloaded: {job.failure.rstrip('.')}. {told}".rstrip()


def is_of_earlier_attempt(observed: ObservedState, start_s: float | None) -> bool:
    """Whether the Job failed before this attempt began."""
    job = observed.model_job
    if job is None or job.failed_s is None or start_s is None:
        return False
    return job.failed_s < start_s


def cause_of_wait(observed: ObservedState) -> Cause:
    """Return what a run waits for whose model is being downloaded."""
    pods = observed.pods_of(Role.MODEL)
    broken = next((pod.cause for pod in pods if pod.cause and not pod.is_finished), None)
    message = "The Job with the name of the claim downloads the model; then the pods start."
    return broken or Cause(reason="ModelDownloading", message=message)
