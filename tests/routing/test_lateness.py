"""Which dials are late: by the round trip, by how long the last ones took, and never for long."""

from __future__ import annotations

import pytest

from routing.lateness import LAST, LEAST_S, ROUND_TRIPS, TIMES, Dials


@pytest.mark.parametrize(("rtt_s", "due_s"), [(0.0, LEAST_S), (0.01, LEAST_S), (0.3, 0.3 * ROUND_TRIPS)])
def test_a_dial_is_late_after_some_round_trips_and_not_at_once(rtt_s: float, due_s: float) -> None:
    dials = Dials()
    dials.begins("a", rtt_s, 10.0)
    assert dials.next_late_s(["a"], 10.0) == pytest.approx(due_s)
    assert not dials.late(10.0 + due_s - 1e-6)
    assert dials.late(10.0 + due_s + 1e-6) == {"a"} and dials.next_late_s(["a"], 10.0 + due_s + 1e-6) is None
    dials.ends("a", 20.0, reached=False)
    assert not dials.late(30.0)


def test_where_dials_take_long_they_are_waited_for_and_one_alone_changes_nothing() -> None:
    dials, slow_s = Dials(), 1.5  # a busy machine
    for number in range(2 * LAST):
        dials.begins(f"{number}", 0.01, 0.0)
        dials.ends(f"{number}", 4.0 if number % LAST == 0 else slow_s, reached=True)
    dials.begins("a", 0.01, 0.0)
    assert dials.next_late_s(["a"], 0.0) == pytest.approx(TIMES * slow_s)
    dials.ends("a", 5.0, reached=False)
    dials.begins("b", 0.01, 0.0)
    assert dials.next_late_s(["b"], 0.0) == pytest.approx(TIMES * slow_s), "who never came says nothing of how long"


def test_of_several_who_wait_for_one_dial_the_first_counts_and_the_last_ends_it() -> None:
    dials = Dials()
    dials.begins("a", 0.01, 0.0)
    dials.begins("a", 0.01, 0.4)
    dials.ends("a", 0.6, reached=False)
    assert dials.late(0.6) == {"a"}
    dials.ends("a", 0.7, reached=False)
    assert not dials.late(0.8)


def test_who_is_not_dialled_yet_counts_from_now() -> None:
    dials = Dials()
    dials.begins("a", 0.01, 0.0)
    assert dials.next_late_s(["a", "b"], 0.25) == pytest.approx(LEAST_S - 0.25)
    assert dials.next_late_s(["b"], 7.0) == pytest.approx(LEAST_S)
    assert dials.next_late_s([], 0.0) is None
