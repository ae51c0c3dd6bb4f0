"""Every work runs once; decode steps wait for one pass at most; clients take turns, however many sessions they have."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import scheduler as module
from peer.scheduler import Scheduler, SchedulerConfig
from peer.seats import Work

CONFIG = SchedulerConfig(decode_most=4, prefill_most=64)


class Session:
    """A session as the scheduler sees it."""

    def __init__(self, client: str = "client"):
        self.client_id = client


class Seat:
    def __init__(self, session: Session | None = None, client: str = "client", blocks: int = 1):
        self.session = session or Session(client)
        self.entry, self.exit = 0, blocks


def work(seat: Any, positions: int) -> Work:
    frame: Any = None
    return Work(seat, frame, 0, positions, 0)


def filled(*works: Work) -> Scheduler:
    scheduler = Scheduler(CONFIG)
    for each in works:
        scheduler.add(each)
    return scheduler


def test_nothing_waits_nothing_runs():
    scheduler = Scheduler()
    assert scheduler.next_decode() == [] and scheduler.next_prefill() == []
    assert len(scheduler) == 0 and not scheduler.decode_waits


def test_decode_steps_and_chunks_make_passes_of_their_own():
    steps = [work(Seat(), 1), work(Seat(), 4), work(Seat(), 1)]
    chunks = [work(Seat(), 10), work(Seat(), 50), work(Seat(), 6)]
    scheduler = filled(chunks[0], steps[0], chunks[1], steps[1], chunks[2], steps[2])
    assert len(scheduler) == 6 and scheduler.decode_waits
    assert scheduler.next_decode() == steps and not scheduler.decode_waits
    assert scheduler.next_prefill() == chunks[:2]  # 60 of 64 positions
    assert scheduler.next_prefill() == chunks[2:]


def test_a_chunk_over_the_budget_runs_alone():
    huge, small = work(Seat(), 500), work(Seat(), 5)
    scheduler = filled(huge, small)
    assert scheduler.next_prefill() == [huge]
    assert scheduler.next_prefill() == [small]


def test_a_small_chunk_fills_what_another_client_leaves():
    first, large, small = work(Seat(client="a"), 40), work(Seat(client="b"), 40), work(Seat(client="c"), 20)
    assert filled(first, large, small).next_prefill() == [first, small]


def test_the_longest_waiting_decode_steps_go_first():
    steps = [work(Seat(), 1) for _ in range(5)]
    scheduler = filled(*steps)
    assert scheduler.next_decode(2) == steps[:2]
    scheduler.add(work(steps[0].seat, 1))
    assert scheduler.next_decode(3) == steps[2:]


def test_a_client_with_a_hundred_sessions_does_not_delay_another_with_one():
    """Of few places in a decode pass each client has one, and both lanes alternate between them."""
    scheduler = Scheduler(CONFIG)
    many, one = [Seat(client="many") for _ in range(100)], Seat(client="one")
    for seat in many:
        scheduler.add(work(seat, 1))
    for _ in range(20):
        scheduler.add(work(one, 1))
        chosen = scheduler.next_decode(4)
        assert sum(item.seat is one for item in chosen) == 1 and len(chosen) == 4
        for item in chosen:
            if item.seat is not one:
                scheduler.add(work(item.seat, 1))
    prefill = Scheduler(CONFIG)
    for seat in many:
        prefill.add(work(seat, 60))
    prefill.add(work(one, 60))
    served: list[str] = []
    for _ in range(20):
        (item,) = prefill.next_prefill()
        served.append(item.seat.session.client_id)
        prefill.add(work(item.seat, 60))
    assert served.count("one") == 10
    assert "many" in served[:2] and "one" in served[:2]


def test_clients_get_the_same_amount_of_computing_and_not_of_turns():
    prefill = Scheduler(CONFIG)
    wide, narrow = Seat(client="wide", blocks=3), Seat(client="narrow", blocks=1)
    for seat in (wide, narrow):
        prefill.add(work(seat, 60))
    turns: Counter[Any] = Counter()
    for _ in range(40):
        (item,) = prefill.next_prefill()
        turns[item.seat] += 1
        prefill.add(work(item.seat, 60))
    assert turns == {wide: 10, narrow: 30}


def test_time_spent_idle_earns_nothing():
    prefill = Scheduler(CONFIG)
    busy, idler = Seat(client="busy"), Seat(client="idler")
    for _ in range(50):
        prefill.add(work(busy, 60))
        prefill.next_prefill()
    for seat in (busy, idler):
        prefill.add(work(seat, 60))
    served = []
    for _ in range(10):
        (item,) = prefill.next_prefill()
        served.append(item.seat)
        prefill.add(work(item.seat, 60))
    assert served.count(busy) >= 4


@pytest.mark.parametrize("sessions", [3, 7])
def test_sessions_of_one_client_take_turns(sessions):
    """Each session's next chunk comes only after the one before: between them its queue is empty."""
    scheduler = Scheduler(CONFIG)
    served: Counter[Any] = Counter()
    for _ in range(sessions):
        scheduler.add(work(Seat(), 60))
    for _ in range(10 * sessions):
        (done,) = scheduler.next_prefill()
        served[done.seat] += 1
        scheduler.add(work(done.seat, 60))
    assert set(served.values()) == {10}


def test_two_seats_of_one_session_count_as_one():
    greedy = Session()
    scheduler = filled(work(Seat(greedy), 60), work(Seat(greedy), 60), work(Seat(), 60))
    order = []
    for _ in range(6):
        (done,) = scheduler.next_prefill()
        order.append(done.seat.session is greedy)
        scheduler.add(work(done.seat, 60))
    assert order == [True, False, True, False, True, False]


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_REMEMBERED", 10)
    scheduler = Scheduler(CONFIG)
    for client in range(100):
        scheduler.add(work(Seat(client=str(client)), 60))
        scheduler.next_prefill()
    assert len(scheduler._account._spent) <= 10 and len(scheduler._prefill._served) <= 10


arrivals = st.lists(
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from([1, 2, 4, 5, 16, 40, 100])), max_size=8), max_size=12
)


@settings(max_examples=200)
@given(arrivals, st.one_of(st.none(), st.integers(1, 4)))
def test_every_work_runs_once_and_no_client_waits_for_ever(turns, most):
    """Twelve seats of four clients. A client whose work waits is served within as many passes as there are clients."""
    scheduler = Scheduler(CONFIG)
    seats = [Seat(client=f"client {index % 4}") for index in range(12)]
    waiting: dict[Any, Work] = {}
    unserved: Counter[str] = Counter()

    def one_turn() -> None:
        before = len(scheduler)
        steps = [item for item in waiting.values() if item.end <= CONFIG.decode_most]
        chunks = [item for item in waiting.values() if item.end > CONFIG.decode_most]
        assert scheduler.decode_waits == bool(steps)
        decode, prefill = scheduler.next_decode(most), scheduler.next_prefill()
        assert len(decode) == (len(steps) if most is None else min(most, len(steps)))
        assert bool(prefill) == bool(chunks)
        assert sum(item.end for item in prefill) <= CONFIG.prefill_most or len(prefill) == 1
        for item in (*decode, *prefill):
            assert waiting.pop(item.seat) is item
        for lane, taken in ((steps, decode), (chunks, prefill)):
            served = {item.seat.session.client_id for item in taken}
            for client in {item.seat.session.client_id for item in lane}:
                name = f"{client} {lane is steps}"
                unserved[name] = 0 if client in served else unserved[name] + 1
                if lane is steps:
                    assert unserved[name] < 4
        assert len(scheduler) == before - len(decode) - len(prefill)

    for turn in turns:
        for index, positions in turn:
            if seats[index] not in waiting:
                waiting[seats[index]] = work(seats[index], positions)
                scheduler.add(waiting[seats[index]])
        one_turn()
    for _ in range(len(waiting)):
        one_turn()
    assert not waiting and len(scheduler) == 0
