"""`python -m vcpo.service.model_download RUN_FILE`: downloads a run's model into the caches.

It downloads what learner and workers read: from the hub (`HF_HOME`), or from a URL
(`VCPO_MODEL_CACHE`). What is there already is not downloaded again.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from vcpo.api import SpecError, load_run
from vcpo.api.workloads import Model
from vcpo.service import logs
from vcpo.service.lifecycle import CANNOT_START, START_ERROR_MARK, StartError, start_errors
from vcpo.service.model_files import PATTERNS, is_url, local_model

_LOGGER = logging.getLogger(__name__)
_NOT_LOADED = ["original/*", "onnx/*", "openvino/*"]
"""Folders with the same parameters in other forms."""


def download(model: Model) -> str:
    """Download a model, and return the folder that holds it.

    Raises: StartError, if the user must correct something.
    """
    if is_url(model.name):
        local_model(model.name, with_weights=False)  # a worker's: it gets weights of the learner
        return local_model(model.name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(
            model.name,
            revision=model.revision,
            allow_patterns=PATTERNS,
            ignore_patterns=_NOT_LOADED,
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        told = str(error).strip().splitlines()[0]
        raise StartError(
            f"spec.model.name: '{model.name}' cannot be downloaded: {told} Check name, `revision`,"
            " `pods.tokenSecretName`, and whether this pod reaches the hub (`HF_ENDPOINT`)"
        ) from error


def main() -> int:
    """Download the model of a run file; 2 if the user must correct something."""
    parser = argparse.ArgumentParser(prog="python -m vcpo.service.model_download")
    parser.add_argument("run_file", type=Path, help="file with the run, a VCPORun in YAML")
    path = parser.parse_args().run_file
    try:
        with start_errors():
            logs.configure("model")
            model = load_run(path).spec.model
            _LOGGER.info("downloading %s", model.name)
            _LOGGER.info("%s is in %s", model.name, download(model))
    except (SpecError, StartError) as error:
        logs.report_end(str(error), mark=START_ERROR_MARK)
        return CANNOT_START
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
