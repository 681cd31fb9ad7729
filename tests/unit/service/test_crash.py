"""The cause of a process's death, read from the end of its log."""

from __future__ import annotations

import signal

import pytest

from vcpo.service.crash import crash_cause, describe_exit

TRACEBACK = """Traceback (most recent call last):
  File "/app/learner.py", line 12, in step
    loss.backward()
  File "/app/torch/_tensor.py", line 581, in backward
    torch.autograd.backward(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""
HEAD = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n'
HANDLING = f"""
During handling of the above exception, another exception occurred:

{HEAD}SystemExit: 3
"""
BAR = "Loading weights:  50%|#####     | 1/2 [00:00<00:00,  9.11it/s]"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (
            f"{TRACEBACK}{BAR}\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (
            f"{TRACEBACK}{HANDLING}/usr/lib/resource_tracker.py: UserWarning: leaked semaphore\n",
            "SystemExit: 3",
        ),
        (
            f"{HEAD}    load(\n    ~~~~^\nKeyError\n",
            "KeyError",
        ),
        (
            f"{HEAD}ValidationError: 2 bad:\n  spec.steps: too small\n",
            "ValidationError: 2 bad: spec.steps: too small",
        ),
    ],
    ids=["a traceback", "a bar after it", "the last of several", "no message", "a colon's rest"],
)
def test_a_traceback_is_summed_up_by_its_exception(log, cause):
    assert crash_cause(f"2026-01-01 INFO starting\n{log}") == cause


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("first\nsecond\n\n", "second"),
        (f"serving\n{BAR}\r{BAR}\n", "serving"),
        (f"{BAR}\rthe reason\n", "the reason"),
        ("\x1b[31mred\x1b[0m\n", "red"),
        (
            "terminate called\n  what():  CUDA error: device lost\n",
            "what(): CUDA error: device lost",
        ),
        ("12%|# | 1/8 [00:01<00:09,  1.1s/it]\n", ""),
        ("", ""),
    ],
)
def test_without_a_traceback_the_last_line_that_says_something_is_the_cause(log, cause):
    assert crash_cause(log) == cause


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
CUT = TRACEBACK.partition("\n")[2][20:]  # as a kubelet keeps the last bytes only
IGNORED = "Exception ignored in: <function Pool.__del__ at 0x7f01>\n"
IGNORED_TRACEBACK = f"{IGNORED}{HEAD}    self.close()\nTypeError: 'NoneType' is not callable\n"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (CUT, OUT_OF_MEMORY),
        (f"{CUT}{IGNORED}", OUT_OF_MEMORY),
        (f"{CUT}{IGNORED_TRACEBACK}", OUT_OF_MEMORY),
        (f"{TRACEBACK}{IGNORED_TRACEBACK}", OUT_OF_MEMORY),
        (f"{CUT}Compile with TORCH_USE_CUDA_DSA to see more.\n", OUT_OF_MEMORY),
        (f"{CUT}{HANDLING}", "SystemExit: 3"),
        ("    load(\nException: no\nbye\n", "Exception: no"),
        ("    wait()\nKeyboardInterrupt\nbye\n", "KeyboardInterrupt"),
        ("    load(\nExceptionGroup: both (2 of them)\nbye\n", "ExceptionGroup: both (2 of them)"),
        ("Errors were seen:\n  at dawn\nErrors: none at noon\nbye\n", "bye"),
    ],
    ids=["cut", "ignored", "ignored traceback", "whole, ignored traceback", "a hint after it",
         "another after it", "Exception", "no message", "group", "no exception"],
)  # fmt: skip
def test_a_traceback_without_its_head_is_summed_up_by_its_exception(log, cause):
    assert crash_cause(log) == cause


def test_what_was_ignored_is_the_cause_where_nothing_else_is_said():
    assert crash_cause(IGNORED) == "Exception ignored in: <function Pool.__del__ at 0x7f01>"


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/app/app.py", line 4, in main
  |     async with asyncio.TaskGroup() as tasks:
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Exception Group Traceback (most recent call last):
    |   File "/app/learner.py", line 8, in step
    | ExceptionGroup: one step (1 sub-exception)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "/app/learner.py", line 2, in backward
      | RuntimeError: CUDA out of memory.
      +------------------------------------
"""
NEVER_RAISED = """  + Exception Group Traceback (most recent call last):
  |   File "/app/app.py", line 4, in check
  | ExceptionGroup: two fields (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: a
    +---------------- 2 ----------------
    | KeyError: 'b'
    +------------------------------------
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (GROUP, "RuntimeError: CUDA out of memory."),
        (GROUP[GROUP.index("line 2,") :], "RuntimeError: CUDA out of memory."),
        (f"{GROUP}{HANDLING}", "SystemExit: 3"),
        (NEVER_RAISED, "ExceptionGroup: two fields (2 sub-exceptions)"),
        (NEVER_RAISED[60:], "ExceptionGroup: two fields (2 sub-exceptions)"),
    ],
    ids=["nested", "nested, cut", "another after it", "never raised", "never raised, cut"],
)
def test_an_exception_group_is_summed_up_by_what_is_in_it(log, cause):
    assert crash_cause(log) == cause


def test_a_traceback_that_broke_off_is_summed_up_by_its_last_line():
    log = 'Traceback (most recent call last):\n  File "/app/learner.py", line 12, in step\n'
    assert crash_cause(log) == 'File "/app/learner.py", line 12, in step'


def test_what_the_user_must_put_right_is_the_cause_whatever_else_is_said():
    log = f"{TRACEBACK}retrying\nvcpo: cannot start: run.yaml: 2 problems\n  spec.steps: missing\n"
    assert crash_cause(log) == "run.yaml: 2 problems spec.steps: missing"


def test_the_end_that_a_process_reports_is_its_cause_and_no_traceback_that_it_survived():
    log = f"{TRACEBACK}retrying\nvcpo: ends: set aside by the learner\nException ignored in: f\n"
    assert crash_cause(log) == "set aside by the learner"


def test_a_long_cause_is_truncated():
    cause = crash_cause("ValueError: " + "x" * 10_000)
    assert len(cause) == 500
    assert cause.endswith("...")


@pytest.mark.parametrize(
    ("exit_code", "described"),
    [
        (1, "ended with status 1"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL, as the system does when memory runs out"),
        (-100, "was killed by signal 100"),
    ],
)
def test_an_exit_code_is_described_in_words(exit_code, described):
    assert describe_exit(exit_code) == described
