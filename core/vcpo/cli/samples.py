"""`vcpo try` and `vcpo samples`: what the model is asked, and what it answers."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from vcpo.api import with_gpu_defaults
from vcpo.cli.console import ERR, fail, require_run, say, tell
from vcpo.cli.run_file import Changes, RunFile, load_file, refuse
from vcpo.local.models import hub_problems, model_problems
from vcpo.local.processes.gpus import local_gpu_use
from vcpo.local.terminal.samples import (
    choose_samples,
    fact_lines,
    prompt_lines,
    response_lines,
    trial_advice,
    trial_facts,
)
from vcpo.local.trial import TrialError, try_run
from vcpo.records.samples import (
    AnsweredPrompt,
    FailedPrompt,
    Sample,
    TrialEnd,
    evenly_by_reward,
    read_samples,
    sampled_steps,
)

_MODULES = ("torch", "transformers", "vcpo_rollout")
_FAILED = 1


def try_file(
    files: RunFile,
    changes: Changes = None,
    prompts: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of prompts; the first of the run.")
    ] = 8,
    answers: Annotated[
        int, typer.Option(min=2, help="Answers shown of a prompt, from the worst to the best.")
    ] = 3,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show prompts token by token, as ID:'TEXT'.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each answer, then the sums, as a line of JSON.")
    ] = False,
) -> None:
    """Let the model answer the first prompts of a run file, and score the answers; train nothing.

    Loads model and environment as a worker does, and samples batch.trajectoriesPerPrompt answers
    to each prompt with the settings of the file. Shows each prompt as the model sees it, answers
    with reward, length and end (`stop`, or `cut` at sampling.maxNewTokens), and what they say of
    the run: how many groups would teach (their rewards are not all equal), how many answers are
    cut, lengths and speed. Nothing is written. What your environment prints is shown, too.

    Exit status: 0; 1 if no prompt was answered; 2 if an option, the file or this machine must be
    fixed first.
    """
    given = load_file(files, changes)
    refuse(files, model_problems(given), modules=_MODULES)
    refuse(files, hub_problems(given))
    spec = with_gpu_defaults(given.spec, local_gpu_use(given.spec))
    loaded = given.model_copy(update={"spec": spec})
    found: list[Sample] = []
    seconds = 0.0
    try:
        with ERR.status("loading the model") as status:
            for message in try_run(
                loaded, prompts, shows_tokens=tokens, tell=lambda line: tell(line, "dim")
            ):
                status.update("sampling")
                match message:
                    case AnsweredPrompt():
                        found += message.samples
                        _show_group(message.samples, answers, as_json=as_json)
                    case FailedPrompt():
                        tell(f"prompt {message.prompt_index} failed: {message.why}")
                    case TrialEnd():
                        seconds = message.seconds
    except TrialError as error:
        fail(str(error))
    if not found:
        raise typer.Exit(_FAILED)
    facts = trial_facts(found, seconds)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for line in fact_lines(facts):
        say(line)
    for advice in trial_advice(facts):
        tell(f"note: {advice}", "yellow")


def samples(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, as `vcpo run` printed it.")
    ],
    best: Annotated[bool, typer.Option("--best", help="The largest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The smallest rewards first.")] = False,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Only of this step, or the last before it that kept samples."),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only with this text in prompt or answer, in any case."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most answers shown.")] = 8,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each answer as one line of JSON.")
    ] = False,
) -> None:
    """Show answers that a run was trained on, with prompt, reward, length and end.

    A run keeps up to eight answers of a step in RUN/samples/, from the worst reward to the best:
    those of its last steps, and of about a hundred others. Without an option the newest step is
    shown; --best, --worst and --grep look through all of them.

    Exit status: 0; 1 if no answer matches; 2 if an option must be fixed first.
    """
    require_run(run_dir)
    if best and worst:
        fail("--worst: not together with --best; give one of them")
    steps = sampled_steps(run_dir)
    if step is not None:
        steps = [each for each in steps if each <= step][-1:]
    elif not (best or worst or grep):
        steps = steps[-1:]
    found = choose_samples(
        read_samples(run_dir, steps), best=best, worst=worst, grep=grep, limit=limit
    )
    if not found:
        tell(f"{run_dir}: no such answer is kept")
        raise typer.Exit(_FAILED)
    for each in found:
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(each)))
        else:
            for line in (*prompt_lines(each), *response_lines(each), ""):
                say(line)


def _show_group(group: Sequence[Sample], most: int, *, as_json: bool) -> None:
    if as_json:
        for each in group:
            typer.echo(json.dumps(dataclasses.asdict(each)))
        return
    for line in prompt_lines(group[0]):
        say(line)
    for each in evenly_by_reward(group, group[0].group_rewards, most):
        for line in response_lines(each):
            say(line)
    say("")
