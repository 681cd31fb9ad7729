"""A line of a log in JSON."""

from __future__ import annotations

import json
import logging
import sys

from vcpo.service.log_line import JsonLine

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


def test_the_fields_of_a_call_have_priority():
    assert json.loads(line_of({"version": 1}, extra={"version": 2}))["version"] == 2


def test_a_line_of_kopf_names_the_run_of_its_object():
    about = {"k8s_ref": {"name": "demo", "namespace": "ml", "uid": "7"}, "settings": object()}
    line = json.loads(line_of({"part": "operator", "run": ""}, extra=about))
    assert (line["namespace"], line["run"]) == ("ml", "demo")
    assert not {"k8s_ref", "settings"} & line.keys()


def test_an_exception_is_one_line_and_its_traceback_the_last_field():
    line = line_of({"part": "learner"}, exc_info=raised())
    assert "\n" not in line
    assert list(json.loads(line))[-1] == "exc_info"
