"""Where a run stops scaling with its workers, by arithmetic: nothing here was measured on a GPU.

    python -m benchmarks.scaling

A worker decodes 64 responses at a time; each token reads the weights and the contexts' keys and
values once, at 0.6 of the memory's bandwidth. The learner multiplies 8 times for each parameter and
token, at 0.4 of the peak. At a new version a worker reads its running contexts again. The last line
is JSON: for each model the tokens per second of one worker and of the learner, the workers that
feed it, and seconds per version; and the limits of the event loop, whose constants are measured by
the commands beside them.
"""

import json
from typing import Any, Final, NamedTuple

from benchmarks.harness.measures import in_digits

BANDWIDTH_BYTES_PER_S: Final = 0.6 * 3.35e12
"""Of an H100's memory."""
FLOPS: Final = 0.4 * 989e12
"""Of an H100 in bfloat16."""
MEASURED_SHARE: Final = 18_100 * 8 * 1.54e9 / 989e12
"""`python -m benchmarks.gpu --parts step_speed`, 1.5 B on an H200, whose peak is an H100's."""
RUNNING: Final = 64
CONTEXT_TOKENS: Final = 2_048
"""Mean tokens of a running response with its prompt."""
RESPONSE_TOKENS: Final = 1_600
GROUP_SIZE: Final = 8
DELTA_SHARE: Final = 0.015
"""`python -m benchmarks.rollout.weight_sync`: delta over the full set."""
PUBLISH_S_PER_GB: Final = 0.54
"""`python -m benchmarks.publish`: on the step's path, for a rank's own rows."""
APPLY_S_PER_GB: Final = 0.13
"""`python -m benchmarks.publish`: at a worker."""
GROUP_S: Final = 1.7e-3
"""`python -m benchmarks.soak`: the event loop's seconds for a group."""
TOKEN_S: Final = 5e-8
"""`python -m benchmarks.learner.ingest --tokens 64` and `1024`: for a token more."""


class Model(NamedTuple):
    """A dense model, and the GPUs that each side uses for it."""

    parameters: float
    layers: int
    hidden: int
    token_bytes: int
    """Keys and values of one token of context."""
    worker_gpus: int
    learner_gpus: int

    @property
    def gigabytes(self) -> float:
        return 2 * self.parameters / 1e9

    def worker_tokens_per_s(self) -> float:
        """Return what one worker generates."""
        contexts = RUNNING * CONTEXT_TOKENS * self.token_bytes
        token_s = (self.gigabytes * 1e9 + contexts) / (self.worker_gpus * BANDWIDTH_BYTES_PER_S)
        return RUNNING / token_s

    def learner_tokens_per_s(self) -> float:
        return self.learner_gpus * FLOPS / (8 * self.parameters)

    def rereading_s(self, context_tokens: int = CONTEXT_TOKENS) -> float:
        """Return the seconds in which a worker reads all running contexts again."""
        attention = self.layers * self.hidden * context_tokens
        flops = RUNNING * context_tokens * 2 * (self.parameters + attention)
        return flops / (self.worker_gpus * FLOPS)

    def figures(self) -> dict[str, float]:
        """Return the table's column of this model."""
        measured = self.learner_tokens_per_s() * MEASURED_SHARE / 0.4
        return {
            "worker_tokens_per_s": self.worker_tokens_per_s(),
            "learner_tokens_per_s": self.learner_tokens_per_s(),
            "learner_measured_rate_tokens_per_s": measured,
            "workers_at_measured_rate": measured / self.worker_tokens_per_s(),
            "workers_at_bottleneck": self.learner_tokens_per_s() / self.worker_tokens_per_s(),
            "step_path_publish_s": PUBLISH_S_PER_GB * self.gigabytes / self.learner_gpus,
            "worker_apply_s": APPLY_S_PER_GB * self.gigabytes / self.worker_gpus,
            "rereading_2k_s": self.rereading_s(),
            "rereading_16k_s": self.rereading_s(16_384),
            "delta_gigabytes": DELTA_SHARE * self.gigabytes,
        }


MODELS: Final = {
    "7B": Model(7.6e9, 28, 3584, token_bytes=57_344, worker_gpus=1, learner_gpus=8),
    "70B": Model(70.6e9, 80, 8192, token_bytes=327_680, worker_gpus=4, learner_gpus=64),
}
"""Qwen2.5-7B and Llama-3.1-70B."""


def main() -> None:
    """Print the table."""
    found = {name: model.figures() for name, model in MODELS.items()}
    group_s = GROUP_S + TOKEN_S * GROUP_SIZE * RESPONSE_TOKENS
    tokens = GROUP_SIZE * RESPONSE_TOKENS
    event_loop = {"groups_per_s": 1 / group_s, "tokens_per_s": tokens / group_s}
    for name in found["7B"]:
        print(f"{name:24}{found['7B'][name]:>12.3g}{found['70B'][name]:>12.3g}")
    numbers: dict[str, Any] = {**found, "event_loop": event_loop}
    print(json.dumps({name: in_digits(each, 3) for name, each in numbers.items()}))


if __name__ == "__main__":
    main()
