"""VCPO in TRL: `VCPOTrainer` in place of `GRPOTrainer`, here on data up to three steps old.

    python examples/trl_trainer.py

A tiny model that knows nothing learns to write the digit 7; the reward is its share of the answer.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from vcpo_learner.trl import VCPOTrainer

MODEL = Path(__file__).parent / "models" / "tiny"


def share_of_sevens(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each answer, in [0, 1]."""
    return [text.count("7") / max(len(text), 1) for text in completions]


def train(folder: str, steps: int = 60) -> list[dict[str, float]]:
    """Train, and return what TRL logged of each step."""
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=32,
        num_generations=8,
        steps_per_generation=4,  # four steps on one generation: the last on data three steps old
        max_completion_length=6,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = VCPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        reward_funcs=share_of_sevens,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": f"{digit}?"} for digit in range(10)] * 8),
    )
    trainer.train()
    return [step for step in trainer.state.log_history if "reward" in step]


if __name__ == "__main__":
    for step in train("runs/trl")[::10]:
        reward, ess_ratio = step["reward"], step["vcpo/ess_ratio"]
        print(f"{step['step']:4} reward {reward:.2f} ESS {ess_ratio:.2f}")
