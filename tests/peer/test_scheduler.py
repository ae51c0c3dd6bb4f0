"""Every work runs once and in its seat's order; decode steps wait for one pass at most; prefill is fair."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from peer.scheduler import Scheduler, SchedulerConfig
from peer.seats import Work

CONFIG = SchedulerConfig(decode_most=4, prefill_alone=64, prefill_beside=16)


class Session:
    """A session as the scheduler sees it: an identity."""


class Seat:
    def __init__(self, session: Session | None = None):
        self.session = session or Session()


def work(seat: Any, positions: int, start: int = 0) -> Work:
    frame: Any = None
    return Work(seat, frame, start, start + positions, 0)


def test_nothing_waits_nothing_runs():
    scheduler = Scheduler()
    assert scheduler.next_pass() == [] and len(scheduler) == 0


def test_all_decode_steps_and_a_little_prefill_share_a_pass():
    scheduler = Scheduler(CONFIG)
    steps = [work(Seat(), 1), work(Seat(), 4), work(Seat(), 1)]
    chunks = [work(Seat(), 10), work(Seat(), 10), work(Seat(), 6)]
    for each in (chunks[0], steps[0], chunks[1], steps[1], chunks[2], steps[2]):
        scheduler.add(each)
    assert scheduler.next_pass() == [*steps, chunks[0], chunks[2]]  # 16 positions beside decode
    assert scheduler.waiting_positions == 10
    assert scheduler.next_pass() == [chunks[1]]


def test_prefill_alone_has_the_larger_budget():
    scheduler = Scheduler(CONFIG)
    chunks = [work(Seat(), 30) for _ in range(3)]
    for chunk in chunks:
        scheduler.add(chunk)
    assert scheduler.next_pass() == chunks[:2]


def test_a_chunk_over_the_budget_runs_alone():
    scheduler = Scheduler(CONFIG)
    huge, small = work(Seat(), 500), work(Seat(), 5)
    scheduler.add(huge)
    scheduler.add(small)
    assert scheduler.next_pass() == [huge]
    assert scheduler.next_pass() == [small]


def test_a_session_with_a_long_prompt_does_not_starve_another():
    """Each session's next chunk comes only after the one before: between them its queue is empty."""
    scheduler = Scheduler(CONFIG)
    seats = [Seat() for _ in range(3)]
    served: Counter[Any] = Counter()
    for seat in seats:
        scheduler.add(work(seat, 60))
    for _ in range(30):
        done = scheduler.next_pass()
        assert len(done) == 1
        served[done[0].seat] += 1
        scheduler.add(work(done[0].seat, 60))
    assert sorted(served.values()) == [10, 10, 10]


def test_two_seats_of_one_session_count_as_one():
    scheduler = Scheduler(CONFIG)
    greedy = Session()
    seats = [Seat(greedy), Seat(greedy), Seat()]
    for seat in seats:
        scheduler.add(work(seat, 60))
    order = []
    for _ in range(6):
        (done,) = scheduler.next_pass()
        order.append(done.seat.session is greedy)
        scheduler.add(work(done.seat, 60))
    assert order == [True, False, True, False, True, False]


arrivals = st.lists(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1, 2, 4, 5, 16, 40, 100])), max_size=5), max_size=12
)


@settings(max_examples=200, deadline=None)
@given(arrivals)
def test_every_work_runs_once_in_order_and_decode_waits_for_one_pass(turns):
    scheduler = Scheduler(CONFIG)
    seats = [Seat() for _ in range(6)]
    waiting: dict[Any, deque[Work]] = {seat: deque() for seat in seats}

    def one_pass() -> None:
        heads = [queue[0] for queue in waiting.values() if queue]
        before = len(scheduler)
        chosen = scheduler.next_pass()
        assert len({item.seat for item in chosen}) == len(chosen)
        for item in chosen:
            assert item is waiting[item.seat].popleft()
        steps = [item for item in heads if item.end - item.start <= CONFIG.decode_most]
        assert all(item in chosen for item in steps)
        chunks = [item.end - item.start for item in chosen if item not in steps]
        budget = CONFIG.prefill_beside if steps else CONFIG.prefill_alone
        assert sum(chunks) <= budget or sum(chunks[1:]) == 0
        assert bool(chunks) == any(item not in steps for item in heads)
        assert len(scheduler) == before - len(chosen)

    for turn in turns:
        for index, positions in turn:
            item = work(seats[index], positions)
            waiting[item.seat].append(item)
            scheduler.add(item)
        one_pass()
    for _ in range(sum(map(len, waiting.values()))):
        one_pass()
    assert not any(waiting.values()) and len(scheduler) == 0
