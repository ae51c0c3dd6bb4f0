"""Costs: measured, else claimed or estimated, else the default; and measurements that fade."""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.coordinates import Coordinate
from routing.cost import CLIENT, LONGEST_S, Costs, CostSettings
from routing.errors import BadInput
from routing.types import PeerRecord, Span

UNSAID = PeerRecord(peer_id="a", span=Span(0, 4))
CLAIMED = PeerRecord(peer_id="a", span=Span(0, 4), decode_s=0.01, prefill_s=0.001, queue_s=0.5)


def test_a_link_is_half_of_the_round_trip_both_ways():
    costs = Costs()
    costs.observe_rtt("a", "b", 0.04)
    assert costs.link_s("a", "b") == costs.link_s("b", "a") == pytest.approx(0.02)
    assert costs.link_s("a", "a") == 0.0


def test_an_unmeasured_link_is_estimated_from_the_client_else_the_default():
    costs = Costs(CostSettings(link_s=0.07))
    assert costs.link_s("a", "b") == costs.link_s(CLIENT, "a") == 0.07
    costs.observe_rtt(CLIENT, "a", 0.02)
    assert costs.link_s("a", "b") == 0.07
    costs.observe_rtt("b", CLIENT, 0.06)
    assert costs.link_s("a", "b") == pytest.approx(0.03)


def test_blocks_measured_before_claimed_before_default():
    costs = Costs(CostSettings(decode_s=0.3, prefill_s=0.03))
    assert costs.block_s(UNSAID, 1) == 0.3
    assert costs.block_s(UNSAID, 100) == pytest.approx(3.0)
    assert costs.block_s(CLAIMED, 1) == 0.01
    assert costs.block_s(CLAIMED, 100) == pytest.approx(0.1)
    costs.observe_decode("a", 0.02)
    costs.observe_prefill("a", 0.002)
    assert costs.block_s(CLAIMED, 1) == pytest.approx(0.02)
    assert costs.block_s(CLAIMED, 100) == pytest.approx(0.2)


def test_queue_measured_before_claimed_before_none():
    costs = Costs()
    assert costs.queue_s(UNSAID) == 0.0
    assert costs.queue_s(CLAIMED) == 0.5
    costs.observe_queue("a", 0.0)
    assert costs.queue_s(CLAIMED) == 0.0


def test_transfer_is_charged_in_its_own_direction():
    costs = Costs(CostSettings(bandwidth=1000.0))
    costs.observe_bandwidth("a", "b", 100.0)
    assert costs.transfer_s("a", "b", 50) == pytest.approx(0.5)
    assert costs.transfer_s("b", "a", 50) == pytest.approx(0.05)
    assert costs.transfer_s("a", "b", 0) == costs.transfer_s("a", "a", 50) == 0.0
    assert costs.transfer_s("a", "b", 10**12) == LONGEST_S


def test_a_new_measurement_moves_the_mean_by_its_weight():
    costs = Costs(CostSettings(weight=0.25))
    costs.observe_decode("a", 0.1)
    costs.observe_decode("a", 0.2)
    assert costs.block_s(UNSAID, 1) == pytest.approx(0.125)


def test_a_measurement_fades_towards_what_is_claimed():
    costs = Costs(CostSettings(queue_half_life_s=10.0))
    costs.observe_queue("a", 8.5)
    costs.advance(10.0)
    assert costs.queue_s(CLAIMED) == pytest.approx(4.5)
    costs.advance(1000.0)
    assert costs.queue_s(CLAIMED) == pytest.approx(0.5)


def test_a_fresh_measurement_outweighs_a_faded_one():
    costs = Costs(CostSettings(queue_half_life_s=10.0))
    costs.observe_queue("a", 8.0)
    costs.advance(1000.0)
    costs.observe_queue("a", 1.0)
    assert costs.queue_s(UNSAID) == pytest.approx(1.0)


def test_a_faded_link_goes_back_to_the_estimate():
    costs = Costs(CostSettings(link_half_life_s=10.0))
    costs.observe_rtt("a", "b", 0.2)
    costs.advance(10_000.0)
    costs.observe_rtt(CLIENT, "a", 0.02)
    costs.observe_rtt(CLIENT, "b", 0.04)
    assert costs.link_s("a", "b") == pytest.approx(0.02)


def test_time_does_not_go_back():
    costs = Costs()
    costs.advance(10.0)
    costs.advance(5.0)
    assert costs.now == 10.0


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0])
def test_nonsense_is_not_a_measurement_nor_a_claim(nonsense):
    costs = Costs()
    costs.observe_rtt("a", "b", nonsense)
    costs.observe_decode("a", nonsense)
    costs.observe_prefill("a", nonsense)
    costs.observe_queue("a", nonsense)
    costs.observe_bandwidth("a", "b", nonsense)
    liar = PeerRecord(peer_id="a", span=Span(0, 4), decode_s=nonsense, prefill_s=nonsense, queue_s=nonsense)
    clean = Costs()
    assert costs.link_s("a", "b") == clean.link_s("a", "b")
    assert costs.queue_s(liar) == 0.0
    assert costs.transfer_s("a", "b", 1000) == clean.transfer_s("a", "b", 1000)
    for tokens in (1, 8):
        assert costs.block_s(liar, tokens) == clean.block_s(UNSAID, tokens)


def test_an_absurd_claim_is_cut():
    assert Costs().queue_s(PeerRecord(peer_id="a", span=Span(0, 4), queue_s=1e18)) == LONGEST_S


def test_forgotten_peers_cost_what_strangers_cost():
    costs = Costs()
    costs.observe_rtt("a", "b", 0.001)
    costs.observe_rtt("a", CLIENT, 0.001)
    costs.observe_bandwidth("b", "a", 1.0)
    costs.observe_decode("a", 1.0)
    costs.observe_prefill("a", 1.0)
    costs.observe_queue("a", 1.0)
    costs.forget("a")
    costs.forget("never seen")
    clean = Costs()
    assert costs.link_s("b", "a") == clean.link_s("b", "a")
    assert costs.link_s(CLIENT, "a") == clean.link_s(CLIENT, "a")
    assert costs.transfer_s("b", "a", 9) == clean.transfer_s("b", "a", 9)
    assert costs.queue_s(CLAIMED) == 0.5
    assert costs.block_s(CLAIMED, 1) == 0.01
    assert costs.block_s(CLAIMED, 2) == pytest.approx(0.002)


@pytest.mark.parametrize(
    "wrong", [{"weight": 0.0}, {"weight": 1.5}, {"bandwidth": 0.0}, {"link_half_life_s": 0.0}]
)
def test_settings_are_checked(wrong):
    with pytest.raises(BadInput):
        CostSettings(**wrong)


ENDS = [CLIENT, "a", "b", "c", "d"]


@given(
    st.lists(
        st.tuples(st.sampled_from(ENDS), st.sampled_from(ENDS), st.floats(0.0, 0.5), st.floats(0.0, 400.0)),
        max_size=20,
    ),
    st.floats(0.0, 1000.0),
)
def test_no_link_between_peers_is_below_its_lower_bound(measurements, later):
    costs = Costs()
    for a, b, rtt_s, pause_s in measurements:
        costs.advance(costs.now + pause_s)
        costs.observe_rtt(a, b, rtt_s)
    costs.advance(costs.now + later)
    for b in ENDS[1:]:
        others = [costs.link_s(a, b) for a in ENDS[1:] if a != b]
        assert costs.least_link_s(b) <= min(others) + 1e-12


def test_who_claims_too_much_is_believed_the_less() -> None:
    costs = Costs()
    costs.observe_decode("a", 0.1, CLAIMED.decode_s)
    costs.advance(3600.0)  # the measurement has faded, its lesson only by half
    assert costs.block_s(CLAIMED, 1) == pytest.approx((1 + 10) / 2 * 0.01, rel=0.01)
    assert costs.block_s(UNSAID, 1) == pytest.approx(Costs().block_s(UNSAID, 1), rel=0.01), "it claims nothing"
    costs.forget("a")
    assert costs.block_s(CLAIMED, 1) == CLAIMED.decode_s


def test_where_most_claim_too_much_strangers_are_believed_the_less_too_but_not_for_one_s_sake() -> None:
    costs, stranger = Costs(), PeerRecord(peer_id="z", span=Span(0, 4), decode_s=0.01)
    costs.observe_decode("a", 0.3, 0.01)
    assert costs.block_s(stranger, 1) == pytest.approx(0.01)
    costs.observe_decode("b", 0.3, 0.01)
    assert costs.block_s(stranger, 1) == pytest.approx(0.3)
    for name in "cdef":
        costs.observe_decode(name, 0.01, 0.01)
    assert costs.block_s(stranger, 1) == pytest.approx(0.01)


def test_many_links_at_one_moment_cost_what_each_costs() -> None:
    rng, costs = random.Random(3), Costs()
    ends = [*(f"p{index}" for index in range(12)), CLIENT]
    for end in ends[3:]:  # of the first three nobody knows where they are; of some it is not sure
        place = tuple(rng.uniform(0, 0.01) for _ in range(3))
        costs.place(end, Coordinate(place=place, height=rng.choice([1e-5, 0.01]), error=rng.choice([0.1, 0.1, 0.9])))
    for _ in range(20):
        a, b = rng.sample(ends, 2)
        costs.observe_rtt(a, b, rng.uniform(0.0, 0.2))
    for _ in range(20):
        a, b = rng.sample(ends, 2)
        costs.observe_bandwidth(a, b, rng.uniform(1e5, 1e8))
    costs.advance(100.0)
    for nbytes in (0, 2000, 10**13):
        price = costs.between(ends, nbytes)
        for (i, a), (j, b) in permutations(enumerate(ends), 2):
            assert price(i, j) == costs.link_s(a, b) + costs.transfer_s(a, b, nbytes), (a, b, nbytes)
