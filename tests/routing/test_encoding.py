from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from routing.cost import CLIENT, Costs, CostSettings
from routing.encoding import HYSTERESIS, Encoding, Wire, cheapest

FP32, BF16, INT8 = Encoding(1, 2304, 0.0, 0.0), Encoding(2, 1152, 0.0, 2e-5), Encoding(3, 626, 3e-6, 2.4e-4)
THREE = (FP32, BF16, INT8)
MBIT = 1e6 / 8

rates = st.floats(0.1 * MBIT, 1e5 * MBIT)


def test_nothing_is_lost_where_nothing_is_known() -> None:
    assert cheapest(THREE, 0.0) is FP32
    assert cheapest(THREE, 0.0, present=3) is FP32


def test_a_home_uplink_gets_8_bits_and_a_fast_network_everything() -> None:
    assert cheapest(THREE, 10 * MBIT) is INT8
    assert cheapest((Encoding(2, 1152, 0.0, 0.0), INT8), 10 * MBIT) is INT8
    assert cheapest(THREE, 200 * MBIT) is FP32


def test_a_wide_model_is_worth_it_on_faster_ways() -> None:
    wide = Encoding(1, 16384, 0.0, 0.0), Encoding(2, 8192, 0.0, 2e-5), Encoding(3, 4256, 20e-6, 2.4e-4)
    assert cheapest(wide, 100 * MBIT).number == 3
    assert cheapest(wide, 10_000 * MBIT).number == 1


@given(rates, st.floats(1.0, 100.0))
def test_a_faster_way_never_loses_more(rate: float, times: float) -> None:
    assert cheapest(THREE, rate * times).error <= cheapest(THREE, rate).error


@given(rates, st.sampled_from(THREE))
def test_the_present_one_stays_unless_another_is_clearly_cheaper(rate: float, present: Encoding) -> None:
    found = cheapest(THREE, rate, present.number)
    if found is not present:
        assert found.price_s(rate) < (1 - HYSTERESIS) * present.price_s(rate)
    assert cheapest(THREE, rate, found.number) is found


@given(rates, st.floats(0.93, 1.07))
def test_noise_makes_nobody_change_to_and_fro(rate: float, noise: float) -> None:
    found = cheapest(THREE, rate)
    assert cheapest(THREE, rate, cheapest(THREE, noise * rate, found.number).number) is found


def test_what_a_session_has_settled_goes_before_what_a_way_was_given() -> None:
    wire = Wire(encodings=THREE, present={("a", "b"): 3}, settled={4: 1})
    rate = 60 * MBIT  # 8 bits are a little dearer there, too little to change
    assert wire.choose("a", "b", rate).number == 3 != wire.choose("b", "a", rate).number
    assert wire.choose("a", "b", rate, block=4).number == 1
    assert wire.choose("a", "b", rate, block=5).number == 3
    assert Wire(encodings=(BF16, INT8), settled={4: 1}).choose("a", "b", MBIT, block=4) is INT8, "it cannot be had"


def test_who_writes_or_reads_8_bits_slowly_is_sent_them_on_slower_ways_alone() -> None:
    slow_s = 400e-6  # a row, both
    wire = Wire(encodings=(FP32, INT8), row_s={"a": slow_s, "b": slow_s})
    rate = 45 * MBIT
    assert wire.choose("x", "y", rate) is INT8
    assert wire.choose("a", "b", rate) is FP32 and wire.choose("a", "b", 10 * MBIT).row_s == slow_s
    assert wire.choose("x", "b", 10 * MBIT).row_s == (slow_s + INT8.row_s) / 2
    assert replace(wire, settled={4: 3}).choose("a", "b", rate, block=4).row_s == slow_s


def test_a_bandwidth_is_known_only_where_it_was_measured_not_too_long_ago() -> None:
    costs = Costs(CostSettings(link_half_life_s=100.0))
    assert costs.bandwidth(CLIENT, "a") == 0
    costs.observe_bandwidth(CLIENT, "a", 5e6)
    assert costs.bandwidth(CLIENT, "a") == 5e6 and costs.bandwidth("a", CLIENT) == 0
    costs.advance(199.0)
    assert costs.bandwidth(CLIENT, "a") == 5e6
    costs.advance(201.0)
    assert costs.bandwidth(CLIENT, "a") == 0
