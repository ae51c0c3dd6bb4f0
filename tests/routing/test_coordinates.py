"""Coordinates on a synthetic matrix with the shape of the published ones: regions, access links, detours."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest

from routing.coordinates import DIMENSIONS, Coordinate, Vivaldi
from routing.cost import CLIENT, Costs
from routing.errors import BadInput

HOSTS, NEIGHBOURS, ROUNDS = 200, 32, 150
NOISE = 0.05  # of a measurement


def matrix(rng: random.Random) -> list[list[float]]:
    """Round trips in seconds of hosts in a dozen cities: light in fibre with detours, and unlike access links. About a
    sixth of all triangles break the triangle inequality, as in measured ones."""
    cities = [(rng.uniform(-60, 60), rng.uniform(-180, 180)) for _ in range(12)]
    hosts = []
    for _ in range(HOSTS):
        north, east = rng.choice(cities)
        access_s = min(0.08, rng.lognormvariate(math.log(0.004), 0.8))
        hosts.append((math.radians(north + rng.gauss(0, 4)), math.radians(east + rng.gauss(0, 6)), access_s))
    rtts = [[0.0] * HOSTS for _ in range(HOSTS)]
    for a in range(HOSTS):
        for b in range(a):
            (na, ea, access_a), (nb, eb, access_b) = hosts[a], hosts[b]
            angle = math.acos(
                max(-1.0, min(1.0, math.sin(na) * math.sin(nb) + math.cos(na) * math.cos(nb) * math.cos(ea - eb)))
            )
            fibre_s = 1.4 * 2 * 6371 * angle / 200_000
            rtts[a][b] = rtts[b][a] = (fibre_s + access_a + access_b) * rng.lognormvariate(0, 0.1)
    return rtts


def broken_triangles(rtts: list[list[float]], rng: random.Random) -> float:
    broken = 0
    for _ in range(20_000):
        a, b, c = rng.sample(range(HOSTS), 3)
        short, middle, long = sorted((rtts[a][b], rtts[b][c], rtts[a][c]))
        broken += long > short + middle
    return broken / 20_000


def test_a_few_measurements_each_predict_all_others() -> None:
    rng = random.Random(1)
    rtts = matrix(rng)
    assert 0.12 < broken_triangles(rtts, rng) < 0.25
    ends = [Vivaldi() for _ in range(HOSTS)]
    neighbours = [rng.sample([b for b in range(HOSTS) if b != a], NEIGHBOURS) for a in range(HOSTS)]
    for _ in range(ROUNDS):
        for a, end in enumerate(ends):
            b = rng.choice(neighbours[a])
            measured_s = rtts[a][b] * rng.lognormvariate(0, NOISE)
            end.observe(ends[b].coordinate, measured_s, tuple(rng.gauss(0, 1) for _ in range(DIMENSIONS)))
    errors = [
        abs(ends[a].coordinate.rtt_s(ends[b].coordinate) - rtts[a][b]) / rtts[a][b]
        for a in range(HOSTS) for b in range(a) if b not in neighbours[a]
    ]  # fmt: skip
    print(f"median relative error {median(errors):.3f}")
    assert median(errors) <= 0.15
    assert sum(end.coordinate.known for end in ends) > 0.9 * HOSTS


def test_one_liar_moves_nobody_far() -> None:
    """What it claims is cut to what is possible, and one measurement moves an end by a share of what is wrong."""
    honest = Vivaldi(Coordinate(place=(0.01, 0.0, 0.0), height=0.002, error=0.1))
    before = honest.coordinate
    honest.observe(Coordinate(place=(10.0, 10.0, 10.0), error=0.0), 0.05, (1.0, 0.0, 0.0))
    assert before.rtt_s(honest.coordinate) < 5.0
    for rtt_s in (0.0, -1.0, math.nan, math.inf, 1e9):
        moved = honest.coordinate
        honest.observe(before, rtt_s, (1.0, 0.0, 0.0))
        assert honest.coordinate == moved
    for wrong in ({"place": (0.0,)}, {"place": (math.nan, 0.0, 0.0)}, {"height": -1.0}, {"error": math.nan}):
        with pytest.raises(BadInput):
            Coordinate(**wrong)


def test_costs_take_them_where_nobody_measured() -> None:
    costs = Costs()
    here, there = Coordinate(place=(0.0, 0.0, 0.0), error=0.1), Coordinate(place=(0.06, 0.08, 0.0), error=0.1)
    costs.place("a", here)
    assert costs.link_s("a", "b") == costs.settings.link_s
    costs.place("b", there)
    assert costs.link_s("a", "b") == pytest.approx(0.05, rel=1e-3)
    costs.place("b", Coordinate(place=there.place, error=0.9))  # it does not know yet where it is
    assert costs.link_s("a", "b") == costs.settings.link_s
    costs.place("b", there)
    costs.observe_rtt("a", "b", 0.02)
    assert costs.link_s("a", "b") == pytest.approx(0.01)
    costs.advance(1e6)  # what was measured has faded
    assert costs.link_s("a", "b") == pytest.approx(0.05, rel=1e-3)
    assert costs.take_changed() == {"a", "b"} and not costs.take_changed()
    costs.place(CLIENT, here)
    assert costs.take_changed() == {CLIENT}
