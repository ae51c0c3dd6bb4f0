"""The planner against brute force: all chains of small swarms, by a cost worked out here in another way."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from routing.constraints import Constraints
from routing.cost import CLIENT, Costs
from routing.errors import BadInput, NoRoute
from routing.planner import Plan, Split, plan, route_cost, split_plan
from routing.request import Request
from routing.types import Hop, PeerRecord, PeerState, Route, Span
from routing.view import View

NOW = 10.0


def record(peer: str, span: str, **fields) -> PeerRecord:
    return PeerRecord(
        peer_id=peer, span=Span.parse(span), **{"expires_at": 100.0, "decode_s": 0.01, **fields}
    )


def view_of(n_blocks: int, *records: PeerRecord) -> View:
    return View({each.peer_id: each for each in records}, n_blocks)


def route(*hops: str) -> Route:
    """`"a 0:3", "b 3:4"` to a route."""
    parts = [hop.split() for hop in hops]
    spans = [(peer, Span.parse(span)) for peer, span in parts]
    return Route(tuple(Hop(peer, span.start, span.end) for peer, span in spans))


def near(*ends: str, rtt_s: float = 0.002, costs: Costs | None = None) -> Costs:
    """Costs where all pairs of `ends` were measured at `rtt_s`."""
    costs = costs or Costs()
    for a, b in itertools.combinations(ends, 2):
        costs.observe_rtt(a, b, rtt_s)
    return costs


# --- brute force --------------------------------------------------------------------------------------------


def as_route(assignment: tuple[str, ...]) -> Route:
    """A peer for each block to a route of maximal runs."""
    hops, at = [], 0
    for peer, run in itertools.groupby(assignment):
        size = len(list(run))
        hops.append(Hop(peer, at, at + size))
        at += size
    return Route(tuple(hops))


def allowed(view: View, request: Request) -> list[list[str]]:
    result = []
    for block in range(request.n_blocks):
        alive = [
            each for each in view.records.values()
            if each.expires_at >= NOW and block in each.span
            if each.peer_id not in request.constraints.never
            if request.constraints.only is None or each.peer_id in request.constraints.only
            if block not in (0, view.n_blocks - 1) or request.constraints.trusted is None
            or each.peer_id in request.constraints.trusted
            if request.constraints.region is None or each.region in request.constraints.region
            if request.constraints.exact in (None, each.dtype)
        ]  # fmt: skip
        serving = [each.peer_id for each in alive if each.state is PeerState.SERVING]
        in_use = {hop.peer_id for hop in request.prefer} if request.prefer else set()
        leftover = [
            each.peer_id for each in alive if each.state is PeerState.DRAINING and each.peer_id in in_use
        ]
        result.append(serving or leftover)
    return result


def price(chain: Route, view: View, costs: Costs, request: Request) -> tuple[int, float]:
    """(uses of avoided things, seconds): what a plan has to be least in."""
    faults, seconds, before = 0, 0.0, CLIENT
    for hop in chain:
        its_record = view.records[hop.peer_id]
        faults += (hop.peer_id in request.avoid_peers) + 4 * ((before, hop.peer_id) in request.avoid_edges)
        seconds += costs.link_s(before, hop.peer_id)
        seconds += costs.transfer_s(before, hop.peer_id, request.tokens * request.row_bytes)
        seconds += costs.queue_s(its_record) + request.penalties.get(hop.peer_id, 0.0)
        seconds += sum(costs.block_s(its_record, request.tokens) for _ in range(hop.entry, hop.exit))
        if hop.peer_id not in request.held:
            seconds += request.context * (hop.exit - hop.entry) * costs.block_s(its_record, 64) / 64 / 64
        before = hop.peer_id
    faults += 4 * ((before, CLIENT) in request.avoid_edges)
    return faults, seconds + costs.link_s(before, CLIENT) + costs.transfer_s(
        before, CLIENT, request.row_bytes
    )


def cheapest(view: View, costs: Costs, request: Request) -> tuple[int, float]:
    chains = map(as_route, itertools.product(*allowed(view, request)))
    return min(price(chain, view, costs, request) for chain in chains)


def assert_price(
    result: Plan, expected: tuple[int, float], view: View, costs: Costs, request: Request
) -> None:
    faults, seconds = expected
    assert (result.avoided, result.cost_s) == (faults, pytest.approx(seconds, abs=1e-7))
    assert price(result.route, view, costs, request) == (faults, pytest.approx(seconds, abs=1e-7))


NAMES = "abcd"
times = st.sampled_from([0.0, 0.001, 0.002, 0.005, 0.013, 0.05])


@st.composite
def swarms(draw: st.DrawFn, states: list[PeerState]) -> tuple[View, Costs]:
    n_blocks = draw(st.integers(1, 5))
    records = []
    for peer in NAMES[: draw(st.integers(1, 4))]:
        start = draw(st.integers(0, n_blocks - 1))
        end = draw(st.integers(start + 1, n_blocks))
        records.append(
            record(
                peer,
                f"{start}:{end}",
                state=draw(st.sampled_from(states)),
                expires_at=draw(st.sampled_from([100.0, 100.0, 100.0, 5.0])),
                decode_s=draw(times),
                prefill_s=draw(times),
                queue_s=draw(times),
                region=draw(st.sampled_from(["eu", "eu", ""])),
                dtype=draw(st.sampled_from(["float32", "float32", "bfloat16"])),
            )
        )
    costs = Costs()
    for a, b in itertools.combinations([CLIENT, *NAMES], 2):
        if draw(st.booleans()):
            costs.observe_rtt(a, b, draw(times))
        if draw(st.booleans()):
            costs.observe_bandwidth(b, a, draw(st.sampled_from([1e5, 1e6])))
    costs.advance(draw(st.sampled_from([0.0, 100.0])))
    return view_of(n_blocks, *records), costs


some = st.none() | st.frozensets(st.sampled_from(NAMES), min_size=2)
constraints = st.just(Constraints()) | st.builds(
    Constraints, only=some, never=st.frozensets(st.sampled_from(NAMES), max_size=1), trusted=some,
    region=st.sampled_from([None, None, frozenset({"eu", "us"})]), exact=st.sampled_from([None, None, "float32"]),
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn) -> tuple[View, Costs, Request]:
    view, costs = draw(swarms(draw(st.sampled_from([[PeerState.SERVING], list(PeerState)]))))
    ends = st.sampled_from([CLIENT, *NAMES])
    prefer = None
    if draw(st.booleans()):
        blocks = range(view.n_blocks)
        choices = [
            [each for each in sorted(view.records) if block in view.records[each].span] for block in blocks
        ]
        if all(choices):
            prefer = as_route(tuple(draw(st.sampled_from(peers)) for peers in choices))
    request = Request(
        n_blocks=view.n_blocks,
        tokens=draw(st.sampled_from([1, 7])),
        row_bytes=draw(st.sampled_from([0, 2000])),
        avoid_peers=draw(st.frozensets(st.sampled_from(NAMES), max_size=3)),
        avoid_edges=draw(st.frozensets(st.tuples(ends, ends), max_size=6)),
        penalties=draw(st.dictionaries(st.sampled_from(NAMES), times)),
        held=draw(st.frozensets(st.sampled_from(NAMES))),
        context=draw(st.sampled_from([0, 0, 100])),
        constraints=draw(constraints),
        prefer=prefer,
        hysteresis=draw(st.sampled_from([0.0, 0.1, 0.5])),
    )
    return view, costs, request


@settings(max_examples=400)
@given(problems())
def test_the_plan_is_the_best_of_all_chains(problem):
    view, costs, request = problem
    servers = allowed(view, request)
    bare = tuple(block for block, peers in enumerate(servers) if not peers)
    if bare:
        with pytest.raises(NoRoute) as caught:
            plan(view, costs, request, NOW)
        assert caught.value.blocks == bare
        return
    result = plan(view, costs, request, NOW)
    best = cheapest(view, costs, request)
    prefer = request.prefer
    usable = prefer is not None and all(
        hop.peer_id in servers[block] for hop in prefer for block in range(hop.entry, hop.exit)
    )
    if not usable:
        assert not result.kept
        assert_price(result, best, view, costs, request)
        return
    now_paid = price(prefer, view, costs, request)
    gain, wanted = now_paid[1] - best[1], request.hysteresis * now_paid[1]
    assume(now_paid[0] > best[0] or abs(gain - wanted) > 1e-9 or gain < 1e-12)
    if now_paid[0] > best[0] or gain > max(wanted, 1e-12):
        assert not result.kept
        assert_price(result, best, view, costs, request)
    elif gain <= 1e-12 and wanted == 0.0:
        assert_price(result, best, view, costs, request)  # equal up to rounding: either may be taken
    else:
        assert result.kept and result.route == prefer
        assert result.cost_s == pytest.approx(now_paid[1])


@settings(max_examples=60)
@given(problems(), st.randoms())
def test_the_order_of_records_does_not_matter(problem, rng):
    view, costs, request = problem
    items = list(view.records.items())
    rng.shuffle(items)
    try:
        first = plan(view, costs, request, NOW)
    except NoRoute:
        return
    assert plan(View(dict(items), view.n_blocks), costs, request, NOW) == first


# --- what a route costs -------------------------------------------------------------------------------------


def test_terms_of_a_route():
    costs = near(CLIENT, "a", "b", rtt_s=0.02)
    view = view_of(4, record("a", "0:3", queue_s=0.5), record("b", "3:4", decode_s=0.02))
    result = route_cost(route("a 0:3", "b 3:4"), view, costs, Request(n_blocks=4, penalties={"b": 7.0}))
    first, last = result.terms
    assert (first.network_s, first.queue_s, first.penalty_s) == (pytest.approx(0.01), 0.5, 0.0)
    assert first.compute_s == pytest.approx(0.03)
    assert last.network_s == pytest.approx(0.02), "the way to it and the way back"
    assert (last.queue_s, last.compute_s, last.penalty_s) == (0.0, 0.02, 7.0)
    assert result.cost_s == pytest.approx(first.total_s + last.total_s) == pytest.approx(7.58)


def test_rows_are_sent_forth_and_one_comes_back():
    costs = near(CLIENT, "a", rtt_s=0.0)
    costs.observe_bandwidth(CLIENT, "a", 1000.0)
    costs.observe_bandwidth("a", CLIENT, 100.0)
    view = view_of(1, record("a", "0:1"))
    term = route_cost(route("a 0:1"), view, costs, Request(n_blocks=1, tokens=50, row_bytes=10)).terms[0]
    assert term.network_s == pytest.approx(0.5 + 0.1)


def test_the_cost_of_a_route_with_a_peer_nobody_knows():
    with pytest.raises(NoRoute) as caught:
        route_cost(route("a 0:1", "x 1:3"), view_of(3, record("a", "0:3")), Costs(), Request(n_blocks=3))
    assert caught.value.blocks == (1, 2)


# --- which chain --------------------------------------------------------------------------------------------


def test_prefill_and_decode_take_different_peers():
    view = view_of(
        2,
        record("decoder", "0:2", decode_s=0.001, prefill_s=0.1),
        record("prefiller", "0:2", decode_s=0.1, prefill_s=0.001),
    )
    costs = near(CLIENT, "decoder", "prefiller")
    assert plan(view, costs, Request(n_blocks=2), NOW).route == route("decoder 0:2")
    assert plan(view, costs, Request(n_blocks=2, tokens=100), NOW).route == route("prefiller 0:2")


def test_a_peer_twice_if_that_is_fastest():
    view = view_of(6, record("fast", "0:6", decode_s=0.2), record("middle", "2:4", decode_s=0.001))
    result = plan(view, near(CLIENT, "fast", "middle"), Request(n_blocks=6), NOW)
    assert result.route == route("fast 0:2", "middle 2:4", "fast 4:6")


def test_entry_and_exit_inside_of_spans():
    view = view_of(6, record("a", "0:4", decode_s=0.1), record("b", "2:6"))
    assert plan(view, near(CLIENT, "a", "b"), Request(n_blocks=6), NOW).route == route("a 0:2", "b 2:6")


def test_the_way_back_to_the_client_counts():
    view = view_of(2, record("a", "0:1"), record("far", "1:2"), record("near", "1:2"))
    costs = near(CLIENT, "a", "near", rtt_s=0.02)
    costs.observe_rtt("a", "far", 0.002)
    costs.observe_rtt("far", CLIENT, 0.5)
    assert plan(view, costs, Request(n_blocks=2), NOW).route == route("a 0:1", "near 1:2")


def test_a_relay_where_the_direct_way_is_longer():
    """Links on the internet do not obey the triangle inequality."""
    view = view_of(3, record("a", "0:1"), record("relay", "1:2"), record("b", "1:3"))
    costs = near(CLIENT, "a", "relay", "b")
    costs.observe_rtt("a", "relay", 0.002)
    slow = Costs()
    for pair, rtt_s in {("a", "b"): 1.0, ("a", "relay"): 0.002, ("relay", "b"): 0.002}.items():
        slow.observe_rtt(*pair, rtt_s)
    for peer in ("a", "relay", "b"):
        slow.observe_rtt(CLIENT, peer, 0.002)
    assert plan(view, costs, Request(n_blocks=3), NOW).route == route("a 0:1", "b 1:3")
    assert plan(view, slow, Request(n_blocks=3), NOW).route == route("a 0:1", "relay 1:2", "b 2:3")


def test_equal_costs_go_to_the_smaller_peer_id():
    view = view_of(3, *(record(peer, "0:3") for peer in ("c", "b", "d")))
    assert plan(view, Costs(), Request(n_blocks=3), NOW).route == route("b 0:3")


def test_no_route_names_the_blocks_that_nobody_serves():
    view = view_of(
        8,
        record("a", "0:2"),
        record("joining", "0:8", state=PeerState.JOINING),
        record("draining", "0:8", state=PeerState.DRAINING),
        record("leaving", "0:8", state=PeerState.LEAVING),
        record("expired", "0:8", expires_at=NOW - 1),
        record("b", "4:7"),
    )
    with pytest.raises(NoRoute, match="2:4, 7:8") as caught:
        plan(view, Costs(), Request(n_blocks=8), NOW)
    assert caught.value.blocks == (2, 3, 7)


def test_a_draining_peer_finishes_what_it_has_only_where_nobody_else_serves():
    draining = record("old", "0:4", state=PeerState.DRAINING)
    request = Request(n_blocks=4, prefer=route("old 0:4"))
    alone = view_of(4, draining)
    assert plan(alone, Costs(), request, NOW).route == route("old 0:4")
    half = view_of(4, draining, record("new", "0:2", decode_s=5.0))
    assert plan(half, Costs(), request, NOW).route == route("new 0:2", "old 2:4")
    with pytest.raises(NoRoute):
        plan(half, Costs(), Request(n_blocks=4, prefer=route("new 0:4")), NOW)


# --- avoiding -----------------------------------------------------------------------------------------------


def test_avoided_peers_are_used_only_where_nothing_else_serves():
    view = view_of(4, record("a", "0:4"), record("b", "0:3", decode_s=3000.0))
    request = Request(n_blocks=4, avoid_peers=frozenset({"a"}))
    result = plan(view, Costs(), request, NOW)
    # One use either way: then the cheaper one, which is all of it on `a`.
    assert (result.route, result.avoided) == (route("a 0:4"), 1)
    wide = view_of(4, *view.records.values(), record("c", "3:4", decode_s=3000.0))
    result = plan(wide, Costs(), request, NOW)
    assert (result.route, result.avoided) == (route("b 0:3", "c 3:4"), 0)


def test_as_few_avoided_as_possible_whatever_they_cost():
    view = view_of(4, record("a", "0:2"), record("b", "2:4"), record("slow", "0:4", decode_s=900.0))
    request = Request(n_blocks=4, avoid_peers=frozenset({"a", "b", "slow"}))
    result = plan(view, Costs(), request, NOW)
    assert (result.route, result.avoided) == (route("slow 0:4"), 1)


def test_an_edge_that_broke_is_worse_than_peers_that_failed_once():
    view = view_of(2, record("a", "0:1"), record("b", "1:2"), record("c", "0:1"), record("d", "1:2"))
    request = Request(n_blocks=2, avoid_peers=frozenset("cd"), avoid_edges=frozenset({("a", "b")}))
    assert plan(view, Costs(), request, NOW).route in (route("a 0:1", "d 1:2"), route("c 0:1", "b 1:2"))


def test_avoided_edges_are_directed_and_include_the_ways_from_and_to_the_client():
    view = view_of(2, record("a", "0:2"), record("b", "0:2", decode_s=1.0))
    costs = near(CLIENT, "a", "b")
    for edge, expected in {(CLIENT, "a"): "b 0:1|a 1:2", ("a", CLIENT): "a 0:1|b 1:2"}.items():
        request = Request(n_blocks=2, avoid_edges=frozenset({edge}))
        result = plan(view, costs, request, NOW)
        assert (result.route, result.avoided) == (route(*expected.split("|")), 0)
    harmless = Request(n_blocks=2, avoid_edges=frozenset({("b", "a"), ("a", "b")}))
    assert plan(view, costs, harmless, NOW).route == route("a 0:2")


def test_a_route_in_use_over_an_avoided_peer_is_left():
    view = view_of(2, record("a", "0:2"), record("b", "0:2", decode_s=0.5))
    request = Request(n_blocks=2, prefer=route("a 0:2"), avoid_peers=frozenset({"a"}), hysteresis=0.9)
    assert plan(view, Costs(), request, NOW).route == route("b 0:2")


def test_a_penalty_moves_a_route_by_its_seconds():
    view = view_of(1, record("a", "0:1", decode_s=0.1), record("b", "0:1", decode_s=0.3))
    assert plan(view, Costs(), Request(n_blocks=1, penalties={"a": 0.1}), NOW).route == route("a 0:1")
    assert plan(view, Costs(), Request(n_blocks=1, penalties={"a": 0.3}), NOW).route == route("b 0:1")


# --- hysteresis ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new_s", "moves"), [(0.95, False), (0.905, False), (0.89, True)])
def test_a_small_gain_does_not_move_a_session(new_s, moves):
    costs = near(CLIENT, "a", "b", rtt_s=0.0)
    view = view_of(1, record("a", "0:1", decode_s=1.0), record("b", "0:1", decode_s=new_s))
    result = plan(view, costs, Request(n_blocks=1, prefer=route("a 0:1")), NOW)
    assert result.route == route("b 0:1" if moves else "a 0:1")
    assert result.kept is not moves
    assert result.fastest_s == pytest.approx(new_s)


def test_a_hop_that_became_slow_does():
    costs = near(CLIENT, "a", "b", rtt_s=0.0)
    view = view_of(1, record("a", "0:1"), record("b", "0:1"))
    request = Request(n_blocks=1, prefer=route("b 0:1"))
    assert plan(view, costs, request, NOW).kept
    for _ in range(3):
        costs.observe_queue("b", 0.1)
    assert plan(view, costs, request, NOW).route == route("a 0:1")


@pytest.mark.parametrize("prefer", ["gone 0:2", "a 0:1"])
def test_a_route_that_is_no_longer_one_is_not_kept(prefer):
    view = view_of(2, record("a", "0:2"))
    result = plan(view, Costs(), Request(n_blocks=2, prefer=route(prefer), hysteresis=5.0), NOW)
    assert result.route == route("a 0:2") and not result.kept


def test_explain_says_why_and_what_each_hop_costs():
    costs = near(CLIENT, "a", "b", rtt_s=0.02)
    view = view_of(2, record("a", "0:1", queue_s=0.005), record("b", "0:2", decode_s=0.5))
    request = Request(n_blocks=2, avoid_peers=frozenset({"b"}), penalties={"b": 0.001})
    lines = plan(view, costs, request, NOW).explain().splitlines()
    assert lines[0].startswith("546.0 ms (fastest chain; nothing covers the model without peers that failed")
    assert lines[1] == "a[0:1]: 25.0 ms = network 10.0 + queue 5.0 + compute 10.0"
    assert lines[2] == "b[1:2]: 521.0 ms = network 20.0 + queue 0.0 + compute 500.0 + penalty 1.0"
    equal = view_of(1, record("a", "0:1"), record("b", "0:1"))
    kept = plan(equal, costs, Request(n_blocks=1, prefer=route("b 0:1")), NOW)
    assert "kept: no chain is faster" in kept.explain()
    slower = view_of(1, record("a", "0:1"), record("b", "0:1", decode_s=0.0101))
    kept = plan(slower, costs, Request(n_blocks=1, prefer=route("b 0:1")), NOW)
    assert "kept: another chain takes 30.0 ms" in kept.explain()
    assert "as given" in route_cost(route("b 0:1"), slower, costs, request).explain()


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_blocks": 0},
        {"tokens": 0},
        {"row_bytes": -1},
        {"hysteresis": -0.1},
        {"hysteresis": float("nan")},
        {"penalties": {"a": -1.0}},
        {"penalties": {"a": float("nan")}},
    ],
)
def test_requests_are_checked(wrong):
    with pytest.raises(BadInput):
        Request(**{"n_blocks": 1, **wrong})


# --- scale --------------------------------------------------------------------------------------------------


class CountingCosts(Costs):
    asked = 0

    def link_s(self, a: str, b: str) -> float:
        self.asked += 1
        return super().link_s(a, b)


def big_swarm(peers: int, blocks: int, shortest: int, longest: int) -> tuple[View, CountingCosts]:
    rng = random.Random(7)
    costs = CountingCosts()
    records = []
    for index in range(peers):
        size = rng.randint(shortest, longest)
        start = rng.randint(0, blocks - size)
        name = f"p{index:03}"
        records.append(
            record(
                name,
                f"{start}:{start + size}",
                decode_s=rng.uniform(0.001, 0.004),
                queue_s=rng.choice([0.0, 0.002, 0.02]),
            )
        )
        costs.observe_rtt(CLIENT, name, rng.uniform(0.005, 0.15))
    names = [each.peer_id for each in records]
    for _ in range(1000):
        a, b = rng.sample(names, 2)
        costs.observe_rtt(a, b, rng.uniform(0.002, 0.2))
    return view_of(blocks, *records), costs


@pytest.mark.parametrize(("shortest", "longest", "share"), [(6, 30, 1 / 3), (80, 80, 1 / 100)])
def test_three_hundred_peers_need_few_relaxations(shortest, longest, share):
    view, costs = big_swarm(300, 80, shortest, longest)
    request = Request(n_blocks=80)
    sizes = [len(peers) for peers in allowed(view, request)]
    all_moves = sum(before * after for before, after in itertools.pairwise(sizes))
    result = plan(view, costs, request, NOW)
    assert result.relaxations < share * all_moves
    # Links are asked for by pair, not by block: to and from the client, the pairs in question, and the bill.
    assert costs.asked < 300 * 300 / 2


# -- one chain or two ---------------------------------------------------------------------------------------


def unlike(prefill_ratio: float = 4.0, link_ratio: float = 10.0) -> tuple[View, Costs]:
    """Two chains of two: one is quicker with prompts, the other one nearer."""
    records = [
        record(f"{name}-{half}", span, prefill_s=prefill_s)
        for name, prefill_s in (("strong", 1e-3), ("near", prefill_ratio * 1e-3))
        for half, span in (("a", "0:4"), ("b", "4:8"))
    ]
    costs = Costs()
    for each in records:
        rtt_s = 0.05 if each.peer_id.startswith("strong") else 0.05 / link_ratio
        costs.observe_rtt(CLIENT, each.peer_id, rtt_s)
    costs.observe_rtt("strong-a", "strong-b", 0.05)
    costs.observe_rtt("near-a", "near-b", 0.05 / link_ratio)
    return view_of(8, *records), costs


def split(view: View, costs: Costs, prompt: int, move_s: float = 1.0) -> Plan | Split:
    decode, prefill = Request(n_blocks=8), Request(n_blocks=8, tokens=prompt)
    return split_plan(view, costs, decode, prefill, 0.0, tokens=256, move_s=lambda before, after: move_s)


def test_a_long_prompt_and_its_answer_take_two_chains_of_unlike_peers() -> None:
    found = split(*unlike(), prompt=2000)
    assert isinstance(found, Split)
    assert [hop.peer_id for hop in found.prefill.route] == ["strong-a", "strong-b"]
    assert [hop.peer_id for hop in found.decode.route] == ["near-a", "near-b"]


@pytest.mark.parametrize(
    ("view_costs", "prompt", "move_s", "expected"),
    [
        (unlike(), 20, 1.0, "near-a"),  # a short prompt
        (unlike(), 2000, 1e3, "strong-a"),  # a move that takes longer than the answer
        (unlike(prefill_ratio=1.1), 2000, 1.0, "near-a"),  # hardly quicker
        (unlike(link_ratio=1.05), 2000, 1.0, "strong-a"),  # hardly nearer
    ],
    ids=["short prompt", "slow move", "as quick", "as near"],
)
def test_one_chain_where_two_gain_little(
    view_costs: tuple[View, Costs], prompt: int, move_s: float, expected: str
) -> None:
    found = split(*view_costs, prompt=prompt, move_s=move_s)
    assert isinstance(found, Plan) and found.route[0].peer_id == expected


@given(st.integers(0, 10_000), st.integers(2, 4000), st.floats(0.0, 100.0))
@settings(max_examples=60)
def test_two_chains_have_the_same_boundaries_and_save_time(seed: int, prompt: int, move_s: float) -> None:
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, 8), rng.randint(0, 3)))
    spans = [(a, b) for a, b in itertools.pairwise([0, *cuts, 8])] * 2 + [(0, 8)]
    records = [
        record(f"p{i}", f"{a}:{b}", prefill_s=10 ** rng.uniform(-5, -2), decode_s=10 ** rng.uniform(-4, -1))
        for i, (a, b) in enumerate(spans)
    ]
    view, costs, request = view_of(8, *records), Costs(), Request(n_blocks=8)
    found = split(view, costs, prompt, move_s)
    if isinstance(found, Split):
        assert [(h.entry, h.exit) for h in found.prefill.route] == [(h.entry, h.exit) for h in found.decode.route]
        alone = route_cost(found.prefill.route, view, costs, request)
        assert found.decode.cost_s < alone.cost_s
