"""A trial of a run on this machine: in a process of its own its model answers its first prompts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from vcpo.api import VCPORun, run_to_yaml
from vcpo.records.trial import TrialEnd, TrialMessage, read_message
from vcpo.service.crash import describe_exit
from vcpo.service.lifecycle import SERVICE_ENVIRONMENT, START_ERROR_MARK

_MODULE = "vcpo_rollout.trial"


class TrialError(RuntimeError):
    """The trial cannot go on; the message begins with the field where the user must correct one."""


def try_run(
    run: VCPORun, num_prompts: int, *, shows_tokens: bool, tell: Callable[[str], None]
) -> Iterator[TrialMessage]:
    """Yield what a trial of a run with local paths tells; its end comes last.

    tell: gets the lines that the user's code, and the libraries, print meanwhile.

    Raises:
        TrialError: when the run cannot be tried, or the process ends before.
    """
    command = [sys.executable, "-m", _MODULE, "--samples", str(num_prompts)]
    process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
        command + ["--tokens"] * shows_tokens,
        env={**SERVICE_ENVIRONMENT, **os.environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    with process, ExitStack() as ending:  # its end is waited for once it is killed
        ending.callback(process.kill)  # has no effect on one that has ended
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        told = threading.Thread(target=_tell, args=(process, tell, refused := list[str]()))
        told.start()
        with suppress(BrokenPipeError):  # it has ended, and its lines say why
            process.stdin.write(run_to_yaml(run))
            process.stdin.close()
        is_over = False
        for line in process.stdout:
            message = read_message(line)
            is_over = isinstance(message, TrialEnd)
            yield message
        status = process.wait()
        told.join()
        if refused:
            raise TrialError(" ".join(refused).strip())
        if not is_over:
            raise TrialError(f"the process of the trial {describe_exit(status)}; it said no more")


def _tell(process: subprocess.Popen[str], tell: Callable[[str], None], refused: list[str]) -> None:
    """Pass on what the process prints; what follows the mark of a start error is collected."""
    assert process.stderr is not None  # it is a pipe
    for line in process.stderr:
        _, mark, what = line.partition(START_ERROR_MARK)
        if mark or refused:
            refused.append((what if mark else line).strip())
        else:
            tell(line.rstrip())
