"""Measure what it takes to bring a new version of the weights to the workers.

A model of more than 100 M random parameters takes AdamW steps at the learning rate of RL and
publishes bfloat16. For the deltas between versions:

- changed_fraction: share of values whose bits differ, and the share that the float32 moves predict.
  The first step of AdamW moves every parameter by about the learning rate, because its two averages
  are equal in size. Later steps move parameters less where gradients change sign. So the first step
  changes the most values, and the last one is typical of a run;
- delta_bytes_over_full: bytes sent over those of the full set;
- encode_s at the learner; apply_s at a worker, checks included, beside its decoding;
- pause_s: how long decoding stops for the changes; pause_full_s for a full set that was read
  before the pause; pause_reload_s for a full set that is read during the pause. pause_ratio is
  pause_s over pause_reload_s.

Seconds are CPU time of one thread, so that other work on the machine does not count. Each version
is compared bit for bit with the learner's, and the engine's parameters with the version.
"""

import argparse
import json
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.measures import cpu_seconds, in_digits, parser_of
from benchmarks.harness.successive_versions import Update, make_model, updates
from tests.fixtures.weight_changes import delta_between
from vcpo.wire.deltas import apply_deltas, elements_of
from vcpo.wire.weights import manifest_of, tensor_sections, verify
from vcpo_rollout.engines.engine import PolicyWeights, WeightChanges
from vcpo_rollout.engines.hf.decoding import DecodeBatch
from vcpo_rollout.engines.loading_weights import read_weights, stage_weights, tensors_of


class Receiver:
    """A worker's model and the version that it holds, without the wire."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.payload = bytearray()
        self.batch = DecodeBatch(model, end_token_ids=frozenset(), pad_token_id=0, seed=0)

    def hold(self, version: int, payload: bytearray) -> dict[str, float]:
        """Load a full set read before the pause, then one read in it; return the pauses."""
        weights = PolicyWeights(version, payload)
        tensors = read_weights(self.model, weights)
        full_s, _ = cpu_seconds(lambda: self.batch.swap(version, tensors))
        reload_s, _ = cpu_seconds(
            lambda: self.batch.swap(version, read_weights(self.model, weights))
        )
        self.payload = payload
        self.check()
        return {"pause_full_s": full_s, "pause_reload_s": reload_s}

    def take(self, update: Update, delta: bytes) -> dict[str, float]:
        """Apply a delta; return the seconds beside decoding and the seconds of pause."""
        held = update.step - 1
        manifest = manifest_of(update.after, policy_version=update.step, incarnation="now")

        def apply() -> Any:
            positions = apply_deltas(elements_of(self.payload), [delta])
            verify(self.payload, manifest)
            weights = PolicyWeights(
                update.step,
                self.payload,
                changes=WeightChanges(base_policy_version=held, positions=positions),
            )
            return stage_weights(self.model, weights, in_use=held)

        apply_s, staged = cpu_seconds(apply)
        pause_s, _ = cpu_seconds(lambda: self.batch.swap(update.step, staged))
        assert self.payload == update.after, "the delta did not give the learner's bytes"
        self.check()
        return {"apply_s": apply_s, "pause_s": pause_s}

    def check(self) -> None:
        """Compare the parameters in use with the held bytes, bit for bit."""
        for name, tensor in tensors_of(self.payload).items():
            in_use = self.model.get_parameter(name)
            assert torch.equal(in_use.view(torch.int16), tensor.view(torch.int16)), name


def num_changed(before: bytearray, after: bytearray) -> int:
    """Return the number of bfloat16 values whose bits differ in two payloads of one layout."""
    start = min(section.begin for section in tensor_sections(after).values())
    was, now = (np.frombuffer(payload, dtype="<u2", offset=start) for payload in (before, after))
    return int(np.count_nonzero(was != now))


def measure_delta(receiver: Receiver, update: Update) -> dict[str, float]:
    """Measure the delta of one step."""
    whole = receiver.hold(update.step - 1, update.before)
    encode_s, delta = cpu_seconds(lambda: delta_between(update.before, update.after))
    num_values = sum(section.num_elements for section in tensor_sections(update.after).values())
    return {
        "changed_fraction": num_changed(update.before, update.after) / num_values,
        "predicted_fraction": update.predicted_fraction,
        "delta_bytes_over_full": len(delta) / len(update.after),
        "encode_s": encode_s,
        **receiver.take(update, delta),
        **whole,
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and send the deltas of the first step and of the last three to a receiver."""
    steps, shape = arguments.steps, (arguments.hidden, arguments.layers)
    model, receiver = make_model(*shape), Receiver(make_model(*shape).bfloat16())
    by_step = []
    chosen = {1, *range(max(1, steps - 2), steps + 1)}
    for update in updates(model, steps=chosen, learning_rate=arguments.learning_rate):
        by_step.append(measure_delta(receiver, update))
        print(json.dumps({"step": update.step, **in_digits(by_step[-1])}), flush=True)
    return {
        "parameters": model.num_parameters(),
        "full_bytes": len(receiver.payload),
        "steps": steps,
        **in_digits(summary(by_step)),
    }


def summary(by_step: list[dict[str, float]]) -> dict[str, float]:
    """Return sizes of the last and the first step, and the medians of the times."""
    sizes = ("changed_fraction", "predicted_fraction", "delta_bytes_over_full")
    times = [name for name in by_step[0] if name not in sizes]
    medians = {name: median(step[name] for step in by_step) for name in times}
    return {
        **{name: by_step[-1][name] for name in sizes},
        **{f"first_{name}": by_step[0][name] for name in sizes},
        **medians,
        "pause_ratio": medians["pause_s"] / medians["pause_reload_s"],
        "pause_ratio_vs_full": medians["pause_s"] / medians["pause_full_s"],
    }


def main() -> None:
    """Measure and print everything as JSON."""
    parser = parser_of(
        __doc__,
        hidden=(768, "width of the model"),
        layers=10,
        steps=(32, "optimizer steps"),
        learning_rate=1e-6,
    )
    torch.set_num_threads(1)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
