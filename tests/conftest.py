"""Settings of every test."""

import os

from hypothesis import settings

# Tiny tensors on a few cores: threads of the tensor library would only wait for each other.
# Read when the library is loaded, so it is set before anything else is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A loaded machine is slow; how long an example takes says nothing about its correctness.
settings.register_profile("vcpo", deadline=None)
settings.load_profile("vcpo")
