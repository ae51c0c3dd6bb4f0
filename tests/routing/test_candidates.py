"""A plan over the few that look cheap, against the plan over all; and what is kept in order, against a fresh start."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from routing.candidates import Candidates
from routing.constraints import Constraints
from routing.cost import CLIENT, Costs
from routing.errors import BadInput, NoRoute
from routing.planner import plan, route_cost
from routing.request import Request
from routing.types import Objective, PeerState, Route, Span
from routing.view import Expired, PeerGone, RecordsSeen, View, apply
from tests.routing.crowd import EXPIRES, crowd

BLOCKS = 24
REQUEST = Request(n_blocks=BLOCKS)


@pytest.mark.parametrize("tokens", [1, 256])
def test_the_plan_over_few_is_nearly_the_best(tokens: int) -> None:
    request, ratios = replace(REQUEST, tokens=tokens, row_bytes=2000), []
    for seed in range(12):
        view, costs = crowd(250, BLOCKS, seed, regions=6)
        short = Candidates(BLOCKS, costs, row_bytes=2000).short_view(view, 0.0, request)
        assert len(short.records) < 200
        found = plan(short, costs, request, 0.0).route
        ratios.append(route_cost(found, view, costs, request).cost_s / plan(view, costs, request, 0.0).cost_s)
    assert max(ratios) <= 1.05, ratios


def test_what_is_kept_up_to_date_is_what_a_fresh_start_would_find() -> None:
    rng = random.Random(1)
    view, costs = crowd(60, BLOCKS, 1, regions=4)
    kept, now = Candidates(BLOCKS, costs, few=0, each=2), 0.0
    for turn in range(200):
        peer_id = rng.choice(sorted(view.records)) if view.records else "nobody"
        record = view.records.get(peer_id)
        match rng.randrange(7):
            case 0 if record:
                view = apply(view, PeerGone(peer_id, now))
            case 1 if record:
                state = rng.choice([PeerState.DRAINING, PeerState.SERVING])
                view = apply(view, RecordsSeen([replace(record, state=state, sequence=record.sequence + 1)]))
            case 2 if record:
                start = rng.randrange(BLOCKS - 1)
                span = Span(start, rng.randint(start + 1, BLOCKS))
                view = apply(view, RecordsSeen([replace(record, span=span, sequence=record.sequence + 1)]))
            case 3:
                fresh, _ = crowd(1, BLOCKS, turn)
                (new,) = fresh.records.values()
                view = apply(view, RecordsSeen([replace(new, peer_id=f"new-{turn}")]))
            case 4:
                costs.observe_decode(peer_id, rng.uniform(0.001, 0.1))
            case 5:
                costs.observe_rtt(CLIENT, peer_id, rng.uniform(0.001, 0.3))
            case _:
                costs.observe_queue(peer_id, rng.uniform(0.0, 0.3))
        if rng.random() < 0.5:  # several changes at once, too
            tokens = rng.choice([1, 200])
            request = replace(REQUEST, tokens=tokens)
            mine = kept.short_view(view, now, request)
            assert mine == Candidates(BLOCKS, costs, few=0, each=2).short_view(view, now, request), turn
    assert len(view.records) > 30


@pytest.mark.parametrize("alike", [False, True])
def test_a_replan_after_changes_is_a_plan_from_nothing(alike: bool) -> None:
    """Also where all peers score the same."""
    rng = random.Random(2)
    view, costs = crowd(90, BLOCKS, 2, regions=4)
    if alike:
        costs = Costs()
        alike_records = [replace(each, decode_s=0.01, queue_s=0.0) for each in view.records.values()]
        view = View({record.peer_id: record for record in alike_records}, BLOCKS)
    kept, moved = Candidates(BLOCKS, costs, row_bytes=2000), 0
    route: Route | None = None
    for turn in range(120):
        chosen, changes = {rng.choice(sorted(view.records))}, []
        if route is not None:
            chosen.add(rng.choice(route.hops).peer_id)
        for peer_id in sorted(chosen):
            record = view.records[peer_id]
            changed = rng.choice([{}, {"queue_s": rng.choice([0.0, 0.05])}, {"decode_s": rng.choice([0.01, 0.02])}])
            changes.append(replace(record, sequence=record.sequence + 1, **changed))
        view = apply(view, RecordsSeen(changes))
        if turn % 5 == 0 and route is not None:  # as a step of the session is measured
            costs.observe_queue(route[0].peer_id, rng.uniform(0.0, 0.1))
            costs.observe_rtt(route[0].peer_id, route[-1].peer_id, rng.uniform(0.0, 0.1))
        request = replace(REQUEST, row_bytes=2000, prefer=route, hysteresis=0.0)
        found = plan(kept.short_view(view, 0.0, request), costs, request, 0.0)
        anew = Candidates(BLOCKS, costs, row_bytes=2000).short_view(view, 0.0, request)
        assert found == plan(anew, costs, request, 0.0), turn
        moved += found.route != route
        route = found.route
    assert moved > 10, "the changes are such that matter"


def test_those_to_be_avoided_take_nobody_s_place_and_stay_where_there_is_nobody_else() -> None:
    view, costs = crowd(80, BLOCKS, 2, regions=3)
    best = plan(view, costs, REQUEST, 0.0).route
    avoiding = replace(REQUEST, avoid_peers=best.peers)
    short = Candidates(BLOCKS, costs, few=0).short_view(view, 0.0, avoiding)
    assert plan(short, costs, avoiding, 0.0).avoided == plan(view, costs, avoiding, 0.0).avoided == 0
    punished = replace(REQUEST, penalties={peer_id: 5.0 for peer_id in best.peers})
    short = Candidates(BLOCKS, costs, few=0).short_view(view, 0.0, punished)
    assert not plan(short, costs, punished, 0.0).route.peers & best.peers
    alone = View({peer_id: view.records[peer_id] for peer_id in best.peers}, BLOCKS)
    assert Candidates(BLOCKS, costs, few=0).short_view(alone, 0.0, avoiding).records == alone.records


def test_expired_and_draining_peers_are_no_candidates_but_the_route_in_use_is() -> None:
    view, costs = crowd(40, BLOCKS, 3, regions=2)
    candidates = Candidates(BLOCKS, costs, few=0, each=1)
    first = candidates.short_view(view, 0.0, REQUEST)
    old = apply(view, RecordsSeen([replace(r, expires_at=5.0, sequence=1) for r in first.records.values()]))
    assert not candidates.short_view(old, 6.0, REQUEST).records.keys() & first.records.keys()
    assert candidates.short_view(apply(old, Expired(6.0)), 6.0, REQUEST).records
    draining = RecordsSeen([replace(record, state=PeerState.DRAINING, sequence=2) for record in view.records.values()])
    gone = apply(view, draining)
    assert not candidates.short_view(gone, 0.0, REQUEST).records
    with pytest.raises(NoRoute, match=f"0:{BLOCKS}"):
        plan(candidates.short_view(gone, 0.0, REQUEST), costs, REQUEST, 0.0)
    route: Route = plan(view, costs, REQUEST, 0.0).route
    in_use = replace(REQUEST, prefer=route)
    assert plan(candidates.short_view(gone, 0.0, in_use), costs, in_use, 0.0).route == route
    assert all(record.expires_at == EXPIRES for record in gone.records.values())


def test_a_small_swarm_is_searched_whole_and_excluded_peers_are_not_there() -> None:
    view, costs = crowd(30, BLOCKS, 4)
    candidates = Candidates(BLOCKS, costs)
    assert candidates.short_view(view, 0.0, REQUEST) == view
    without = frozenset(sorted(view.records)[:5])
    for few in (0, 64):
        short = Candidates(BLOCKS, costs, few=few).short_view(view, 0.0, REQUEST, without=without)
        assert short.records and not short.records.keys() & without
    both = Candidates(BLOCKS, costs, few=0, each=1).short_view(view, 0.0, REQUEST, replace(REQUEST, tokens=256))
    one = Candidates(BLOCKS, costs, few=0, each=1).short_view(view, 0.0, REQUEST)
    assert both.records.keys() > one.records.keys()


def test_constraints_are_kept_by_the_few_too() -> None:
    ratios = []
    for seed in range(12):
        view, costs = crowd(250, BLOCKS, seed, regions=6)
        free = plan(view, costs, REQUEST, 0.0).route
        trusted = frozenset(random.Random(seed).sample(sorted(view.records), 170))
        limited = replace(REQUEST, constraints=Constraints(never=free.peers, trusted=trusted - free.peers))
        found = plan(Candidates(BLOCKS, costs, few=0).short_view(view, 0.0, limited), costs, limited, 0.0)
        assert not found.route.peers & free.peers
        assert {found.route[0].peer_id, found.route[-1].peer_id} <= trusted
        ratios.append(found.cost_s / plan(view, costs, limited, 0.0).cost_s)
    assert median(ratios) <= 1.01 and max(ratios) <= 1.15, ratios


def test_those_who_are_left_out_stay_in_sight_where_nobody_else_serves() -> None:
    view, costs = crowd(200, BLOCKS, 1)
    view = View({peer: replace(record, region="eu") for peer, record in view.records.items()}, BLOCKS)
    limited = replace(REQUEST, constraints=Constraints(region=frozenset({"us"})))
    short = Candidates(BLOCKS, costs, few=0).short_view(view, 0.0, limited)
    with pytest.raises(NoRoute, match="left out by region"):
        plan(short, costs, limited, 0.0)


@pytest.mark.parametrize("objective", [Objective.HOPS, Objective.THROUGHPUT])
def test_the_few_do_for_other_ends_too(objective: Objective) -> None:
    request, more = replace(REQUEST, objective=objective, row_bytes=2000), []
    for seed in range(4):
        view, costs = crowd(250, BLOCKS, seed, regions=6)
        short = Candidates(BLOCKS, costs, row_bytes=2000).short_view(view, 0.0, request)
        assert len(short.records) < 120
        found, best = plan(short, costs, request, 0.0), plan(view, costs, request, 0.0)
        assert len(found.route) == len(best.route) or objective is Objective.THROUGHPUT
        assert found.slowest_s <= 1.02 * best.slowest_s
        more.append(found.cost_s / best.cost_s)
    assert median(more) <= 1.02 and max(more) <= 1.2, more


def test_none_at_all_is_refused() -> None:
    with pytest.raises(BadInput):
        Candidates(BLOCKS, Costs(), each=0)
