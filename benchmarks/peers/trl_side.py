"""TRL's side: python -m benchmarks.peers.trl_side STEPS SEED; prints its steps as lines of JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.training import (
    MODEL,
    NEW_TOKENS,
    PARAMETERS,
    PROMPTS,
    RATE,
    RESPONSES,
    TASK,
    Step,
)
from vcpo.api.optimizer import Optimizer
from vcpo.service.lifecycle import peak_memory_bytes
from vcpo_rollout.environments import Split, make_environment


class StepTimes(TrainerCallback):
    """Clocks at the end of each step."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the clocks."""
        self.times.append((time.monotonic(), time.process_time()))


def main(num_steps: int, seed: int) -> None:
    """Train, and print each step."""
    torch.set_num_threads(1)
    task = make_environment(TASK, PARAMETERS, seed)
    prompts = [task.prompt(Split.TRAIN, index) for index in range(num_steps * PROMPTS)]

    def reward(completions: list[str], index: list[int], **_: Any) -> list[float]:
        pairs = zip(index, completions, strict=True)
        return [float(task.reward(prompts[number], text)) for number, text in pairs]

    ours, times = Optimizer(), StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=num_steps,
            seed=seed,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta1=ours.beta1,
            adam_beta2=ours.beta2,
            adam_epsilon=ours.epsilon,
            weight_decay=ours.weight_decay,
            max_grad_norm=ours.max_gradient_norm,
            per_device_train_batch_size=PROMPTS * RESPONSES,
            num_generations=RESPONSES,
            max_completion_length=NEW_TOKENS,
            loss_type="grpo",
            gradient_checkpointing=False,
            logging_steps=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        rows = [{"prompt": prompt.text, "index": index} for index, prompt in enumerate(prompts)]
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_list(rows),
            callbacks=[times],
        )
        trainer.train()
    logged = [each for each in trainer.state.log_history if "reward" in each]
    first_s, first_cpu_s = times.times[0]
    for each, (at_s, cpu_s) in zip(logged, times.times, strict=True):
        step = Step(
            reward=each["reward"],
            seconds=at_s - first_s,
            cpu_seconds=cpu_s - first_cpu_s,
            peak_gibibytes=peak_memory_bytes() / 2**30,
        )
        sys.stdout.write(f"STEP {json.dumps(dataclasses.asdict(step))}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
