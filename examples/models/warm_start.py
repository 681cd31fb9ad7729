"""A warm start: a tiny model, its tokenizer, its training on demonstrations, and its accuracy."""

import math
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.models.demonstrations import ANSWER_TAGS, Parts
from vcpo_rollout.environments import Environment, Prompt, Split
from vcpo_rollout.environments.environment import Conversation, MultiTurnEnvironment

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_POSITIONS: Final = 512
IGNORED: Final = -100
"""The label that PyTorch's cross entropy leaves out."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character, and one per answer tag."""
    characters = [character for character in string.printable if character >= " "] + ["\n"]
    tokens = [PAD, EOS, UNKNOWN, *ANSWER_TAGS, *characters]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    # Not special: a decoder that skips special tokens must keep them, the reward reads them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ANSWER_TAGS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers does not type it
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 64, num_layers: int = 3
) -> LlamaForCausalLM:
    """Return an untrained model with heads of 32, a size that vLLM serves on a CPU too.

    hidden_size: a multiple of 32.

    Llama's shape, because transformers 5 replaces the tokenizer of a folder that says `qwen2` by
    Qwen's own, which drops our spaces.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)  # type: ignore[no-untyped-call] # transformers does not type it


def token_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, Parts]]
) -> tuple[Tensor, Tensor]:
    """Return (token ids, labels), both [batch, seq]; only what the model writes has labels."""
    rows = [_tokens_and_labels(tokenizer, prompt, parts) for prompt, parts in pairs]
    width = max(len(tokens) for tokens, _ in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (tokens, row_labels) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens)] = torch.tensor(row_labels)
    return ids, labels


def _tokens_and_labels(
    tokenizer: PreTrainedTokenizerFast, prompt: str, parts: Parts
) -> tuple[list[int], list[int]]:
    tokens = tokenizer.encode(prompt)
    labels = [IGNORED] * len(tokens)
    for part in parts:
        written = tokenizer.encode(part.text)
        if part.is_sampled:
            written.append(tokenizer.eos_token_id)
        tokens += written
        labels += written if part.is_sampled else [IGNORED] * len(written)
    return tokens, labels


def learning_rate_scale(step: int, steps: int, warmup_steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up, then half a cosine down to 0."""
    return min(1.0, (step + 1) / warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Iterator[tuple[str, Parts]],
    *,
    name: str,
    steps: int,
    batch_size: int,
    learning_rate: float,
    warmup_steps: int = 50,
) -> None:
    """Fit the model to demonstrations in place, and print a line of progress now and then.

    learning_rate: the highest one, reached after the warm-up.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.1)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * learning_rate_scale(step, steps, warmup_steps)
        ids, labels = token_batch(tokenizer, [next(pairs) for _ in range(batch_size)])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch does not type it
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            elapsed_s = time.monotonic() - started
            print(
                f"{name} {step + 1}/{steps}  loss {loss.item():.3f}  {elapsed_s:.0f} s", flush=True
            )


@dataclass(slots=True)
class SingleTurn:
    """The conversation of an environment that has none: one turn, and its reward."""

    prompt: Prompt
    judge: Callable[[Prompt, str], float]
    response: str = field(default="", init=False)

    def next_turn(self, response: str) -> None:
        """Keep the response; there is no reply."""
        self.response = response

    def reward(self) -> float:
        """Return the reward of the response."""
        return self.judge(self.prompt, self.response)


def begin(environment: Environment, prompt: Prompt) -> Conversation:
    """Begin a conversation about a prompt, of a single turn if the environment knows no other."""
    if isinstance(environment, MultiTurnEnvironment):
        return environment.converse(prompt)
    return SingleTurn(prompt, environment.reward)


def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: Environment,
    *,
    max_turn_tokens: int,
    sample: bool,
    num_prompts: int = 500,
) -> float:
    """Return the mean reward, in [0, 1], of one response to each held-out prompt.

    sample: draw at temperature 1, otherwise take the likeliest token.
    """
    prompts = [environment.prompt(Split.EVALUATION, index) for index in range(num_prompts)]
    conversations = [begin(environment, prompt) for prompt in prompts]
    histories = {number: prompt.text for number, prompt in enumerate(prompts)}
    while histories:
        turns = next_turns(model, tokenizer, list(histories.values()), max_turn_tokens, sample)
        for number, turn in zip(list(histories), turns, strict=True):
            reply = conversations[number].next_turn(turn)
            if reply is None:
                del histories[number]
            else:
                histories[number] += f"{turn}{EOS}{reply}"
    return sum(conversation.reward() for conversation in conversations) / num_prompts


@torch.no_grad()
def next_turns(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    histories: list[str],
    max_tokens: int,
    sample: bool,
) -> list[str]:
    """Return the model's next turn after each history, without the end token."""
    batch = tokenizer(histories, return_tensors="pt", padding=True)
    # transformers samples from the 50 likeliest tokens unless it is told not to.
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(  # type: ignore[misc] # transformers types it for another class
        **batch, **choice, max_new_tokens=max_tokens
    )
    turns = tokens[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(turns, skip_special_tokens=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model folder, and check that it loads with the tokenizer that was trained with."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    text = f"24 from 3 5 9: {ANSWER_TAGS[0]}3*5+9{ANSWER_TAGS[1]}"
    loaded = AutoTokenizer.from_pretrained(output)
    if loaded.encode(text) != tokenizer.encode(text) or loaded.decode(loaded.encode(text)) != text:
        raise RuntimeError(f"{output}: AutoTokenizer loads another tokenizer than was saved")
