"""TRL's GRPO step: its loss, its output head and its optimizer, on a batch that is given.

The trainer generates nothing here: a batch replaces the one that it would sample.
"""

import tempfile
from typing import Any, Final

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.plain_step import Groups, group_advantages, tokens_of

LARGEST_GRADIENT_NORM: Final = 1.0
_SPECIAL_TOKENS: Final = {"pad_token": "<pad>", "eos_token": "<eos>"}


class TrlStep:
    """One optimizer step as `GRPOTrainer` takes it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        trajectories: int,
        micro_batch: int,
        response_tokens: int,
        learning_rate: float,
        uses_bfloat16: bool = False,
    ) -> None:
        """Take over a model; layers compute their activations again if it says so.

        trajectories: of a batch, which is one group. micro_batch: trajectories in a forward pass.
        """
        self._micro_batch = micro_batch
        with tempfile.TemporaryDirectory() as directory:
            settings = GRPOConfig(
                output_dir=directory,
                report_to=[],
                use_cpu=model.device.type == "cpu",
                bf16=uses_bfloat16,
                gradient_checkpointing=model.is_gradient_checkpointing,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=trajectories // micro_batch,
                num_generations=trajectories,
                max_completion_length=response_tokens,
                learning_rate=learning_rate,
                max_grad_norm=LARGEST_GRADIENT_NORM,
                loss_type="grpo",
            )
            self._trainer = _trainer(model, settings, trajectories)
        self._trainer.model.train()
        self._trainer.current_gradient_accumulation_steps = trajectories // micro_batch
        self._trainer.create_optimizer()

    def take(self, groups: Groups) -> None:
        """Loss and backward for each micro-batch; then clipping and AdamW."""
        batch = tokens_of(groups, self._trainer.model.device)
        prompts, responses = batch.input_ids.tensor_split([batch.num_prompt_tokens], dim=1)
        advantages = group_advantages(batch)
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


def _trainer(model: PreTrainedModel, settings: GRPOConfig, trajectories: int) -> Any:
    """A trainer whose data, rewards and tokenizer are never used."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}))
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": "<pad>"}] * trajectories),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **_SPECIAL_TOKENS),
    )
