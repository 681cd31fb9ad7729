"""The log of a process: what it says in JSON, and what in text."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from vcpo.service.logs import JsonLine

REQUIRED = {"time", "level", "part", "logger", "message", "run", "namespace", "pod"}


def said(code, **environment):
    """Return the standard error of a process that configures its log and runs code."""
    start = "from vcpo.service import logs; import logging; logs.configure('learner')\n"
    process = subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, "POD_NAME": "demo-learner-0", "POD_NAMESPACE": "ml", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == ""
    return process.stderr


def lines(code):
    found = [json.loads(line) for line in said(code, VCPO_LOG_FORMAT="json").splitlines()]
    assert all(line.keys() >= REQUIRED for line in found)
    return found


def only(code):
    (line,) = lines(code)
    return line


def test_every_line_names_part_pod_namespace_and_once_it_is_known_the_run():
    before, after = lines(
        "logging.warning('a'); logs.identify_process(run='demo', worker='w'); logging.info('b')"
    )
    assert (before["part"], before["pod"], before["namespace"]) == (
        "learner",
        "demo-learner-0",
        "ml",
    )
    assert (before["run"], after["run"], after["worker"]) == ("", "demo", "w")


def test_fields_of_a_context_are_on_the_lines_of_its_tasks_and_threads():
    first, second = lines(
        "import asyncio\n"
        "async def work(): await asyncio.to_thread(logging.info, 'in a thread')\n"
        "async def main():\n"
        "    with logs.log_fields(lease='l-1'):\n"
        "        task = asyncio.create_task(work())\n"
        "    await task\n"
        "    logging.info('outside')\n"
        "asyncio.run(main())"
    )
    assert (first["lease"], "lease" in second) == ("l-1", False)


def test_what_code_prints_is_one_line_for_each_piece():
    first, second, third = lines(
        "import sys\nprint('a', 'b'); sys.stderr.write('two\\nlines\\n'); print('no end', end='')"
    )
    assert (first["message"], first["logger"], first["level"]) == ("a b", "stdout", "INFO")
    assert (second["message"], second["logger"]) == ("two\nlines", "stderr")
    assert (second["level"], third["message"]) == ("WARNING", "no end")


def test_of_a_progress_bar_the_last_state_is_logged():
    line = only("import sys; sys.stderr.write('\\r 1/2'); sys.stderr.write('\\r 2/2\\n')")
    assert line["message"] == " 2/2"


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("raise ValueError('bad')", "CRITICAL"),
        ("import threading\ndef f(): raise ValueError('bad')\nthreading.Thread(target=f).start()",
         "ERROR"),
        ("class C:\n    def __del__(self): raise ValueError('bad')\nC()", "WARNING"),
    ],
    ids=["uncaught", "of a thread", "ignored"],
)  # fmt: skip
def test_an_exception_that_nobody_catches_is_one_line(code, level):
    line = only(code)
    assert line["level"] == level
    assert line["exc_info"].endswith("ValueError: bad")


def test_a_line_that_cannot_be_formatted_says_where_and_why():
    line = only("logging.info('%d', 'x')")
    assert (line["level"], line["exc_info"].splitlines()[-1]) == (
        "ERROR",
        "TypeError: %d format: a real number is required, not str",
    )
    assert "'%d'" in line["message"]


def test_a_process_that_the_service_starts_writes_lines_with_the_same_fields():
    child = (
        "import logging; from vcpo.service import logs;"
        "logging.getLogger().addHandler(logs.line_handler()); logging.warning('from a child')"
    )
    line = only(
        "logs.identify_process(run='demo')\n"
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    assert (line["message"], line["part"], line["run"]) == ("from a child", "learner", "demo")


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise ValueError('bad')", "ValueError: bad"),
        ("raise ExceptionGroup('two', [ExceptionGroup('g', [OSError('no')])])", "OSError: no"),
        ("logs.report_end('engine: it died'); raise ValueError('later')", "engine: it died"),
        ("logging.exception('a task failed')", ""),
    ],
)
def test_the_cause_of_an_end_is_kept_and_the_first_one_stays(tmp_path, form, code, cause):
    file = tmp_path / "end"
    said(code, VCPO_LOG_FORMAT=form, VCPO_TERMINATION_LOG=str(file))
    assert (file.read_text() if file.exists() else "") == cause


def test_text_is_for_people():
    (line,) = said("logging.info('serving')").splitlines()
    assert line.endswith(" INFO serving")


MOMENT_UNIX_S = 1_600_000_000.25  # 2020-09-13 12:26:40.250 UTC


def line_of(fields, *, extra=None, level=logging.INFO, message="step %d", args=(3,), exc_info=None):
    record = logging.makeLogRecord(
        {
            "name": "vcpo_learner.app",
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "msg": message,
            "args": args,
            "created": MOMENT_UNIX_S,
            "exc_info": exc_info,
            **(extra or {}),
        }
    )
    return JsonLine(lambda: fields).format(record)


def raised():
    try:
        int('"7" é')
    except ValueError:
        return sys.exc_info()


def test_a_line_holds_time_level_logger_message_and_the_fields_of_its_process():
    assert json.loads(line_of({"part": "learner", "run": "demo"}, extra={"step": 3})) == {
        "time": "2020-09-13T12:26:40.250Z",
        "level": "INFO",
        "logger": "vcpo_learner.app",
        "message": "step 3",
        "step": 3,
        "part": "learner",
        "run": "demo",
    }


def test_a_line_of_kopf_names_the_run_of_its_object():
    about = {"k8s_ref": {"name": "demo", "namespace": "ml", "uid": "7"}, "settings": object()}
    line = json.loads(line_of({"part": "operator", "run": ""}, extra=about))
    assert (line["namespace"], line["run"]) == ("ml", "demo")
    assert not {"k8s_ref", "settings"} & line.keys()


def test_an_exception_is_one_line_and_its_traceback_the_last_field():
    line = line_of({"part": "learner"}, exc_info=raised())
    assert "\n" not in line
    assert list(json.loads(line))[-1] == "exc_info"
