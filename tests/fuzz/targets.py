"""All fuzz targets."""

from tests.fuzz import messages, specs, texts, weights

TARGETS = (*messages.TARGETS, *weights.TARGETS, *specs.TARGETS, *texts.TARGETS)
