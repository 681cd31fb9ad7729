"""A trial of a run on this machine: in a process of its own its model answers its first prompts."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from vcpo.api import VCPORun, run_to_yaml
from vcpo.records.samples import TrialEnd, TrialMessage, read_message
from vcpo.service.lifecycle import SERVICE_ENVIRONMENT, describe_exit
from vcpo.service.logs import END_VARIABLE
from vcpo.service.process import module_command

_MODULE = "vcpo_rollout.trial"


class TrialError(RuntimeError):
    """The trial cannot go on; the message begins with the field where the user must correct one."""


def try_run(
    run: VCPORun, num_prompts: int, *, shows_tokens: bool, tell: Callable[[str], None]
) -> Iterator[TrialMessage]:
    """Yield what a trial of a run with local paths tells; its end comes last.

    tell: gets the lines that the user's code, and the libraries, print meanwhile.
    """
    command = module_command(_MODULE, "--samples", str(num_prompts))
    end = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115 - closed below
    process = subprocess.Popen(  # noqa: S603 - our own module, by our own interpreter
        command + ["--tokens"] * shows_tokens,
        env={**SERVICE_ENVIRONMENT, **os.environ, END_VARIABLE: end.name},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    with end, process, ExitStack() as ending:  # its end is waited for once it is killed
        ending.callback(process.kill)  # has no effect on one that has ended
        assert process.stdin is not None  # both are pipes
        assert process.stdout is not None
        told = threading.Thread(target=_tell, args=(process, tell))
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
        if cause := end.read():
            raise TrialError(" ".join(cause.split()))
        if not is_over:
            raise TrialError(f"the process of the trial {describe_exit(status)}; it said no more")


def _tell(process: subprocess.Popen[str], tell: Callable[[str], None]) -> None:
    assert process.stderr is not None  # it is a pipe
    for line in process.stderr:
        tell(line.rstrip())
