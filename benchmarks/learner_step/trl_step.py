"""TRL's GRPO step: its loss, its output head and its optimizer, on a batch that is given.

The trainer generates nothing here: a batch replaces the one that it would sample.
"""

from __future__ import annotations

import tempfile
from typing import Any, Final

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learner_step.batch import Groups, Size, make_model, tokens_of
from benchmarks.learner_step.sides import LARGEST_GRADIENT_NORM, LEARNING_RATE, group_advantages

_SPECIAL_TOKENS: Final = {"pad_token": "<pad>", "eos_token": "<eos>"}


class TrlStep:
    """One optimizer step as `GRPOTrainer` takes it."""

    def __init__(self, size: Size) -> None:
        self._micro_batch = size.micro_batch
        with tempfile.TemporaryDirectory() as directory:
            self._trainer = _trainer(size, directory)
        self._trainer.model.train()
        self._trainer.current_gradient_accumulation_steps = size.trajectories // size.micro_batch
        self._trainer.create_optimizer()

    def take(self, groups: Groups) -> None:
        """Loss and backward for each micro-batch; then clipping and AdamW."""
        batch = tokens_of(groups)
        prompts, responses = batch.input_ids.tensor_split([batch.num_prompt_tokens], dim=1)
        advantages = torch.tensor(group_advantages(groups))
        for start in range(0, len(prompts), self._micro_batch):
            part = slice(start, start + self._micro_batch)
            inputs = {
                "prompt_ids": prompts[part],
                "prompt_mask": torch.ones_like(prompts[part]),
                "completion_ids": responses[part],
                "completion_mask": torch.ones_like(responses[part]),
                "advantages": advantages[part],
                "old_per_token_logps": batch.rollout_logprobs[part],
            }
            loss: Tensor = self._trainer.compute_loss(self._trainer.model, inputs)
            self._trainer.accelerator.backward(loss)
        parameters = self._trainer.model.parameters()
        self._trainer.accelerator.clip_grad_norm_(parameters, LARGEST_GRADIENT_NORM)
        self._trainer.optimizer.step()
        self._trainer.optimizer.zero_grad()


def _trainer(size: Size, directory: str) -> Any:
    """A trainer whose data, rewards and tokenizer are never used."""
    settings = GRPOConfig(
        output_dir=directory,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.micro_batch,
        gradient_accumulation_steps=size.trajectories // size.micro_batch,
        num_generations=size.trajectories,
        max_completion_length=size.tokens - size.prompt_tokens,
        learning_rate=LEARNING_RATE,
        max_grad_norm=LARGEST_GRADIENT_NORM,
        loss_type="grpo",
    )
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}))
    return GRPOTrainer(
        model=make_model(size),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "<pad>"}] * size.trajectories),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL_TOKENS),
    )
