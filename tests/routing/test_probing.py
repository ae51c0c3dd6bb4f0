"""Whom a client is connected with beforehand: the likely ones, for all blocks, and strangers, unlike everywhere."""

from __future__ import annotations

import random
from collections import Counter

from routing.candidates import Candidates
from routing.cost import Costs
from routing.planner import plan
from routing.probing import STRANGERS, Probes
from routing.request import Request
from routing.types import PeerId
from routing.view import View
from tests.routing.crowd import crowd

BLOCKS, PEERS, MOST = 24, 1500, 64


def chosen(view: View, costs: Costs, seed: int) -> set[PeerId]:
    probes = Probes(Candidates(BLOCKS, costs), costs, random.Random(seed))
    found = probes.choose(view, 0.0, MOST)
    assert len(found) == len(set(found)) == MOST
    return set(found)


def test_what_a_plan_takes_is_among_them_most_often_and_every_block_has_several() -> None:
    hits = Counter[bool]()
    for seed in range(8):
        view, costs = crowd(PEERS, BLOCKS, seed)
        found = chosen(view, costs, seed)
        hits.update(peer_id in found for peer_id in plan(view, costs, Request(n_blocks=BLOCKS), 0.0).route.peers)
        few = View({peer_id: view.records[peer_id] for peer_id in found}, BLOCKS)
        assert min(few.coverage(0.0)) >= 3
    assert hits[True] >= 2 * hits[False], hits


def test_clients_that_have_measured_nothing_do_not_all_take_the_same() -> None:
    view, _ = crowd(PEERS, BLOCKS, 0)
    counts = Counter(peer_id for seed in range(40) for peer_id in chosen(view, Costs(), seed))
    assert len(counts) > 3 * MOST
    assert sum(count == 1 for count in counts.values()) > 40, "strangers are others for each"


def test_they_stay_while_they_are_worth_it_and_those_that_went_are_replaced() -> None:
    view, costs = crowd(PEERS, BLOCKS, 1)
    probes = Probes(Candidates(BLOCKS, costs), costs, random.Random(1))
    first = probes.choose(view, 0.0, MOST)
    assert probes.choose(view, 0.0, MOST) == first
    gone = {first[0], first[-1]}
    later = View({peer_id: each for peer_id, each in view.records.items() if peer_id not in gone}, BLOCKS)
    second = probes.choose(later, 0.0, MOST)
    assert len(second) == MOST and not gone & set(second)
    assert len(set(first) & set(second)) >= MOST - 4


def test_in_a_small_swarm_it_is_everybody_and_none_where_none_is_wanted() -> None:
    view, costs = crowd(40, 8, 2)
    probes = Probes(Candidates(8, costs), costs, random.Random(2))
    assert set(probes.choose(view, 0.0, MOST)) == view.records.keys()
    assert probes.choose(view, 0.0, 0) == [] and len(probes.choose(view, 0.0, STRANGERS)) == STRANGERS
