"""What the optimal baseline costs: CPU seconds of one update with `opob` and with `none`.

A Llama of 3 layers with random parameters is updated on random trajectories of one length. The two
sides differ in one thing: `opob` measures the gradient norm of every trajectory. Simplifications:
every group has unequal rewards, so nothing is skipped; the sides take turns and the smallest of the
repeated times is reported, since whatever else runs on the machine only ever adds.

    python -m benchmarks.update_cost

The last line printed is JSON, with `ratio_opob_vs_plain` for the first size.
"""

import argparse
import json
import math
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vcpo.algo import Baseline
from vcpo.spec import VCPORunSpec
from vcpo.wire.trajectory import FinishReason, Trajectory, VersionSpan
from vcpo_learner.update import PolicyUpdate

VOCABULARY = 100
GROUP_SIZE = 8
PAD_TOKEN_ID = 0


def make_model(hidden_size: int) -> LlamaForCausalLM:
    """A Llama of 3 layers with heads of 32 and random parameters."""
    torch.manual_seed(0)
    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=PAD_TOKEN_ID,
    )
    return LlamaForCausalLM(config)


def make_spec(baseline: Baseline, num_trajectories: int, micro_batch: int) -> VCPORunSpec:
    """The run's settings; only the baseline differs between the two sides."""
    return VCPORunSpec.model_validate(
        {
            "model": {"name": "random"},
            "environment": {"name": "random"},
            "steps": 1,
            "algorithm": {"baseline": baseline, "onPolicyEssRatio": 1.0},
            "batch": {
                "promptsPerStep": num_trajectories // GROUP_SIZE,
                "trajectoriesPerPrompt": GROUP_SIZE,
                "microBatchTrajectories": micro_batch,
            },
        }
    )


def make_groups(
    num_trajectories: int, prompt_tokens: int, response_tokens: int
) -> list[list[Trajectory]]:
    """Random tokens; rewards 1 and 2 in turn; weights near 1 under an untrained model."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, VOCABULARY, (count,), generator=generator).tolist())

    return [
        [
            Trajectory(
                trajectory_id=f"{group}/{row}",
                prompt_token_ids=tokens(prompt_tokens),
                response_token_ids=tokens(response_tokens),
                rollout_logprobs=(-4.6,) * response_tokens,
                version_spans=(VersionSpan(policy_version=0, num_tokens=response_tokens),),
                reward=float(1 + row % 2),
                finish_reason=FinishReason.STOP,
            )
            for row in range(GROUP_SIZE)
        ]
        for group in range(num_trajectories // GROUP_SIZE)
    ]


def update_seconds(hidden_size: int, arguments: argparse.Namespace) -> dict[Baseline, float]:
    """Least CPU seconds of one update by baseline, in turn, after one that is not counted."""
    groups = make_groups(arguments.trajectories, arguments.prompt_tokens, arguments.response_tokens)
    updates = {}
    for baseline in (Baseline.NONE, Baseline.OPOB):
        spec = make_spec(baseline, arguments.trajectories, arguments.micro_batch)
        updates[baseline] = PolicyUpdate(make_model(hidden_size), spec, PAD_TOKEN_ID)
        timed_step(updates[baseline], groups)
    least_s = dict.fromkeys(updates, math.inf)
    for _ in range(arguments.repeats):
        for baseline, update in updates.items():
            least_s[baseline] = min(least_s[baseline], timed_step(update, groups))
    return least_s


def timed_step(update: PolicyUpdate, groups: list[list[Trajectory]]) -> float:
    """CPU seconds of one update."""
    started = time.process_time()
    result = update.step(groups, policy_version=0)
    seconds = time.process_time() - started
    if result.skipped:
        raise RuntimeError(f"the update was skipped: {result.skipped}")
    return seconds


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256], help="multiples of 32")
    parser.add_argument("--trajectories", type=int, default=128, help="multiple of 8")
    parser.add_argument("--prompt-tokens", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--response-tokens", type=int, default=16, help="tokens of each response")
    parser.add_argument("--micro-batch", type=int, default=128, help="trajectories in one pass")
    parser.add_argument("--repeats", type=int, default=5, help="updates timed for each case")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Time every size with both baselines."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    sizes = {}
    for hidden_size in arguments.hidden:
        least_s = update_seconds(hidden_size, arguments)
        plain_s, opob_s = least_s[Baseline.NONE], least_s[Baseline.OPOB]
        ratio = opob_s / plain_s
        print(f"hidden {hidden_size}: none {plain_s:.3f} s, opob {opob_s:.3f} s, {ratio:.2f} times")
        sizes[str(hidden_size)] = {
            "plain_s": round(plain_s, 4),
            "opob_s": round(opob_s, 4),
            "ratio_opob_vs_plain": round(ratio, 3),
        }
    first = sizes[str(arguments.hidden[0])]
    print(json.dumps({"ratio_opob_vs_plain": first["ratio_opob_vs_plain"], "by_hidden": sizes}))


if __name__ == "__main__":
    main()
