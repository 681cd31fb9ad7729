"""A fault on the wire is told of, whenever the run comes to notice it."""

import random
import re
from pathlib import Path

import pytest

from tests.chaos import live_run, wire_faults

LOG = Path("learner.log")


class Proxy:
    num_links = 2

    def __init__(self, when_cut):
        self._when_cut = list(when_cut)
        self.num_cuts = 0

    def cut(self):
        self.num_cuts += 1
        if self._when_cut:
            self._when_cut.pop(0)()
        return self.num_links


class Run:
    """Its log, in memory, and a proxy."""

    def __init__(self, lines_by_cut=()):
        self.log = ""
        self.proxy = Proxy(lambda line=line: self.say(line) for line in lines_by_cut)
        self.certificates = self

    def say(self, line):
        self.log += line

    def replace_authority(self):
        self.say("serving with a new certificate\n")

    def mark(self):
        return {LOG: len(self.log)}

    def is_told(self, since, pattern):
        return bool(re.search(pattern, self.log[since[LOG] :]))

    async def works(self, timeout_s):
        return True


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(wire_faults, "SIGN_S", 0.0)
    monkeypatch.setattr(live_run, "_POLL_S", 0.0)


async def test_a_server_may_take_a_new_certificate_before_its_connections_end():
    run = Run()
    injected = await wire_faults.replace_authority(run, random.Random(1))
    assert injected.is_shown


async def test_connections_without_a_call_on_them_are_cut_again():
    run = Run(["", "", "Lease failed with UNAVAILABLE: closed\n"])
    injected = await wire_faults.cut(run, random.Random(1))
    assert injected.is_shown
    assert injected.what == "6 connections cut"


async def test_a_cut_that_nobody_ever_notices_is_silent():
    injected = await wire_faults.cut(Run(), random.Random(1))
    assert not injected.is_shown
