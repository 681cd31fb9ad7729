"""Fake processes of the learner and the workers, and the run that they belong to."""

from vcpo.api import parse_run
from vcpo.local.processes.child import ChildProcess

TIMEOUT_S = 60


FAKE_PROCESS = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ)}), flush=True)
if "EXIT" in os.environ:
    print("the reason", flush=True)
    sys.exit(int(os.environ["EXIT"]))
if os.environ.get("RANK", "") == os.environ.get("EXIT_RANK"):
    print("the rank's reason", flush=True)
    sys.exit(int(os.environ["EXIT_STATUS"]))
sys.stdin.read()
"""


RUN = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 3
  failurePolicy: {maxLearnerRestarts: 2}
  learner: {threads: 5}
  rollouts: [{name: main, maxReplicas: 4, threads: 2}, {name: other, maxReplicas: 4}]
""")


class Clock:
    """Moved by hand."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def wait_for_end(child: ChildProcess) -> ChildProcess:
    """Wait for a child's end."""
    child.process.wait(TIMEOUT_S)
    return child


RUN_OF_TWO_RANKS = parse_run("""
metadata: {name: r}
spec:
  model: {name: m}
  environment: {name: countdown}
  steps: 3
  failurePolicy: {maxLearnerRestarts: 2}
  learner: {processes: 2}
  rollouts: [{name: learner}]
""")
