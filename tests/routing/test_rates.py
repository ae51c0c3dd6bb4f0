"""Levels and throughput against every set of blocks, against an allocation that reaches them, and by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.rates import Rates, throughput
from routing.types import Span

BLOCKS = 7
SPANS = st.lists(
    st.tuples(
        st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)).map(
            lambda pair: Span(min(pair[0], pair[1] - 1), pair[1])
        ),
        st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(0.01, 100)),
    ),
    max_size=7,
)


def spans(*texts: str) -> list[tuple[Span, float]]:
    """ "0:2 5" is a span and its rate."""
    return [(Span.parse(text.split()[0]), float(text.split()[1])) for text in texts]


def rate_of(blocks: set[int], peers: list[tuple[Span, float]]) -> float:
    return sum(rate for span, rate in peers if any(block in span for block in blocks))


def weakest_set(peers: list[tuple[Span, float]]) -> float:
    """By every set of blocks: max-flow min-cut, word for word."""
    sets = ({block for block in range(BLOCKS) if mask >> block & 1} for mask in range(1, 1 << BLOCKS))
    return min(rate_of(blocks, peers) / len(blocks) for blocks in sets)


def flows(peers: list[tuple[Span, float]], demands: list[float]) -> bool:
    """Whether every block can have what it demands: in order, from who serves on for the shortest way."""
    left = sorted([span.end, span.start, rate] for span, rate in peers)
    for block, demand in enumerate(demands):
        for entry in left:
            if entry[1] <= block < entry[0]:
                given = min(demand, entry[2])
                entry[2] -= given
                demand -= given
        if demand > 1e-6 * max(1.0, demands[block]):
            return False
    return True


@given(SPANS)
def test_no_set_of_blocks_is_weaker_and_an_allocation_reaches_it(peers):
    found = throughput(BLOCKS, peers)
    assert found == pytest.approx(weakest_set(peers), rel=1e-6, abs=1e-9)
    assert flows(peers, [found] * BLOCKS)


@given(SPANS)
def test_the_levels_can_be_reached_together_and_use_everybody_up(peers):
    levels = Rates(BLOCKS, peers).levels()
    assert flows(peers, levels)
    assert sum(levels) == pytest.approx(sum(rate for _, rate in peers), abs=1e-9)
    # Nobody who serves a weak block can spend time on a stronger one: whoever could would make the weak one stronger.
    for level in levels:
        weak = {block for block, each in enumerate(levels) if each <= level * (1 + 1e-9)}
        assert rate_of(weak, peers) == pytest.approx(sum(levels[block] for block in weak), rel=1e-6, abs=1e-9)


@given(SPANS, st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1), st.floats(0.01, 100))
def test_a_longer_span_never_gives_less(peers, start, other, rate):
    start, last = min(start, other), max(start, other)
    short, long = Span(start, last + 1), Span(max(0, start - 1), min(BLOCKS, last + 2))
    assert throughput(BLOCKS, [*peers, (long, rate)]) >= throughput(BLOCKS, [*peers, (short, rate)]) * (1 - 1e-6)


@given(SPANS, st.integers(0, BLOCKS - 1), st.floats(0.01, 100))
def test_one_more_is_the_same_as_from_the_start_and_can_be_taken_away(peers, start, rate):
    span = Span(start, BLOCKS)
    more = Rates(BLOCKS, peers).and_also(span, rate)
    assert more.levels() == pytest.approx(Rates(BLOCKS, [*peers, (span, rate)]).levels(), rel=1e-6, abs=1e-6)
    assert more.and_also(span, -rate).levels() == pytest.approx(Rates(BLOCKS, peers).levels(), rel=1e-6, abs=1e-6)


def test_blocks_with_others_between_them_can_be_the_weakest():
    peers = spans("0:3 1", "1:2 100", "3:7 400")
    assert throughput(BLOCKS, peers) == 0.5
    assert Rates(BLOCKS, peers).levels() == [0.5, 100, 0.5, 100, 100, 100, 100]


def test_a_peer_gives_its_time_where_it_is_needed():
    assert Rates(4, spans("0:4 6", "2:4 10")).levels() == [3, 3, 5, 5]
    assert Rates(4, spans("0:4 6", "2:4 4")).levels() == [2.5, 2.5, 2.5, 2.5]


def test_a_block_that_nobody_serves():
    assert Rates(3, spans("0:2 4")).levels() == [2, 2, 0]
    assert throughput(3, []) == 0
