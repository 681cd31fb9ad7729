"""The served report, asked over a real socket."""

import http.client
import itertools
import threading

import pytest

from vcpo.api import SpecError
from vcpo.records.journal import Journal
from vcpo.report.following import FollowedPage, PageServer


@pytest.fixture
def server(tmp_path):
    """A server of a page that counts how often it was rendered."""
    numbers = itertools.count(1)
    page = FollowedPage(tmp_path, lambda: f"rendered {next(numbers)}", clock=lambda: 0.0)
    with PageServer(page, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["ETag"], body


def test_the_page_is_rendered_once_for_many_readers(server):
    assert [ask(server)[2] for _ in range(3)] == ["rendered 1"] * 3


def test_a_reader_who_has_the_page_gets_nothing(server):
    _, tag, _ = ask(server)
    assert ask(server, **{"If-None-Match": tag}) == (304, tag, "")


def test_a_new_record_is_a_new_page(server, tmp_path, make_step):
    _, tag, _ = ask(server)
    Journal(tmp_path).step(make_step())
    status, new_tag, body = ask(server, **{"If-None-Match": tag})
    assert (status, body) == (200, "rendered 2")
    assert new_tag != tag


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_a_page_of_another_site_cannot_read_the_report(server, host):
    status, _, body = ask(server, Host=host)
    assert status == 403
    assert "rendered" not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1"])
def test_names_of_this_machine_are_answered(server, host):
    assert ask(server, Host=host)[0] == 200


def test_there_is_one_page(server):
    assert ask(server, "/etc/passwd")[0] == 404


def test_the_address_is_one_of_this_machine_only(server):
    assert server.url == f"http://127.0.0.1:{server.server_port}/"
    assert server.server_address[0] == "127.0.0.1"


def test_records_that_cannot_be_read_are_an_error_that_passes(tmp_path):
    answers = iter([SpecError("spec.yaml", []), "here it is"])

    def render():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with PageServer(FollowedPage(tmp_path, render), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert [ask(server)[0] for _ in range(2)] == [503, 200]
        server.shutdown()
        thread.join()


def test_a_port_that_is_taken_is_refused(server):
    with pytest.raises(OSError, match="in use"):
        PageServer(server.page, server.server_port)


def test_rendering_takes_a_twentieth_of_the_time_at_most(tmp_path, make_step):
    now_s = [100.0]

    def render():
        now_s[0] += 2.0
        return "page"

    page = FollowedPage(tmp_path, render, clock=lambda: now_s[0])
    first = page.tag()
    page.body(first)
    Journal(tmp_path).step(make_step())
    tags = []
    for now_s[0] in (102.0, 139.0, 140.0):
        tags.append(page.tag())
    assert tags[:2] == [first, first]
    assert tags[2] != first
