"""Where a newcomer helps most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput
from routing.placement import least_covered_span
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply

JOINING, SERVING, DRAINING, LEAVING = PeerState


def view_of(n_blocks: int, *peers: tuple[str, str, PeerState]) -> View:
    view = View({}, n_blocks)
    for peer, span, state in peers:
        view = apply(
            view, RecordsSeen([PeerRecord(peer_id=peer, span=Span.parse(span), state=state, expires_at=100.0)])
        )
    return view


def test_an_empty_swarm_is_begun_at_its_start():
    assert least_covered_span(view_of(8), 8, 3, 0.0) == Span(0, 3)


@pytest.mark.parametrize("capacity", [8, 9, 1000])
def test_who_can_hold_all_serves_all(capacity):
    assert least_covered_span(view_of(8, ("a", "0:8", SERVING)), 8, capacity, 0.0) == Span(0, 8)


def test_the_gap_is_filled():
    view = view_of(8, ("a", "0:3", SERVING), ("b", "6:8", SERVING))
    assert least_covered_span(view, 8, 3, 0.0) == Span(3, 6)


def test_the_weakest_block_counts_more_than_the_sum():
    # Coverage 0 3 3 3 | 1 1 1 1: the window with the bare block, though the others are thinner in all.
    view = view_of(8, *((peer, "1:4", SERVING) for peer in "abc"), ("d", "4:8", SERVING))
    assert least_covered_span(view, 8, 2, 0.0) == Span(0, 2)


def test_then_the_second_weakest_counts():
    # Coverage 0 2 2 0 1 1: two windows of two hold one bare block and a thin one, one of them the thinner.
    view = view_of(6, ("a", "1:3", SERVING), ("b", "1:3", SERVING), ("c", "4:6", SERVING))
    assert least_covered_span(view, 6, 2, 0.0) == Span(3, 5)


def test_two_newcomers_do_not_pick_the_same_gap():
    view = view_of(8, ("a", "0:4", SERVING))
    first = least_covered_span(view, 8, 2, 0.0)
    view = apply(view, RecordsSeen([PeerRecord(peer_id="b", span=first, state=JOINING, expires_at=100.0)]))
    assert (first, least_covered_span(view, 8, 2, 0.0)) == (Span(4, 6), Span(6, 8))


@pytest.mark.parametrize("state", [DRAINING, LEAVING])
def test_who_is_about_to_go_does_not_count(state):
    view = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", SERVING), ("c", "2:4", SERVING))
    going = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", state), ("c", "2:4", state))
    assert least_covered_span(view, 4, 2, 0.0) == Span(0, 2)
    assert least_covered_span(going, 4, 2, 0.0) == Span(2, 4)


def test_an_expired_peer_does_not_count():
    view = view_of(4, ("a", "0:2", SERVING))
    assert least_covered_span(view, 4, 2, 50.0) == Span(2, 4)
    assert least_covered_span(view, 4, 2, 101.0) == Span(0, 2)


def test_a_peer_that_moves_does_not_count_itself():
    view = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", SERVING), ("me", "2:4", SERVING))
    assert least_covered_span(view, 4, 2, 0.0) == Span(0, 2)
    view = view_of(4, ("a", "0:2", SERVING), ("me", "2:4", SERVING))
    assert least_covered_span(view, 4, 2, 0.0, without=frozenset({"me"})) == Span(2, 4)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10)), max_size=12),
    st.integers(1, 12),
)
def test_no_other_window_is_needed_more(spans, capacity):
    peers = [(f"p{i}", f"{start}:{min(start + size, 10)}", SERVING) for i, (start, size) in enumerate(spans)]
    view = view_of(10, *peers)
    chosen = least_covered_span(view, 10, capacity, 0.0)
    assert len(chosen) == min(capacity, 10)
    coverage = view.coverage(0.0)
    need = sorted(coverage[chosen.start : chosen.end])
    for start in range(10 - len(chosen) + 1):
        other = sorted(coverage[start : start + len(chosen)])
        assert need < other or (need == other and chosen.start <= start)


@given(st.integers(1, 12), st.integers(1, 12))
def test_newcomers_one_after_the_other_cover_the_model(n_blocks, capacity):
    view = View({}, n_blocks)
    for newcomer in range(2 * n_blocks // capacity + 1):
        span = least_covered_span(view, n_blocks, capacity, 0.0)
        view = apply(view, RecordsSeen([PeerRecord(peer_id=f"p{newcomer}", span=span, expires_at=100.0)]))
    assert view.uncovered(0.0) == ()


def test_arguments_are_checked():
    with pytest.raises(BadInput):
        least_covered_span(view_of(4), 4, 0, 0.0)
    with pytest.raises(BadInput):
        least_covered_span(view_of(4), 5, 2, 0.0)
