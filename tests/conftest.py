"""Settings of every test."""

from hypothesis import settings

# A loaded machine is slow; how long an example takes says nothing about its correctness.
settings.register_profile("vcpo", deadline=None)
settings.load_profile("vcpo")
