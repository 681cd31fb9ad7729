"""Measure tokens per second of the hf engine against `model.generate` of transformers.

Two workloads on one random model (Llama shape, hidden 64, 3 layers, vocabulary 64), in one process
and on one thread. The two programs take turns, and the best of the repeats counts. Seconds are CPU
time, so that other work on the machine does not count.

- even: as many requests as places, all of one length, the best case of `generate`;
- ragged: four requests per place, lengths uniform from 1 to twice the even one. `generate` takes
  them in batches that last as long as their longest; only requested tokens count.

The engine also returns the log-probability of every token; `generate` does not.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo_rollout.engines.engine import GenerationRequest, PolicyWeights
from vcpo_rollout.engines.hf.engine import HfEngine

VOCABULARY_SIZE = 64
PAD_TOKEN_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests, and the places of a batch that serve them."""

    name: str
    num_places: int
    requests: Sequence[GenerationRequest]

    @property
    def num_tokens(self) -> int:
        """Requested tokens; no sequence ends before its limit."""
        return sum(request.max_new_tokens for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Tokens per CPU second of both programs on one workload."""

    workload: str
    num_places: int
    engine_tokens_per_s: float
    generate_tokens_per_s: float

    @property
    def ratio(self) -> float:
        """Above 1 when the engine is faster."""
        return self.engine_tokens_per_s / self.generate_tokens_per_s


def build_model() -> LlamaForCausalLM:
    """Return the model, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=PAD_TOKEN_ID,
    )
    return LlamaForCausalLM(config)


def build_workload(name: str, lengths: Sequence[int], *, num_places: int) -> Workload:
    """Return one request for each length in tokens, with random prompts of 8 tokens."""
    prompts = torch.randint(
        1, VOCABULARY_SIZE, (len(lengths), 8), generator=torch.Generator().manual_seed(0)
    )
    return Workload(
        name=name,
        num_places=num_places,
        requests=[
            GenerationRequest(
                prompt_token_ids=tuple(prompt),
                temperature=1.0,
                max_new_tokens=length,
            )
            for prompt, length in zip(prompts.tolist(), lengths, strict=True)
        ],
    )


def build_workloads(places: Sequence[int], num_tokens: int) -> list[Workload]:
    """Return both workloads for each number of places."""
    generator = torch.Generator().manual_seed(1)
    workloads = []
    for num_places in places:
        even = [num_tokens] * num_places
        ragged = torch.randint(1, 2 * num_tokens + 1, (4 * num_places,), generator=generator)
        workloads.append(build_workload("even", even, num_places=num_places))
        workloads.append(build_workload("ragged", ragged.tolist(), num_places=num_places))
    return workloads


async def serve(engine: HfEngine, workload: Workload) -> None:
    """Run the workload on the engine."""
    generations = await asyncio.gather(*map(engine.generate, workload.requests))
    assert sum(len(generation.token_ids) for generation in generations) == workload.num_tokens


def generate(model: LlamaForCausalLM, workload: Workload) -> None:
    """Run the workload with `model.generate`, one full batch after the other."""
    for first in range(0, len(workload.requests), workload.num_places):
        requests = workload.requests[first : first + workload.num_places]
        prompts = torch.tensor([request.prompt_token_ids for request in requests])
        model.generate(  # type: ignore[misc]  # the library annotates `self` with a protocol
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=max(request.max_new_tokens for request in requests),
        )


def cpu_time_s(function: Callable[[], object]) -> float:
    """Return the CPU time of a call in this process, over all threads."""
    started = time.process_time()
    function()
    return time.process_time() - started


def measure(model: LlamaForCausalLM, workload: Workload, *, repeats: int) -> Result:
    """Run the workload on both programs in turn and keep the best time of each."""
    with asyncio.Runner() as runner:
        engine = runner.run(start_engine(model, workload.num_places))
        times = [
            (
                cpu_time_s(lambda: runner.run(serve(engine, workload))),
                cpu_time_s(lambda: generate(model, workload)),
            )
            for _ in range(repeats)
        ]
        runner.run(engine.close())
    engine_s, generate_s = (min(column) for column in zip(*times, strict=True))
    return Result(
        workload=workload.name,
        num_places=workload.num_places,
        engine_tokens_per_s=workload.num_tokens / engine_s,
        generate_tokens_per_s=workload.num_tokens / generate_s,
    )


async def start_engine(model: LlamaForCausalLM, num_places: int) -> HfEngine:
    """Return an engine that uses the model's own weights."""
    engine = HfEngine(
        model,
        end_token_ids=frozenset(),
        pad_token_id=PAD_TOKEN_ID,
        max_concurrent_sequences=num_places,
        seed=0,
    )
    payload = safetensors.torch.save(dict(model.state_dict()))
    await engine.swap_weights(PolicyWeights.whole(1, payload))
    return engine


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--places", type=int, nargs="+", default=[1, 16, 64], help="sequences at a time"
    )
    parser.add_argument("--tokens", type=int, default=64, help="mean length of a response")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the best counts")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, then everything as JSON."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model = build_model()
    print(f"{'workload':<10}{'places':>8}{'engine tok/s':>15}{'generate tok/s':>16}{'ratio':>8}")
    results = []
    for workload in build_workloads(arguments.places, arguments.tokens):
        result = measure(model, workload, repeats=arguments.repeats)
        results.append(result)
        print(
            f"{result.workload:<10}{result.num_places:>8}{result.engine_tokens_per_s:>15.0f}"
            f"{result.generate_tokens_per_s:>16.0f}{result.ratio:>8.2f}",
            flush=True,
        )
    report = {
        f"{result.workload}_{result.num_places}": {
            "engine_tokens_per_s": round(result.engine_tokens_per_s),
            "generate_tokens_per_s": round(result.generate_tokens_per_s),
            "ratio": round(result.ratio, 2),
        }
        for result in results
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
