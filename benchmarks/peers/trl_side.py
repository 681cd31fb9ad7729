"""TRL's side: python -m benchmarks.peers.trl_side MODEL STEPS SEED; its steps are lines of JSON."""

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

from benchmarks.peers.training import STEP_MARK, TRAININGS, Step, Training
from vcpo.api.learner import Optimizer
from vcpo.service.lifecycle import peak_memory_bytes
from vcpo_rollout.environments import Prompt, Split, make_environment
from vcpo_rollout.generation.environment_pool import check_judgement


class StepLines(TrainerCallback):
    """Prints each step when it has ended, with the clocks since the first one."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        self._newest = 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._newest = time.monotonic(), time.process_time()
        self._first = self._first or self._newest

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print a step; what is logged at the end of a training has no reward."""
        if self._first is None or "reward" not in logs:
            return
        step = Step(
            reward=logs["reward"],
            seconds=self._newest[0] - self._first[0],
            cpu_seconds=self._newest[1] - self._first[1],
            peak_gibibytes=peak_memory_bytes() / 2**30,
        )
        print(f"{STEP_MARK}{json.dumps(dataclasses.asdict(step))}", flush=True)


def main(name: str, num_steps: int, seed: int) -> None:
    """Train, and print each step."""
    torch.set_num_threads(1)
    training = TRAININGS[name]
    tokenizer = AutoTokenizer.from_pretrained(training.model)
    task = make_environment(training.task, training.parameters, seed)
    prompts = [task.prompt(Split.TRAIN, index) for index in range(num_steps * training.prompts)]

    def reward(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        pairs = zip(index, completions, strict=True)
        return [
            check_judgement(task.reward(prompts[number], _text(each)), task.reward).reward
            for number, each in pairs
        ]

    is_chat = tokenizer.chat_template is not None
    rows = [
        {"prompt": _asked(prompt, is_chat=is_chat), "index": index}
        for index, prompt in enumerate(prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(training.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            args=_settings(training, num_steps, seed, folder),
            train_dataset=Dataset.from_list(rows),
            callbacks=[StepLines()],
        ).train()


def _settings(training: Training, num_steps: int, seed: int, folder: str) -> GRPOConfig:
    """Return TRL's settings, with our defaults where the two libraries' differ."""
    ours = Optimizer()
    return GRPOConfig(
        output_dir=folder,
        max_steps=num_steps,
        seed=seed,
        learning_rate=training.rate,
        lr_scheduler_type="constant",
        adam_beta1=ours.betas[0],
        adam_beta2=ours.betas[1],
        adam_epsilon=ours.epsilon,
        weight_decay=ours.weight_decay,
        max_grad_norm=ours.max_gradient_norm,
        per_device_train_batch_size=training.prompts * training.responses,
        num_generations=training.responses,
        max_completion_length=training.new_tokens,
        loss_type="grpo",
        gradient_checkpointing=False,
        logging_steps=1,
        bf16=training.is_bfloat16,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def _asked(prompt: Prompt, *, is_chat: bool) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}] if is_chat else prompt.text


def _text(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
