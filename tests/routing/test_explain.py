"""Why a route: the runner-up is the best of all that do without one of its peers, and everybody left out is named."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from routing.cost import CLIENT, Costs
from routing.encoding import Encoding, Wire
from routing.errors import NoRoute
from routing.explain import explain
from routing.planner import plan, route_cost
from routing.request import Request
from routing.types import Hop, PeerState, Route
from routing.view import View
from tests.routing.crowd import crowd

BLOCKS = 12
REQUEST = Request(n_blocks=BLOCKS)


def without(view: View, *peers: str) -> View:
    return View({peer: record for peer, record in view.records.items() if peer not in peers}, view.n_blocks)


@pytest.mark.parametrize("seed", range(8))
def test_the_runner_up_is_the_best_of_all_others(seed: int) -> None:
    view, costs = crowd(30, BLOCKS, seed)
    found = explain(view, costs, REQUEST, 0.0)
    assert found.chosen.route == plan(view, costs, REQUEST, 0.0).route
    others = []
    for peer in found.chosen.route.peers:
        with suppress(NoRoute):
            others.append(plan(without(view, peer), costs, REQUEST, 0.0).cost_s)
    if not others:
        assert found.runner_up is None and "each of its peers is needed" in str(found)
    else:
        assert found.runner_up is not None and found.runner_up.cost_s == min(others) >= found.chosen.cost_s
        assert f"runner-up, {1e3 * (min(others) - found.chosen.cost_s):.1f} ms more" in str(found)


def test_each_hop_says_what_hidden_states_are_written_in() -> None:
    view, costs = crowd(30, BLOCKS, 6)
    route = plan(view, costs, REQUEST, 0.0).route
    assert len(route) > 1
    costs.observe_bandwidth(CLIENT, route[0].peer_id, 1e4)
    encodings = Encoding(1, 2000, name="fp32"), Encoding(3, 540, error=2.4e-4, name="int8")
    request = replace(REQUEST, row_bytes=2000, wire=Wire(encodings=encodings, results="fp32"))
    found = explain(view, costs, request, 0.0, route=route)
    written = [(term.wire_in, term.wire_out) for term in found.chosen.terms]
    assert written == [("int8", "fp32"), *[("fp32", "fp32")] * (len(route) - 1)]
    lines = found.chosen.explain().splitlines()[1:]
    assert lines[0].endswith("; int8>fp32") and all(line.endswith("; fp32") for line in lines[1:])
    assert ";" not in explain(view, costs, REQUEST, 0.0, route=route).chosen.explain()


def test_a_route_in_use_is_priced_as_it_is_now() -> None:
    view, costs = crowd(30, BLOCKS, 1)
    route = plan(view, costs, REQUEST, 0.0).route
    slow = route[0].peer_id
    costs.observe_decode(slow, 5.0)
    found = explain(view, costs, REQUEST, 0.0, route=route)
    assert found.chosen == route_cost(route, view, costs, REQUEST)
    assert found.runner_up is not None and slow not in found.runner_up.route.peers
    assert "ms less" in str(found)


def test_everybody_left_out_is_named_with_the_reason() -> None:
    view, costs = crowd(40, BLOCKS, 2)
    best = plan(view, costs, REQUEST, 0.0).route
    draining, liar, failed = sorted(view.records.keys() - best.peers)[:3]
    records = dict(view.records)
    records[draining] = replace(records[draining], state=PeerState.DRAINING)
    first = best[0].peer_id
    request = replace(REQUEST, avoid_peers=frozenset({failed, first}))
    found = explain(
        View(records, BLOCKS), costs, request, 0.0,
        without={liar: "it was found to compute wrongly"}, avoided={failed: "it failed lately", first: "it failed"},
    )  # fmt: skip
    assert found.left_out[draining] == "it is draining" and found.left_out[liar] == "it was found to compute wrongly"
    assert found.left_out[failed] == "it failed lately"
    assert first not in found.chosen.route.peers
    assert f"left out: {liar[-6:]}, it was found to compute wrongly" in str(found)
    with pytest.raises(NoRoute):
        explain(View({}, BLOCKS), costs, REQUEST, 0.0)


def test_ways_that_nobody_measured_are_marked() -> None:
    view, _ = crowd(12, BLOCKS, 3)
    costs = Costs()
    route = plan(view, costs, REQUEST, 0.0).route
    assert explain(view, costs, REQUEST, 0.0, route=route).estimated >= set(route)
    ends = [CLIENT, *(hop.peer_id for hop in route), CLIENT]
    for a, b in pairwise(ends):
        costs.observe_rtt(a, b, 0.01)
    assert not explain(view, costs, REQUEST, 0.0, route=route).estimated & set(route)
    alone = Route((Hop("x", 0, BLOCKS),))
    costs.observe_rtt(CLIENT, "x", 0.01)
    only = View({"x": replace(next(iter(view.records.values())), peer_id="x")}, BLOCKS)
    assert not explain(only, costs, REQUEST, 0.0, route=alone).estimated
