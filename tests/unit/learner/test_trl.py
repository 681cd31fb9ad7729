"""TRL's trainer with the method, where TRL is installed: gradients, rates and the example."""

import math

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install 'vcpo[trl]'")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from vcpo.algo.ess.importance_weights import NonFiniteWeightError
from vcpo_learner.trl import VCPOTrainer

TINY = "examples/models/tiny"
ACCUMULATED, SIZE = 2, 4


def share_of_sevens(completions, **_):
    return [text.count("7") / max(len(text), 1) for text in completions]


def make_trainer(folder, callbacks=(), **settings):
    config = {
        "max_steps": 2,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "per_device_train_batch_size": SIZE,
        "gradient_accumulation_steps": ACCUMULATED,
        "steps_per_generation": 2 * ACCUMULATED,
        "num_generations": 4,
        "max_completion_length": 5,
        "temperature": 0.7,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return VCPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY),
        processing_class=AutoTokenizer.from_pretrained(TINY),
        reward_funcs=share_of_sevens,
        args=GRPOConfig(output_dir=str(folder), **config | settings),
        train_dataset=Dataset.from_list([{"prompt": f"{digit}?"} for digit in range(10)]),
        callbacks=list(callbacks),
    )


class StepsSeen(TrainerCallback):
    """Keeps the model before each step, its gradient, and the rate after it."""

    def __init__(self):
        self.models, self.gradients, self.rates = [], [], []

    def on_step_begin(self, args, state, control, model=None, **_):
        before = AutoModelForCausalLM.from_pretrained(TINY)
        before.load_state_dict(model.state_dict())
        self.models.append(before)

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append([each.grad.clone() for each in model.parameters()])

    def on_step_end(self, args, state, control, optimizer=None, **_):
        self.rates.append(optimizer.param_groups[0]["lr"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Two steps on one generation, and the trainer."""
    steps = StepsSeen()
    torch.manual_seed(3)
    trainer = make_trainer(tmp_path_factory.mktemp("trl"), [steps])
    trainer.train()
    return steps, trainer


def trajectories(trainer, step):
    """Prompt, completion, its sampler's log-probabilities and reward of each one in a step."""
    for batch in trainer._buffered_inputs[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
        for row, kept in enumerate(batch["completion_mask"].bool()):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            old = batch["old_per_token_logps"][row][kept]
            yield prompt, batch["completion_ids"][row][kept], old, float(batch["rewards"][row])


def expected_gradient(model, trainer, step):
    """One backward pass a trajectory, and the formulas of vcpo2; the log weights too."""
    terms, norms, rewards, weights = [], [], [], []
    for prompt, completion, old, reward in trajectories(trainer, step):
        tokens = torch.cat([prompt, completion])[None]
        logits = model(tokens).logits[0, len(prompt) - 1 : -1] / 0.7
        logprobs = logits.log_softmax(-1).gather(1, completion[:, None])[:, 0]
        log_weight = float((logprobs.detach() - old).sum())
        term = min(math.exp(log_weight), 8.0) * logprobs.mean()
        gradient = torch.autograd.grad(term, list(model.parameters()))
        terms.append(gradient)
        norms.append(sum(float(each.square().sum()) for each in gradient))
        rewards.append(reward)
        weights.append(log_weight)
    optimal = sum(map(math.prod, zip(norms, rewards, strict=True))) / sum(norms)
    coverage = min(1.0, sum(min(math.exp(each), 8.0) for each in weights) / len(weights))
    baseline = coverage * optimal + (1 - coverage) * min(rewards)
    shares = [-(reward - baseline) / len(rewards) for reward in rewards]
    return [
        sum(share * each for share, each in zip(shares, of_one, strict=True))
        for of_one in zip(*terms, strict=True)
    ], weights


@pytest.mark.parametrize("step", [0, 1])
def test_a_steps_gradient_is_that_of_one_backward_pass_a_trajectory(seen, step):
    steps, trainer = seen
    expected, log_weights = expected_gradient(steps.models[step], trainer, step)
    assert len(log_weights) == ACCUMULATED * SIZE
    assert (max(map(abs, log_weights)) > 1e-3) == (step == 1)  # the second one is off-policy
    for found, wanted in zip(steps.gradients[step], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_a_step_is_taken_at_the_rate_of_its_batch_and_the_scheduler_never_sees_it(seen):
    steps, trainer = seen
    first, second = (list(model.parameters()) for model in steps.models)
    gradient = steps.gradients[0]
    moved = (first[0] - second[0]).detach().norm() / gradient[0].norm()
    assert float(moved) == pytest.approx(0.5 / 32, rel=1e-3)  # where vcpo2 begins
    assert trainer.state.log_history[0]["vcpo/rate"] == pytest.approx(0.5 / 32)
    assert steps.rates == [0.5, 0.5]


def test_a_run_that_resumes_takes_the_rates_of_one_that_went_on(tmp_path):
    def rates(steps, **keywords):
        torch.manual_seed(3)
        saves = {"save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(tmp_path, max_steps=steps, learning_rate=1e-3, **saves)
        trainer.train(**keywords)
        return [each["vcpo/rate"] for each in trainer.state.log_history if "vcpo/rate" in each]

    whole = rates(4)
    assert whole[2] >= 1e-3 / 8  # it at least doubles from 1 / 32 on
    resumed = rates(4, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed[2:] == pytest.approx(whole[2:])


@pytest.mark.parametrize("where", ["sampled", "padding"])
def test_a_number_that_is_none_raises_in_a_response_only(tmp_path, where):
    trainer = make_trainer(tmp_path)
    whole = trainer._generate_and_score_completions

    def with_nan(inputs):
        output = whole(inputs)
        mask = output["completion_mask"].bool()
        mask[:, 0] = True
        old = output["old_per_token_logps"]
        place = mask if where == "sampled" else ~mask
        return output | {"old_per_token_logps": old.masked_fill(place, math.nan)}

    trainer._generate_and_score_completions = with_nan
    if where == "sampled":
        with pytest.raises(NonFiniteWeightError):
            trainer.train()
    else:
        trainer.train()
        assert all(each.isfinite().all() for each in trainer.model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"beta": 0.1}, "beta is 0.1"), ({"fp16": True}, "fp16 is True")],
    ids=str,
)
def test_what_the_method_has_no_place_for_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **settings)
