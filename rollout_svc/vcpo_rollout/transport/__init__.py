"""The worker's calls to the learner, and its reads of the learner's files."""
