"""Where a newcomer helps most, and when a peer that serves should move."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routing.errors import BadInput
from routing.placement import GAIN, Move, best_span, better_span, moved, throughput
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply

JOINING, SERVING, DRAINING, LEAVING = PeerState


def view_of(n_blocks: int, *peers: tuple[str, str, PeerState], slow: dict[str, float] | None = None) -> View:
    """`slow`: seconds for a block; those that are not in it say nothing."""
    view = View({}, n_blocks)
    for peer, span, state in peers:
        record = PeerRecord(
            peer_id=peer, span=Span.parse(span), state=state, expires_at=100.0, decode_s=(slow or {}).get(peer, 0.0)
        )
        view = apply(view, RecordsSeen([record]))
    return view


def test_an_empty_swarm_is_begun_at_its_start():
    assert best_span(view_of(8), 8, 3, 0.0) == Span(0, 3)


@pytest.mark.parametrize("capacity", [8, 9, 1000])
def test_who_can_hold_all_serves_all(capacity):
    assert best_span(view_of(8, ("a", "0:8", SERVING)), 8, capacity, 0.0) == Span(0, 8)


def test_the_gap_is_filled():
    view = view_of(8, ("a", "0:3", SERVING), ("b", "6:8", SERVING))
    assert best_span(view, 8, 3, 0.0) == Span(3, 6)


def test_what_a_peer_still_loads_counts_as_filled():
    loads = PeerRecord(peer_id="a", span=Span(0, 1), loads=Span(0, 3), expires_at=100.0)
    assert best_span(apply(View({}, 6), RecordsSeen([loads])), 6, 3, 0.0) == Span(3, 6)


def test_a_bare_block_counts_more_than_all_others():
    view = view_of(8, *((peer, "1:4", SERVING) for peer in "abc"), ("d", "4:8", SERVING))
    assert best_span(view, 8, 2, 0.0) == Span(0, 2)


def test_two_bare_blocks_count_more_than_one():
    view = view_of(6, ("a", "1:3", SERVING), ("b", "1:3", SERVING))
    assert best_span(view, 6, 2, 0.0) == Span(3, 5)


def test_the_slow_place_is_strengthened_and_not_the_one_with_fewest_peers():
    slow = {"a": 0.01, "b": 0.1, "c": 0.1}
    view = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", SERVING), ("c", "2:4", SERVING), slow=slow)
    assert best_span(view, 4, 2, 0.0, decode_s=0.05) == Span(2, 4)


def test_where_the_throughput_is_the_same_the_even_share_decides():
    # Whoever serves everything can stand in anywhere: the levels are the same wherever a newcomer goes.
    view = view_of(4, ("a", "0:4", SERVING), ("b", "0:2", SERVING))
    assert best_span(view, 4, 2, 0.0) == Span(2, 4)


def test_two_newcomers_do_not_pick_the_same_gap():
    view = view_of(8, ("a", "0:4", SERVING))
    first = best_span(view, 8, 2, 0.0)
    view = apply(view, RecordsSeen([PeerRecord(peer_id="b", span=first, state=JOINING, expires_at=100.0)]))
    assert (first, best_span(view, 8, 2, 0.0)) == (Span(4, 6), Span(6, 8))


@pytest.mark.parametrize("state", [DRAINING, LEAVING])
def test_who_is_about_to_go_does_not_count(state):
    view = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", SERVING), ("c", "2:4", SERVING))
    going = view_of(4, ("a", "0:2", SERVING), ("b", "2:4", state), ("c", "2:4", state))
    assert best_span(view, 4, 2, 0.0) == Span(0, 2)
    assert best_span(going, 4, 2, 0.0) == Span(2, 4)


def test_an_expired_peer_does_not_count():
    view = view_of(4, ("a", "0:2", SERVING))
    assert best_span(view, 4, 2, 50.0) == Span(2, 4)
    assert best_span(view, 4, 2, 101.0) == Span(0, 2)


def test_a_peer_that_moves_does_not_count_itself():
    view = view_of(4, ("a", "0:2", SERVING), ("me", "2:4", SERVING))
    assert best_span(view, 4, 2, 0.0, without=frozenset({"me"})) == Span(2, 4)


def test_one_absurd_claim_does_not_make_a_place_look_strong_for_ever():
    slow = {"a": 0.01, "b": 0.01, "liar": 1e-12}
    peers = [("a", "0:2", SERVING), ("b", "0:2", SERVING), ("liar", "2:4", SERVING)]
    assert throughput(view_of(4, *peers, slow=slow), 0.0) == 100
    more = [(f"n{i}", "0:2", SERVING) for i in range(200)]
    assert best_span(view_of(4, *peers, *more, slow=slow), 4, 2, 0.0) == Span(2, 4)


def test_unstated_speeds_are_the_median():
    view = view_of(2, ("a", "0:2", SERVING), ("b", "0:2", SERVING), slow={"a": 0.01})
    assert throughput(view, 0.0) == pytest.approx(100)


PEERS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.floats(0.001, 0.1)), max_size=12)


def swarm(peers: list[tuple[int, int, float]]) -> View:
    named = [(f"p{i}", f"{start}:{min(start + size, 10)}", SERVING) for i, (start, size, _) in enumerate(peers)]
    return view_of(10, *named, slow={f"p{i}": decode_s for i, (*_, decode_s) in enumerate(peers)})


@given(PEERS, st.integers(1, 12), st.floats(0.001, 0.1))
def test_no_other_window_gives_more(peers, capacity, decode_s):
    view = swarm(peers)
    chosen = best_span(view, 10, capacity, 0.0, decode_s=decode_s)
    assert len(chosen) == min(capacity, 10)

    def with_me(span: Span) -> tuple[int, float]:
        mine = PeerRecord(peer_id="me", span=span, decode_s=decode_s, expires_at=100.0)
        joined = apply(view, RecordsSeen([mine]))
        return -len(joined.uncovered(0.0)), throughput(joined, 0.0)

    uncovered, most = with_me(chosen)
    for start in range(10 - len(chosen) + 1):
        others, rate = with_me(Span(start, start + len(chosen)))
        assert (others, rate) <= (uncovered, most * (1 + 1e-6) + 1e-9)


@given(st.integers(1, 12), st.integers(1, 12))
def test_newcomers_one_after_the_other_cover_the_model(n_blocks, capacity):
    view = View({}, n_blocks)
    for newcomer in range(2 * n_blocks // capacity + 1):
        span = best_span(view, n_blocks, capacity, 0.0)
        view = apply(view, RecordsSeen([PeerRecord(peer_id=f"p{newcomer}", span=span, expires_at=100.0)]))
    assert view.uncovered(0.0) == ()


def test_arguments_are_checked():
    with pytest.raises(BadInput):
        best_span(view_of(4), 4, 0, 0.0)
    with pytest.raises(BadInput):
        best_span(view_of(4), 5, 2, 0.0)


# -- moves -----------------------------------------------------------------------------------------------------


def test_who_is_one_of_many_moves_to_the_weak_place():
    view = view_of(4, *((peer, "0:2", SERVING) for peer in ("a", "b", "me")), ("c", "2:4", SERVING))
    move = better_span(view, "me", 2, 0.0)
    assert move == Move(span=Span(2, 4), rescues=False, tokens_per_s=1.0, before=0.5)
    assert better_span(moved(view, {"me": Span(2, 4)}), "a", 2, 0.0) is None  # and then it is well


def test_who_would_only_turn_things_round_stays():
    view = view_of(2, ("me", "0:1", SERVING), ("a", "0:1", SERVING), ("b", "1:2", SERVING))
    assert better_span(view, "me", 1, 0.0) is None


def test_who_could_help_both_sides_goes_between_them():
    view = view_of(4, ("me", "0:2", SERVING), ("a", "0:2", SERVING), ("b", "2:4", SERVING))
    assert better_span(view, "me", 2, 0.0) == Move(span=Span(1, 3), rescues=False, tokens_per_s=0.75, before=0.5)


@pytest.mark.parametrize(("crowd", "moves"), [(12, False), (13, True)])
def test_a_gain_that_is_not_proven_moves_nobody(crowd, moves):
    """Where it goes there are ten: without it a fifth more must stay behind."""
    here = [("me", "0:1", SERVING), *((f"a{i}", "0:1", SERVING) for i in range(crowd - 1))]
    view = view_of(2, *here, *((f"b{i}", "1:2", SERVING) for i in range(10)))
    assert (better_span(view, "me", 1, 0.0) is not None) is moves


def test_in_a_crowd_one_moves_though_it_is_a_small_part_of_it():
    here = [(f"a{i}", "0:2", SERVING) for i in range(60)]
    there = [(f"b{i}", "2:4", SERVING) for i in range(40)]
    view, moves = view_of(4, *here, *there), 0
    for peer, *_ in here:
        if move := better_span(view, peer, 2, 0.0):
            assert move.tokens_per_s > move.before
            view, moves = moved(view, {peer: move.span}), moves + 1
    assert 3 <= moves <= 10  # as many as even it out, but for the margin
    assert throughput(view, 0.0) >= 50 / 2 / GAIN


@pytest.mark.parametrize("state", [DRAINING, LEAVING])
def test_a_block_about_to_lose_its_last_peer_is_rescued(state):
    view = view_of(4, ("a", "0:2", SERVING), ("me", "0:2", SERVING), ("b", "2:4", state))
    move = better_span(view, "me", 2, 0.0)
    assert move is not None and move.rescues and move.span == Span(2, 4)


def test_a_rescue_comes_before_any_other_gain():
    weak = ("w", "4:6", SERVING)
    strong = [(peer, "0:2", SERVING) for peer in ("a", "b", "c", "me")]
    slow = {"w": 10.0, "a": 1.0, "b": 1.0, "c": 1.0, "me": 1.0}
    view = view_of(6, *strong, ("d", "2:4", SERVING), weak, slow=slow)
    assert better_span(view, "me", 2, 0.0).span == Span(4, 6)
    going = view_of(6, *strong, ("d", "2:4", DRAINING), weak, slow=slow)
    move = better_span(going, "me", 2, 0.0)
    assert move.rescues and move.span == Span(2, 4)


def test_nobody_leaves_one_gap_to_fill_another():
    view = view_of(4, ("me", "0:2", SERVING), ("b", "2:4", DRAINING))
    assert better_span(view, "me", 2, 0.0) is None
    assert better_span(view_of(6, ("me", "0:2", SERVING), ("a", "2:3", SERVING)), "me", 3, 0.0) is None


def test_who_does_not_serve_does_not_move():
    for state in (JOINING, DRAINING, LEAVING):
        assert better_span(view_of(4, ("me", "0:2", state)), "me", 2, 0.0) is None
    assert better_span(view_of(4), "me", 2, 0.0) is None


@example([(0, 1, 0.0078125)], 10)  # the only one that states its speed
@given(PEERS, st.integers(1, 10))
def test_moves_only_help_and_come_to_an_end(peers, capacity):
    view = swarm(peers)
    for moves in count():
        for peer in sorted(view.records):
            move = better_span(view, peer, max(capacity, len(view.records[peer].span)), 0.0)
            if move is not None:
                break
        else:
            return
        after = moved(view, {peer: move.span})
        assert set(after.uncovered(0.0)) <= set(view.uncovered(0.0))
        assert throughput(after, 0.0) == pytest.approx(move.tokens_per_s)
        assert move.tokens_per_s >= throughput(view, 0.0) * (1 - 1e-6)
        assert move.rescues == (len(after.uncovered(0.0)) < len(view.uncovered(0.0)))
        view = after
        assert moves < 100
