"""Checks version labels by computing: a token's log-probability under the weights of its label.

The weights are those that the learner announced, which its witness kept. The model is a plain full
forward pass of `transformers`, without the worker's engine and its cache.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from vcpo.wire.v1 import work_pb2

TOLERANCE_NATS = 1e-4
"""Float32 sums in another order differ by less, adjacent versions by more; docs/inside/evidence.md
has the numbers."""
_KEPT_VERSIONS = 64


class LabelCheck:
    """Full forward passes of every published version."""

    def __init__(self, model: Path, payloads: Path) -> None:
        self.num_checked = 0
        self._payloads = payloads
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()

    def wrong_labels(self, messages: Iterable[work_pb2.Trajectory]) -> list[str]:
        return [each.trajectory_id for each in messages if not self._is_right(each)]

    def forget_old(self) -> None:
        """Remove the weights of versions that no new response can have."""
        versions = sorted({_version(path) for path in self._payloads.glob("*.safetensors")})
        for path in self._payloads.glob("*.safetensors"):
            if _version(path) in versions[:-_KEPT_VERSIONS]:
                path.unlink()

    def _is_right(self, message: work_pb2.Trajectory) -> bool:
        reported = memoryview(message.rollout_logprobs).cast("f").tolist()
        start = 0
        for span in message.version_spans:
            end = start + span.num_tokens
            for path in self._payloads.glob(f"{span.policy_version}-*.safetensors"):
                if not _agrees(self._logprobs(path, message)[start:end], reported[start:end]):
                    return False
                self.num_checked += span.num_tokens
            start = end
        return True

    @torch.inference_mode()
    def _logprobs(self, payload: Path, message: work_pb2.Trajectory) -> list[float]:
        prompt = memoryview(message.prompt_token_ids).cast("I").tolist()
        response = memoryview(message.response_token_ids).cast("I").tolist()
        self._model.load_state_dict(load_file(payload), strict=False)
        self._model.tie_weights()
        logits = self._model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        return logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def _agrees(computed: Sequence[float], reported: Sequence[float]) -> bool:
    return all(
        abs(ours - theirs) <= TOLERANCE_NATS
        for ours, theirs in zip(computed, reported, strict=True)
    )


def _version(path: Path) -> int:
    return int(path.name.partition("-")[0])
