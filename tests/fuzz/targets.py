"""All fuzz targets."""

from tests.fuzz import checkpoints, messages, specs, texts, weights

TARGETS = (
    *messages.TARGETS,
    *weights.TARGETS,
    *checkpoints.TARGETS,
    *specs.TARGETS,
    *texts.TARGETS,
)
