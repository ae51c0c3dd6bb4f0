"""Big random swarms: regions on a sphere, unlike machines, unlike spans."""

from __future__ import annotations

import math
import random

from routing.coordinates import Coordinate
from routing.cost import CLIENT, Costs
from routing.types import PeerRecord, Span
from routing.view import View

EXPIRES = 1e9
LIGHT_S = 0.1  # a round trip half around the world is about three times this


def crowd(peers: int, n_blocks: int, seed: int, regions: int = 20) -> tuple[View, Costs]:
    """Everybody's coordinates are known, and true."""
    rng = random.Random(seed)
    centres = [_on_sphere(rng) for _ in range(regions)]
    costs = Costs()
    costs.place(CLIENT, _near(rng.choice(centres), rng))
    records = {}
    for number in range(peers):
        peer_id = f"peer-{number:05}"
        length = min(n_blocks, rng.choice([2, 4, 4, 8, 8, 16]))
        start = rng.randrange(n_blocks - length + 1)
        decode_s = rng.lognormvariate(math.log(0.004), 0.6)
        records[peer_id] = PeerRecord(
            peer_id=peer_id,
            span=Span(start, start + length),
            expires_at=EXPIRES,
            decode_s=decode_s,
            prefill_s=decode_s * rng.uniform(0.01, 0.1),
            queue_s=rng.choice([0.0, 0.0, rng.expovariate(1 / 0.02)]),
        )
        costs.place(peer_id, _near(rng.choice(centres), rng))
    return View(records, n_blocks), costs


def _on_sphere(rng: random.Random) -> tuple[float, ...]:
    axes = [rng.gauss(0, 1) for _ in range(3)]
    length = math.hypot(*axes)
    return tuple(LIGHT_S * axis / length for axis in axes)


def _near(centre: tuple[float, ...], rng: random.Random) -> Coordinate:
    place = tuple(axis + rng.gauss(0, 0.004) for axis in centre)
    return Coordinate(place=place, height=rng.lognormvariate(math.log(0.004), 0.7), error=0.1)
