"""The engine for throughput: vLLM in its own processes."""

from typing import Final

ROLLOUT_WORKER_VARIABLE: Final = "VCPO_ROLLOUT_WORKER_PID"
"""Environment variable by which vLLM's processes know the rollout worker, whose end is theirs."""
