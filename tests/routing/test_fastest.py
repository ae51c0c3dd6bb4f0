"""The fastest chain with one more peer, against all chains looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.fastest import Fastest
from routing.types import Span

PEERS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.floats(0.5, 100.0)), max_size=4)
N_BLOCKS = 5
NOWHERE = Span(N_BLOCKS, N_BLOCKS + 1)


def spans(peers: list[tuple[int, int, float]]) -> list[tuple[Span, float]]:
    return [(Span(start, min(start + size, N_BLOCKS)), rate) for start, size, rate in peers]


def chains(peers: list[tuple[Span, float]], me: int, way_s: float, done: int = 0) -> Iterator[float]:
    """The seconds of every chain from block `done` on that comes to `me` once at most."""
    if done == N_BLOCKS:
        yield 0.0
    for peer, (span, rate) in enumerate(peers):
        left = [*peers[:me], (NOWHERE, 1.0), *peers[me + 1 :]] if peer == me else peers
        for end in range(done + 1, span.end + 1) if done in span else ():
            for rest_s in chains(left, me, way_s, end):
                yield way_s + (end - done) / rate + rest_s


@given(PEERS, st.integers(0, 4), st.integers(1, 5), st.floats(0.5, 100.0), st.floats(0.0, 0.5))
def test_it_is_the_least_of_all_chains(peers, start, size, rate, way_s):
    others, mine = spans(peers), Span(start, min(start + size, N_BLOCKS))
    found = Fastest(N_BLOCKS, others, way_s).with_one(mine, 1 / rate)
    least_s = min(chains([(mine, rate), *others], 0, way_s), default=math.inf)
    assert found == pytest.approx(least_s, rel=1e-9)


def test_one_that_is_fast_where_all_are_helps_less_than_where_they_are_slow():
    swarm = Fastest(8, [(Span(0, 4), 100.0), (Span(4, 8), 10.0)], 0.05)
    assert swarm.with_one(Span(4, 8), 0.01) == pytest.approx(0.1 + 0.08)
    assert swarm.with_one(Span(0, 4), 0.01) == pytest.approx(0.1 + 0.44)
