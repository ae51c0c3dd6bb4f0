"""Bans that decay, and that never leave anyone out for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.cost import Costs
from routing.errors import BadInput
from routing.health import Health, HealthPolicy
from routing.planner import plan
from routing.request import Request
from routing.types import PeerRecord, Span
from routing.view import View


def test_a_stranger_is_healthy():
    health = Health()
    assert health.penalty_s("a", 0.0) == 0.0
    assert not health.banned("a", 0.0)
    assert health.penalties(0.0) == {}


def test_a_penalty_halves_every_half_life_and_the_ban_ends_with_it():
    health = Health(HealthPolicy(half_life_s=30.0, penalty_s=2.0))
    health.failed("a", 100.0)
    assert health.penalty_s("a", 100.0) == pytest.approx(2.0)
    assert health.penalty_s("a", 130.0) == pytest.approx(1.0)
    assert health.banned("a", 129.9) and not health.banned("a", 130.1)
    assert health.banned_peers(129.9) == {"a"} and health.banned_peers(130.1) == frozenset()


def test_failures_add_up_to_the_cap():
    health = Health(HealthPolicy(cap=4.0))
    for _ in range(3):
        health.failed("a", 0.0)
    assert health.penalty_s("a", 0.0) == pytest.approx(3.0)
    for _ in range(100):
        health.failed("a", 0.0)
    assert health.penalty_s("a", 0.0) == pytest.approx(4.0)


def test_a_failure_counts_by_its_weight():
    health = Health()
    health.failed("a", 0.0, weight=0.25)
    assert health.penalty_s("a", 0.0) == pytest.approx(0.25)
    assert not health.banned("a", 0.0)


def test_a_success_halves_and_then_clears():
    health = Health()
    health.failed("a", 0.0, weight=4.0)
    for left in (2.0, 1.0, 0.5, 0.0):
        health.worked("a", 0.0)
        assert health.penalty_s("a", 0.0) == pytest.approx(left)
    health.worked("a", 0.0)
    assert health.penalties(0.0) == {}


def test_old_failures_are_forgotten():
    health = Health()
    health.failed("a", 0.0)
    health.failed("b", 290.0)
    assert health.penalties(300.0) == {"b": pytest.approx(0.7937, abs=1e-4)}


def test_a_clock_that_went_back_does_not_make_it_worse():
    health = Health()
    health.failed("a", 100.0)
    assert health.penalty_s("a", 50.0) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0.0, 60.0), st.floats(0.01, 50.0)), min_size=1, max_size=40))
def test_no_history_bans_longer_than_the_longest_ban(failures):
    health = Health()
    now = 0.0
    for pause, weight in failures:
        now += pause
        health.failed("a", now, weight)
    assert not health.banned("a", now + health.policy.longest_ban_s + 0.001)


def test_a_spare_is_never_banned_for_ever():
    """An older system banned the healthy replacement at each failure, and ended with nobody to ask."""
    view = View({"spare": PeerRecord(peer_id="spare", span=Span(0, 4), expires_at=1e9)}, 4)
    health = Health()
    now = 0.0
    for _ in range(1000):
        health.failed("spare", now)
        now += 1.0
        request = Request(n_blocks=4, avoid_peers=health.banned_peers(now), penalties=health.penalties(now))
        assert plan(view, Costs(), request, now).route.peers == {"spare"}
    assert health.banned("spare", now)
    assert not health.banned("spare", now + health.policy.longest_ban_s)
    health.worked("spare", now)
    assert health.penalty_s("spare", now) <= health.policy.cap / 2


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_is_a_positive_number(weight):
    with pytest.raises(BadInput):
        Health().failed("a", 0.0, weight)


@pytest.mark.parametrize(
    "wrong",
    [
        {"half_life_s": math.inf},
        {"half_life_s": 0.0},
        {"cap": math.inf},
        {"ban_at": 9.0},
        {"penalty_s": -1.0},
    ],
)
def test_a_policy_without_an_end_is_refused(wrong):
    with pytest.raises(BadInput):
        HealthPolicy(**wrong)
