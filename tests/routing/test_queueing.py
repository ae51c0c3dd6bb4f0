"""What sessions that share peers wait for each other, against the same loop run step by step."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from routing.simulation.queueing import Stop, beside_s, longest_wait_s, prompt_rate, shared, through

SLOPE, ALONE_S, LATE_S = 0.1, 0.08, 0.002


def loop(sessions: int, stops: int, way_s: float, rounds: int = 200) -> float:
    """Seconds a step takes where so many sessions go round the same hops, `way_s` from one to the next and twice that
    from the last to the first. Ways and passes vary by a few percent. A hop that is free takes what waits, but of the
    sessions no more than its share of the chain."""
    rng, most = random.Random(sessions), math.ceil(sessions / stops)
    waiting: list[list[int]] = [[] for _ in range(stops)]
    free, events, count = [True] * stops, list[tuple[float, int, bool, int, list[int]]](), itertools.count()

    def put(at_s: float, ends: bool, hop: int, some: list[int]) -> None:
        heapq.heappush(events, (at_s, next(count), ends, hop, some))

    for session in range(sessions):
        put(0.37 * session * ALONE_S, False, 0, [session])
    steps, half, half_s, now = 0, sessions * rounds // 2, 0.0, 0.0
    while steps < sessions * rounds:
        now, _, ends, hop, some = heapq.heappop(events)
        if not ends:
            waiting[hop] += some
        else:
            free[hop], last = True, hop == stops - 1
            for session in some:
                ways_s = (2 if last else 1) * way_s * rng.uniform(0.9, 1.1)
                put(now + ways_s + rng.expovariate(1 / LATE_S), False, (hop + 1) % stops, [session])
            steps += last * len(some)
            if steps >= half and not half_s:
                half_s, half = now, steps
        if free[hop] and waiting[hop]:
            taken, waiting[hop] = waiting[hop][:most], waiting[hop][most:]
            free[hop] = False
            pass_s = ALONE_S * (1 + SLOPE * (len(taken) - 1)) * rng.uniform(0.95, 1.05)
            put(now + pass_s, True, hop, taken)
    return (now - half_s) / (steps - half) * sessions


@pytest.mark.parametrize(("stops", "way_s"), [(1, 0.001), (1, 0.01), *itertools.product((2, 3), (0.001, 0.01, 0.04))])
def test_a_step_takes_about_what_it_takes_in_the_loop(stops: int, way_s: float) -> None:
    for sessions in (1, 2, 3, 4, 6, 8, 16):
        ways_s = (stops + 1) * way_s + stops * LATE_S
        times = through(ways_s, [Stop(ALONE_S, sessions, math.ceil(sessions / stops))] * stops, SLOPE)
        step_s = ways_s + sum(pass_s + wait_s for pass_s, wait_s in times)
        assert step_s == pytest.approx(loop(sessions, stops, way_s), rel=0.15), f"{sessions} sessions"


def test_nobody_waits_while_all_can_be_served_one_by_one() -> None:
    assert shared(1.0, 3, SLOPE, elsewhere_s=2.0, most=3) == (1.0, 0.0)
    assert shared(1.0, 4, SLOPE, elsewhere_s=2.0, most=4)[1] > 0
    assert longest_wait_s([Stop(1.0, 3, 3)], [(1.0, 0.0)]) == 0.0


def test_where_steps_go_together_no_two_wait_alike() -> None:
    turns = [Stop(0.075, 3, 2)] * 2
    assert longest_wait_s(turns, through(0.03, turns, SLOPE)) == pytest.approx(3 * 0.075 - 0.18)
    lumps = [Stop(0.075, 6, 3)] * 2
    (first_s, wait_s), (second_s, _) = times = through(0.03, lumps, SLOPE)
    assert longest_wait_s(lumps, times) == pytest.approx(first_s + second_s) and 2 * wait_s < first_s + second_s


def test_where_several_wait_for_each_other_two_or_three_go_together() -> None:
    pass_s, wait_s = shared(1.0, 5, 0.25, elsewhere_s=0.0, most=5)
    assert pass_s == pytest.approx(1.375) and wait_s == pytest.approx(1.375)  # of two and of three, in turn
    assert shared(1.0, 5, 0.0, elsewhere_s=0.0, most=5) == pytest.approx((1.0, 1.0))
    assert shared(1.0, 5, 0.25, elsewhere_s=0.0, most=1) == pytest.approx((1.0, 4.0))


def test_the_slowest_hop_makes_all_wait_and_the_others_do_not() -> None:
    (_, slow_s), (quick, quick_s) = through(0.0, [Stop(1.0, 4, 2), Stop(0.1, 4, 2)], SLOPE)
    assert slow_s > 0.5 and (quick, quick_s) == (0.1, 0.0)


def test_a_prompt_has_its_share_whoever_decodes() -> None:
    assert prompt_rate(1.0, 0, 5.0, 0.5) == 1.0
    assert prompt_rate(1.0, 2, 5.0, 0.5) == pytest.approx(1 - 2 / 6)  # what is left is more than the share
    assert prompt_rate(1.0, 50, 5.0, 0.5) == pytest.approx(0.5 / 1.5)
    assert beside_s(1.0, 0.1) == 0.5 and beside_s(1.0, 0.8) == 0.8  # left at the end of a block
    assert shared(1.0, 1, SLOPE, 5.0, 1, beside_s=0.5) == (1.0, 0.25)
