"""Make the tiny character-level model of the examples: half-trained, so that RL has work to do.

The model answers two tasks in the plain style, `sort_digits` and a small `countdown`. It first
learns from right demonstrations, and then for a while from demonstrations that are right only with
a given probability and plausibly wrong otherwise. So it knows the form of an answer, and more of
the substance than it says: sampled at temperature 1 it is wrong more often than it has to be.
Prompts are of the training split only; the accuracies it prints are on held-out prompts.

    python examples/models/make_tiny_model.py --output examples/models/tiny

The same seed on the same machine gives the same file. The last line printed is JSON.
"""

import argparse
import json
import math
import string
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import cycle, permutations
from pathlib import Path
from random import Random
from typing import Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vcpo_rollout.environments import Environment, Prompt, Split, make_environment
from vcpo_rollout.environments.arithmetic import calculate

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ANSWER_TAGS: Final = ("<answer>", "</answer>")
MAX_POSITIONS: Final = 512
MAX_RESPONSE_TOKENS: Final = 24
IGNORED: Final = -100
"""The label that PyTorch's cross entropy leaves out."""

TASKS: Final[Mapping[str, Mapping[str, object]]] = {
    "sort_digits": {"digits": 5, "style": "plain"},
    "countdown": {
        "numbers": 3,
        "values": [1, 20],
        "targets": [1, 100],
        "operators": "+-*",
        "style": "plain",
    },
}
"""The two tasks with the parameters that the examples use too."""


SHAPES: Final = (
    "{}+{}+{}",
    "{}+{}-{}",
    "{}-{}-{}",
    "{}*{}+{}",
    "{}*{}-{}",
    "{}-{}*{}",
    "({}+{})*{}",
    "({}-{})*{}",
    "{}*{}*{}",
)
"""Every value that three numbers and + - * can make, a negative one aside, has one of these."""

DEMONSTRATIONS_PER_ROUND: Final[Mapping[str, int]] = {"sort_digits": 1, "countdown": 2}
"""How often each task is shown; countdown is the harder one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stretch of training."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    """The highest one, reached after the warm-up."""

    correct_share: Mapping[str, float]
    """For each task, the probability in [0, 1] that a demonstration is right."""


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


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained model with heads of 32, a size that vLLM serves on a CPU too.

    Llama's shape, because transformers 5 replaces the tokenizer of a folder that says `qwen2` by
    Qwen's own, which drops our spaces.
    """
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def sort_demonstration(prompt: Prompt, *, correct: bool, random: Random) -> str:
    """Return the sorted digits, or the same digits in another order where there is one."""
    digits = list(prompt.answer)
    while not correct and len(set(digits)) > 1 and "".join(digits) == prompt.answer:
        random.shuffle(digits)
    return "".join(digits)


@cache
def simplest_solution(numbers: tuple[int, ...], target: int) -> str:
    """Return the first shape in `SHAPES`, with the larger numbers first, that hits the target.

    One fixed solution per puzzle is a function that a small model can learn; the environment's own
    solution is one of several at random. numbers: sorted, largest first.
    """
    for shape in SHAPES:
        for order in permutations(numbers):
            expression = shape.format(*order)
            calculation = calculate(expression)
            if calculation is not None and calculation.value == target:
                return expression
    raise ValueError(f"numbers: {numbers} cannot make the target {target} with + - *")


def countdown_demonstration(prompt: Prompt, *, correct: bool, random: Random) -> str:
    """Return a solution, or an expression of a random shape with the same numbers."""
    puzzle = json.loads(prompt.answer)
    numbers = tuple(sorted(puzzle["numbers"], reverse=True))
    if correct:
        expression = simplest_solution(numbers, puzzle["target"])
    else:
        expression = random.choice(SHAPES).format(*random.sample(numbers, len(numbers)))
    return f"{ANSWER_TAGS[0]}{expression}{ANSWER_TAGS[1]}"


DEMONSTRATIONS: Final = {
    "sort_digits": sort_demonstration,
    "countdown": countdown_demonstration,
}


def demonstrations(
    environments: Mapping[str, Environment], stage: Stage, seed: int
) -> Iterator[tuple[str, str]]:
    """Yield (prompt, response) for ever, the tasks in turn, from training prompts only."""
    random = Random(f"{seed}/{stage.name}")  # noqa: S311 - repeatable on purpose
    order = [name for name, times in DEMONSTRATIONS_PER_ROUND.items() for _ in range(times)]
    for name in cycle(order):
        prompt = environments[name].prompt(Split.TRAIN, random.randrange(10**9))
        correct = random.random() < stage.correct_share[name]
        yield prompt.text, DEMONSTRATIONS[name](prompt, correct=correct, random=random)


def token_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> tuple[Tensor, Tensor]:
    """Return (token ids, labels), both [batch, seq]; prompt and padding labels are ignored."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in pairs]
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, IGNORED)
    for row, (prompt, answer) in enumerate(rows):
        tokens = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        ids[row, : len(tokens)] = tokens
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return ids, labels


def learning_rate_scale(step: int, steps: int, warmup_steps: int = 50) -> float:
    """Return the factor on the learning rate: linear warm-up, then half a cosine down to 0."""
    return min(1.0, (step + 1) / warmup_steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: Iterator[tuple[str, str]],
    stage: Stage,
) -> None:
    """Fit the model to demonstrations in place, and print a line of progress now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.learning_rate, weight_decay=0.1)
    started = time.monotonic()
    for step in range(stage.steps):
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * learning_rate_scale(step, stage.steps)
        ids, labels = token_batch(tokenizer, [next(pairs) for _ in range(stage.batch_size)])
        logits = model(input_ids=ids).logits[:, :-1]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # torch does not type it
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == stage.steps:
            elapsed_s = time.monotonic() - started
            print(
                f"{stage.name} {step + 1}/{stage.steps}  loss {loss.item():.3f}  {elapsed_s:.0f} s",
                flush=True,
            )


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: Environment,
    *,
    num_prompts: int = 500,
    sample: bool = True,
) -> float:
    """Return the mean reward, in [0, 1], of one response to each held-out prompt.

    sample: draw at temperature 1, otherwise take the likeliest token.
    """
    prompts = [environment.prompt(Split.EVALUATION, index) for index in range(num_prompts)]
    batch = tokenizer([prompt.text for prompt in prompts], return_tensors="pt", padding=True)
    # transformers samples from the 50 likeliest tokens unless it is told not to.
    choice = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(  # type: ignore[misc] # transformers types it for another class
        **batch, **choice, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    responses = tokenizer.batch_decode(
        tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    rewards = map(environment.reward, prompts, responses)
    return sum(rewards) / num_prompts


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model folder, and check that it loads with the tokenizer that was trained with."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    text = f"24 from 3 5 9: {ANSWER_TAGS[0]}3*5+9{ANSWER_TAGS[1]}"
    loaded = AutoTokenizer.from_pretrained(output)
    if loaded.encode(text) != tokenizer.encode(text) or loaded.decode(loaded.encode(text)) != text:
        raise RuntimeError(f"{output}: AutoTokenizer loads another tokenizer than was saved")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    here = Path(__file__).parent
    parser.add_argument("--output", type=Path, default=here / "tiny", help="model folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling")
    parser.add_argument("--learn-steps", type=int, default=1500, help="steps on right answers")
    parser.add_argument("--blur-steps", type=int, default=400, help="steps on mixed answers")
    parser.add_argument("--batch-size", type=int, default=128, help="demonstrations per step")
    parser.add_argument(
        "--sort-correct", type=float, default=0.5, help="right share of mixed sort_digits answers"
    )
    parser.add_argument(
        "--countdown-correct", type=float, default=0.5, help="right share of mixed countdown ones"
    )
    return parser.parse_args()


def stages(arguments: argparse.Namespace) -> tuple[Stage, Stage]:
    """Return the two stages of training in order."""
    learn = Stage(
        name="learn",
        steps=arguments.learn_steps,
        batch_size=arguments.batch_size,
        learning_rate=2e-3,
        correct_share=dict.fromkeys(TASKS, 1.0),
    )
    blur = Stage(
        name="blur",
        steps=arguments.blur_steps,
        batch_size=arguments.batch_size,
        learning_rate=5e-4,
        correct_share={
            "sort_digits": arguments.sort_correct,
            "countdown": arguments.countdown_correct,
        },
    )
    return learn, blur


def main() -> None:
    """Build, train, measure and save."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    environments = {
        name: make_environment(name, parameters, arguments.seed)
        for name, parameters in TASKS.items()
    }
    result: dict[str, object] = {"parameters": model.num_parameters()}
    for stage in stages(arguments):
        train(model, tokenizer, demonstrations(environments, stage, arguments.seed), stage)
        for name, environment in environments.items():
            for choice in ("sampled", "greedy"):
                figure = accuracy(model, tokenizer, environment, sample=choice == "sampled")
                result[f"{name}_{choice}_after_{stage.name}"] = figure
    save(model, tokenizer, arguments.output)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
