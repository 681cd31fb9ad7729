"""Measure seconds from a worker's start to its first accepted trajectory, by source of its weights.

Real worker processes join a learner's services one after the other. The model has more than 100 M
random parameters in bfloat16. Responses have four tokens, so that the start dominates.

- learner: the first worker, which has no other source;
- peer: the second worker, which fetches from the first; the first holds the version and is idle;
- archive: the last worker, which reads the version from a folder on this machine's disk.

For each it also prints `weights_s`, the seconds from the request for the newest version to the
request for work, and the share of the full set that the learner sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.harness.egress import CountingService
from vcpo.api import VCPORun
from vcpo.wire.server import WireServer
from vcpo.wire.v1 import policy_pb2, policy_pb2_grpc, work_pb2, work_pb2_grpc
from vcpo_learner.ledger.dispatcher import Dispatcher
from vcpo_learner.ledger.trajectory_ledger import TrajectoryLedger
from vcpo_learner.ledger.worker_registry import WorkerRegistry
from vcpo_learner.model.published_state import PublishedState
from vcpo_learner.prompts.selection import prompt_source
from vcpo_learner.services.work import WorkService
from vcpo_learner.weights.archive import open_archive
from vcpo_learner.weights.peer_assignment import PeerAssignment
from vcpo_learner.weights.store import PolicyStore
from vcpo_rollout.engines.payload_tensors import tensors_of

_INCARNATION = "benchmark"
_GROUP = "main"
_TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny"
_ANY_PORT = "127.0.0.1:0"
_PATIENCE_S = 600.0


class WatchingWorkService(WorkService):
    """Leases work to the watched worker only, and notes when it requests work and submits."""

    watched = ""
    leased_s = 0.0
    submitted_s = 0.0

    def watch(self, worker_id: str) -> asyncio.Event:
        """Watch a worker; the event is set at its first accepted trajectory."""
        self.watched, self.leased_s = worker_id, 0.0
        self._submitted = asyncio.Event()
        return self._submitted

    async def Lease(  # noqa: N802 - named by the contract
        self, request: work_pb2.LeaseRequest, context: Any
    ) -> work_pb2.LeaseResponse:
        """Lease as the service does, but to one worker."""
        if request.worker_id != self.watched or self._submitted.is_set():
            return work_pb2.LeaseResponse(phase=work_pb2.RUN_PHASE_RUNNING, retry_after_seconds=5.0)
        self.leased_s = self.leased_s or time.monotonic()
        return await super().Lease(request, context)

    async def Submit(  # noqa: N802 - named by the contract
        self, request: work_pb2.SubmitRequest, context: Any
    ) -> work_pb2.SubmitResponse:
        """Accept trajectories as the service does."""
        response = await super().Submit(request, context)
        if work_pb2.SUBMIT_OUTCOME_ACCEPTED in response.outcomes and not self._submitted.is_set():
            self.submitted_s = time.monotonic()
            self._submitted.set()
        return response


class WatchingPolicyService(CountingService):
    """Notes when a worker first requests a version."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.first_manifest_s: dict[str, float] = {}

    async def GetManifest(  # noqa: N802 - named by the contract
        self, request: policy_pb2.GetManifestRequest, context: Any
    ) -> policy_pb2.PolicyManifest:
        """Respond as the service does."""
        self.first_manifest_s.setdefault(request.worker_id, time.monotonic())
        return await super().GetManifest(request, context)


class LearnerServices:
    """A learner's services with one published version, and the workers that join."""

    def __init__(self, folder: Path, *, hidden: int, layers: int) -> None:
        model = make_model(folder / "model", hidden, layers)
        precision = _run(folder).spec.rollouts[0].precision
        self.payload = PublishedState(model).whole(precision)
        self.run = _run(folder)
        self.run_file = folder / "run.yaml"
        self.run_file.write_text(self.run.model_dump_json(by_alias=True, exclude_unset=True))
        spec = self.run.spec
        ledger = TrajectoryLedger(
            prompts_per_step=spec.batch.prompts_per_step,
            trajectories_per_prompt=spec.batch.trajectories_per_prompt,
            lease_timeout_s=spec.lease.timeout_seconds,
            max_attempts=spec.lease.max_attempts,
            prompt_source=prompt_source(spec),
            incarnation=_INCARNATION,
            clock=time.monotonic,
        )
        registry = WorkerRegistry(time.monotonic)
        dispatcher = Dispatcher(
            spec=spec,
            ledger=ledger,
            registry=registry,
            incarnation=_INCARNATION,
            clock=time.monotonic,
        )
        store = PolicyStore(incarnation=_INCARNATION, clock=time.monotonic)
        self.archive_writer = open_archive(spec.weights, self.run.metadata.name, store)
        self.version = store.prepare(0, self.payload)
        store.publish(self.version)
        self.work = WatchingWorkService(dispatcher, spec)
        self.policy = WatchingPolicyService(store, PeerAssignment(registry), self.archive_writer)

    async def serve(self, stack: AsyncExitStack) -> int:
        """Serve until the stack is closed; return the port."""
        server = WireServer(keys=None)
        work_pb2_grpc.add_WorkServiceServicer_to_server(self.work, server.grpc_server)
        policy_pb2_grpc.add_PolicyServiceServicer_to_server(self.policy, server.grpc_server)
        port = await server.start(_ANY_PORT, ())
        stack.push_async_callback(server.stop, 0)
        return port

    async def join(self, stack: AsyncExitStack, port: int, worker_id: str) -> dict[str, float]:
        """Start a worker that runs until the stack is closed, and wait for its first trajectory."""
        submitted = self.work.watch(worker_id)
        num_bytes, started_s = self.policy.num_bytes, time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vcpo_rollout", str(self.run_file)),
            *(f"--learner=127.0.0.1:{port}", f"--group={_GROUP}", f"--worker-id={worker_id}"),
            *(f"--listen={_ANY_PORT}", f"--metrics-listen={_ANY_PORT}", "--drain-seconds=0"),
            "--exit-with-parent",
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        stack.push_async_callback(process.wait)
        assert process.stdin is not None
        stack.callback(process.stdin.close)
        died = asyncio.create_task(process.wait())
        waiting = asyncio.create_task(submitted.wait())
        both = {died, waiting}
        await asyncio.wait(both, timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert submitted.is_set(), f"{worker_id} submitted no trajectory"
        died.cancel()
        sent = self.policy.num_bytes - num_bytes
        return {
            "seconds": round(self.work.submitted_s - started_s, 2),
            "weights_s": round(self.work.leased_s - self.policy.first_manifest_s[worker_id], 2),
            "sent_by_learner_over_full": round(sent / self.payload.size_bytes, 3),
        }


def make_model(folder: Path, hidden: int, layers: int) -> LlamaForCausalLM:
    """Return a random model; write its configuration and tokenizer into a folder."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(_TOKENIZER)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM(config)


def _run(folder: Path) -> VCPORun:
    spec = {
        "model": {"name": str(folder / "model")},
        "environment": {"name": "sort_digits"},
        "steps": 100,
        "batch": {"promptsPerStep": 2, "trajectoriesPerPrompt": 2},
        "algorithm": {"maxPolicyLagSteps": 16},
        "sampling": {"maxNewTokens": 4},
        "weights": {"archiveUrl": str(folder / "archive")},
        "rollouts": [
            {"name": _GROUP, "precision": "bfloat16", "maxConcurrentSequences": 2, "threads": 1}
        ],
    }
    document = {"apiVersion": "vcpo.dev/v1alpha1", "kind": "VCPORun"}
    return VCPORun.model_validate({**document, "metadata": {"name": "late-join"}, "spec": spec})


async def measure(folder: Path, *, hidden: int, layers: int) -> dict[str, Any]:
    """Start three workers, one for each source."""
    services = LearnerServices(folder, hidden=hidden, layers=layers)
    num_parameters = sum(tensor.numel() for tensor in tensors_of(services.payload.content).values())
    report: dict[str, Any] = {
        "parameters": num_parameters,
        "full_bytes": services.payload.size_bytes,
    }
    async with AsyncExitStack() as stack:
        port = await services.serve(stack)
        for source in ("learner", "peer", "archive"):
            if source == "archive" and services.archive_writer is not None:
                await services.archive_writer.offer(services.version)
            report[source] = await services.join(stack, port, f"from-{source}")
            print(json.dumps({source: report[source]}), flush=True)
    return report


def main() -> None:
    """Measure and print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hidden", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(
            measure(Path(folder), hidden=arguments.hidden, layers=arguments.layers)
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
