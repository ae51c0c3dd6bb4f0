"""The search with all that keeps it small, against the plain dynamic programme without any of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.search import MANY, Search


def random_search(seed: int, tightness: float) -> tuple[Search, dict[tuple[int, int], float], Counter]:
    rng = random.Random(seed)
    peers, blocks = rng.randint(1, 25), rng.randint(1, 20)
    spans = [(0, blocks)]
    for _ in range(peers - 1):
        start = rng.randint(0, blocks - 1)
        spans.append((start, rng.randint(start + 1, blocks)))
    scale = rng.choice([0.1, 1.0, 10.0])
    links = {
        pair: scale * rng.choice([0.1, 1.0, rng.random()]) for pair in itertools.permutations(range(peers), 2)
    }
    asked: Counter = Counter()

    def link(a: int, b: int) -> float:
        asked[a, b] += 1
        return links[a, b]

    into = [[links[a, b] for a in range(peers) if a != b] for b in range(peers)]
    search = Search(
        servers=[
            [peer for peer, (start, end) in enumerate(spans) if start <= block < end]
            for block in range(blocks)
        ],
        block_cost=[rng.choice([0.0, 0.5, rng.random()]) for _ in range(peers)],
        toll=[rng.choice([0.0, rng.random(), 1e6]) for _ in range(peers)],
        enter=[rng.random() for _ in range(peers)],
        leave=[rng.random() for _ in range(peers)],
        shortest=[tightness * min(each, default=0.0) for each in into],
        link=link,
    )
    return search, links, asked


def path_cost(search: Search, links: dict[tuple[int, int], float], path: list[int]) -> float:
    cost = search.enter[path[0]] + search.toll[path[0]] + search.leave[path[-1]]
    cost += sum(search.block_cost[peer] for peer in path)
    return cost + sum(links[a, b] + search.toll[b] for a, b in itertools.pairwise(path) if a != b)


def plain_cost(search: Search, links: dict[tuple[int, int], float]) -> float:
    at = {
        peer: search.enter[peer] + search.toll[peer] + search.block_cost[peer] for peer in search.servers[0]
    }
    for servers in search.servers[1:]:
        at = {
            peer: search.block_cost[peer]
            + min(cost if a == peer else cost + links[a, peer] + search.toll[peer] for a, cost in at.items())
            for peer in servers
        }
    return min(cost + search.leave[peer] for peer, cost in at.items())


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.booleans())
def test_nothing_is_lost_by_looking_at_less(seed, tightness, in_use, bounded):
    search, links, asked = random_search(seed, tightness)
    search.many = 0 if bounded else MANY
    if in_use:  # some path, the best one or one far from it
        rng = random.Random(seed)
        search.known = [rng.choice(servers) for servers in search.servers]
    path = search.run()
    assert all(peer in servers for peer, servers in zip(path, search.servers, strict=True))
    expected = plain_cost(search, links)
    assert path_cost(search, links, path) == pytest.approx(expected, rel=1e-12, abs=1e-9)
    assert max(asked.values(), default=1) == 1, "a pair is worked out once, not once a block"
