"""Where a step's time went and when: parts in order that fill it, whatever the figures; the same as JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.types import Hop
from swarm.session import HopTrace, StepTrace
from swarm.timeline import Leg, legs, trace_facts
from tests.swarm.test_plots import (
    AFTER,
    BEFORE,
    CLIENT_S,
    COMPUTE_S,
    NETWORK_S,
    QUEUE_S,
    STALL_S,
    A,
    B,
    C,
    answer,
    step,
)

WHOLE = 2 * (QUEUE_S + COMPUTE_S + NETWORK_S)


def lengths(parts: list[Leg]) -> list[tuple[str, str, float]]:
    return [(leg.hop.peer_id, leg.kind, pytest.approx(leg.end_s - leg.begin_s)) for leg in parts]


def test_the_last_hops_network_has_the_way_back():
    """The way to the first hop took 5 ms, and so did the way back: 7 ms of 12 were between the two hops."""
    hops = (
        HopTrace(hop=Hop(A, 0, 15), queue_s=0.001, compute_s=0.020, network_s=0.005),
        HopTrace(hop=Hop(B, 15, 30), queue_s=0.0, compute_s=0.010, network_s=0.012),
    )
    parts = legs(StepTrace(at_s=100.0, total_s=0.048, tokens=1, epoch=0, hops=hops))
    assert lengths(parts) == [
        (A, "network", 0.005), (A, "queue", 0.001), (A, "compute", 0.020),
        (B, "network", 0.007), (B, "compute", 0.010), (B, "network", 0.005),
    ]  # fmt: skip
    assert parts[0].begin_s == 100 and parts[-1].end_s == pytest.approx(100.048)


def test_json_tells_the_codecs_of_each_hop_where_they_are_known():
    known = HopTrace(hop=Hop(A, 0, 30), queue_s=0.0, compute_s=0.02, network_s=0.01, wire_in="int8", wire_out="fp32")
    traces = [
        StepTrace(at_s=0.0, total_s=0.03, tokens=1, epoch=0, hops=(hop,))
        for hop in (known, replace(known, wire_in="", wire_out=""))
    ]
    hops = [facts["hops"][0] for facts in trace_facts(traces)]
    assert [(hop["wire_in"], hop["wire_out"]) for hop in hops] == [("int8", "fp32"), (None, None)]


def test_a_single_hop_has_the_way_there_and_back():
    hop = HopTrace(hop=Hop(A, 0, 30), queue_s=0.0, compute_s=0.020, network_s=0.010)
    parts = legs(StepTrace(at_s=0.0, total_s=0.030, tokens=1, epoch=0, hops=(hop,)))
    assert lengths(parts) == [(A, "network", 0.005), (A, "compute", 0.020), (A, "network", 0.005)]


def test_hops_that_worked_side_by_side_are_shortened_alike():
    """A prompt in chunks: each hop computed for 20 ms, and the whole took 30."""
    hops = tuple(
        HopTrace(hop=Hop(peer, at, at + 15), queue_s=0.0, compute_s=0.020, network_s=0.0)
        for peer, at in ((A, 0), (B, 15))
    )
    parts = legs(StepTrace(at_s=0.0, total_s=0.030, tokens=600, epoch=0, hops=hops))
    assert lengths(parts) == [(A, "compute", 0.015), (B, "compute", 0.015)]


def test_after_a_recovery_computing_comes_last():
    traces, _, _ = answer(6, killed=3)
    held_up = traces[3]
    parts = legs(held_up, disturbed=True)
    assert lengths(parts) == [
        (A, "queue", QUEUE_S), (A, "compute", COMPUTE_S), (C, "queue", QUEUE_S), (C, "compute", COMPUTE_S),
    ]  # fmt: skip
    assert parts[-1].end_s == pytest.approx(held_up.at_s + held_up.total_s)
    assert parts[0].begin_s - held_up.at_s == pytest.approx(STALL_S + 2 * NETWORK_S)


seconds = st.floats(0, 10)
hops = st.lists(
    st.builds(
        lambda peer, start, q, c, n: HopTrace(
            hop=Hop(peer, start, start + 1), queue_s=q, compute_s=c, network_s=n
        ),
        st.sampled_from([A, B, C]), st.integers(0, 30), seconds, seconds, seconds,
    ),
    max_size=4,
)  # fmt: skip


@given(hops, seconds, st.booleans())
def test_whatever_the_figures_the_parts_follow_each_other_within_the_step(hops, total_s, disturbed):
    trace = StepTrace(at_s=50.0, total_s=total_s, tokens=1, epoch=0, hops=tuple(hops))
    parts = legs(trace, disturbed=disturbed)
    at = parts[0].begin_s if parts else 50.0
    assert at >= 50.0
    for leg in parts:
        assert leg.begin_s == at and leg.end_s >= at
        at = leg.end_s
    assert at <= 50.0 + total_s
    known = sum(hop.queue_s + hop.compute_s + (0.0 if disturbed else hop.network_s) for hop in hops)
    assert sum(leg.end_s - leg.begin_s for leg in parts) == pytest.approx(min(known, total_s), abs=1e-9)


def test_the_facts_of_a_trace():
    traces, recoveries, _ = answer(6, killed=3)
    facts = json.loads(json.dumps(trace_facts(traces, recoveries)))
    assert [each["step"] for each in facts] == [1, 2, 3, 4, 5, 6]
    prompt, second, _, held_up, *_ = facts
    assert (prompt["tokens"], prompt["at_ms"], prompt["client_ms"]) == (40, 0, 0)
    assert second == {
        "step": 2,
        "tokens": 1,
        "at_ms": pytest.approx(prompt["ms"]),
        "ms": pytest.approx(1e3 * (WHOLE + CLIENT_S)),
        "client_ms": pytest.approx(1e3 * CLIENT_S),
        "recovery_ms": 0,
        "hops": [
            {"peer": hop.peer_id, "blocks": f"{hop.entry}:{hop.exit}", "network_ms": 2, "queue_ms": 1, "compute_ms": 18,
             "wire_in": None, "wire_out": None}
            for hop in BEFORE
        ],
    }  # fmt: skip
    assert held_up["recovery_ms"] == pytest.approx(1e3 * (STALL_S + 2 * NETWORK_S))
    assert [hop["network_ms"] for hop in held_up["hops"]] == [None, None]
    assert [hop["peer"] for hop in held_up["hops"]] == [hop.peer_id for hop in AFTER]
    assert trace_facts([]) == [] and trace_facts([step(7.0)])[0]["at_ms"] == 0
