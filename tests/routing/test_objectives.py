"""Chains for throughput and for few hops, against all chains of small swarms, priced here in another way."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.constraints import Constraints
from routing.cost import CLIENT, Costs
from routing.planner import plan, route_cost
from routing.request import CHUNK, Request, edges
from routing.types import Objective, Route
from routing.view import View
from tests.routing.test_planner import NOW, allowed, as_route, near, price, problems, record, route, times, view_of


def slowest(chain: Route, view: View, costs: Costs, request: Request) -> float:
    """The longest stage of a pass of 64 rows, up to rounding."""
    busy: dict[str, float] = defaultdict(float)
    for hop in chain:
        each = view.records[hop.peer_id]
        busy[hop.peer_id] += costs.queue_s(each) + request.penalties.get(hop.peer_id, 0.0)
        busy[hop.peer_id] += (hop.exit - hop.entry) * costs.block_s(each, 64)
        if hop.peer_id not in request.held:
            busy[hop.peer_id] += request.context * (hop.exit - hop.entry) * costs.block_s(each, 64) / 64 / 64
    ways = (costs.transfer_s(a, b, 64 * request.row_bytes) for a, b in edges(chain))
    return round(max(*busy.values(), *ways), 9)


@st.composite
def solvable(draw: st.DrawFn, objective: Objective) -> tuple[View, Costs, Request, list[Route]]:
    """Problems whose last peer serves all blocks, and all chains."""
    view, costs, request = draw(problems())
    whole = record("d", f"0:{view.n_blocks}", decode_s=draw(times), prefill_s=draw(times), queue_s=draw(times))
    view = View({**view.records, "d": whole}, view.n_blocks)
    request = replace(request, objective=objective, constraints=Constraints(), prefer=None)
    return view, costs, request, [as_route(chain) for chain in itertools.product(*allowed(view, request))]


@settings(max_examples=100)
@given(solvable(Objective.HOPS))
def test_the_fewest_hops_and_of_those_the_least_latency(problem) -> None:
    view, costs, request, every = problem
    prices = [price(chain, view, costs, request) for chain in every]
    best = min((faults, len(chain), seconds) for chain, (faults, seconds) in zip(every, prices, strict=True))
    found = plan(view, costs, request, NOW)
    assert found.rank == pytest.approx(best, abs=1e-5)


@settings(max_examples=100)
@given(solvable(Objective.THROUGHPUT))
def test_the_highest_throughput_and_of_those_the_least_latency(problem) -> None:
    view, costs, request, every = problem
    prices = {chain: price(chain, view, costs, request) for chain in every}
    found = plan(view, costs, request, NOW)
    fewest = min(faults for faults, _ in prices.values())
    assert found.avoided == fewest, "what is to be avoided goes first"
    assert found.slowest_s == pytest.approx(slowest(found.route, view, costs, request), abs=1e-8)
    assert found.rows_per_s == pytest.approx(64 / found.slowest_s if found.slowest_s else 0.0)
    if not fewest:
        ranks = [(slowest(chain, view, costs, request), prices[chain][1]) for chain in every if not prices[chain][0]]
        assert found.rank[1:] == pytest.approx(min(ranks), abs=1e-7)


def test_many_rows_want_the_work_spread_and_one_token_does_not() -> None:
    view = view_of(6, *(record(peer, "0:6", prefill_s=0.001) for peer in "abc"))
    costs, request = near(CLIENT, *"abc", rtt_s=0.02), Request(n_blocks=6)
    assert len(plan(view, costs, request, NOW).route) == 1
    found = plan(view, costs, replace(request, objective=Objective.THROUGHPUT), NOW)
    assert [len(hop) for hop in found.route] == [2, 2, 2]
    assert found.slowest_s == pytest.approx(2 * CHUNK * 0.001)
    assert f"chain of highest throughput; {found.rows_per_s:.0f} rows a second" in found.explain()


def test_few_hops_at_any_price() -> None:
    slow = record("slow", "0:6", decode_s=1.0)
    quick = [record(peer, span, decode_s=0.001) for peer, span in (("a", "0:2"), ("b", "2:4"), ("c", "4:6"))]
    view, costs = view_of(6, slow, *quick), near(CLIENT, "slow", *"abc")
    request = Request(n_blocks=6, objective=Objective.HOPS)
    found = plan(view, costs, request, NOW)
    assert found.route == route("slow 0:6") and "chain of fewest hops" in found.explain()
    avoiding = replace(request, avoid_peers=frozenset({"slow"}))
    assert plan(view, costs, avoiding, NOW).route == route("a 0:2", "b 2:4", "c 4:6"), "two hops more, no fault"


def test_throughput_does_without_what_broke() -> None:
    view = view_of(6, *(record(peer, "0:6", prefill_s=0.001) for peer in "abc"))
    costs, request = near(CLIENT, *"abc", rtt_s=0.02), Request(n_blocks=6, objective=Objective.THROUGHPUT)
    broken = frozenset(edges(plan(view, costs, request, NOW).route))
    found = plan(view, costs, replace(request, avoid_edges=broken), NOW)
    assert len(found.route) == 3 and found.avoided == 0 and not broken & set(edges(found.route))
    found = plan(view, costs, replace(request, avoid_peers=frozenset("b")), NOW)
    assert found.route.peers == {"a", "c"} and [len(hop) for hop in found.route] == [3, 3]


def test_a_route_in_use_is_left_for_what_the_session_wants() -> None:
    strong = (record(peer, "0:4", prefill_s=0.001) for peer in "ab")
    view = view_of(4, *strong, record("c", "0:4", decode_s=0.009, prefill_s=1.0))
    costs = near(CLIENT, *"abc", rtt_s=0.02)
    for objective, used, left in (
        (Objective.HOPS, route("a 0:2", "b 2:4"), True),
        (Objective.HOPS, route("a 0:4"), False),  # another one is a little faster
        (Objective.THROUGHPUT, route("a 0:4"), True),
        (Objective.THROUGHPUT, route("a 0:2", "b 2:4"), False),
    ):
        request = Request(n_blocks=4, objective=objective, prefer=used, hysteresis=0.3)
        found = plan(view, costs, request, NOW)
        assert found.kept != left, (objective, str(used))
        assert found.rank <= route_cost(used, view, costs, request).rank
