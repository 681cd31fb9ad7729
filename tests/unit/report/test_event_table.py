import pytest

from vcpo.report.event_table import event_rows


@pytest.fixture
def rows_of(make_event):
    """Kind and messages of each row, from kinds in order; messages are their numbers."""

    def rows_of(*kinds):
        events = [make_event(f"{at}", float(at), kind=kind) for at, kind in enumerate(kinds)]
        return [
            (row.last.kind, "".join(event.message for event in row.events))
            for row in event_rows(events)
        ]

    return rows_of


def test_different_events_stand_alone_in_order(rows_of):
    assert rows_of("A", "B", "A") == [("A", "0"), ("B", "1"), ("A", "2")]


def test_three_of_a_kind_in_a_row_are_one_row(rows_of):
    assert rows_of("A", "B", "B", "B", "A") == [("A", "0"), ("B", "123"), ("A", "4")]


def test_two_of_a_kind_are_not(rows_of):
    assert rows_of("B", "B") == [("B", "0"), ("B", "1")]


def test_skipped_steps_are_one_row_at_the_last_of_them_whatever_lies_between(rows_of):
    assert rows_of("StepSkipped", "A", "StepSkipped", "StepSkipped", "B") == [
        ("A", "1"),
        ("StepSkipped", "023"),
        ("B", "4"),
    ]


def test_a_few_skipped_steps_stand_alone(rows_of):
    assert rows_of("StepSkipped", "A", "StepSkipped") == [
        ("StepSkipped", "0"),
        ("A", "1"),
        ("StepSkipped", "2"),
    ]


def test_equal_events_are_all_kept(make_event):
    event = make_event("gone")
    assert [len(row.events) for row in event_rows([event, event])] == [1, 1]
