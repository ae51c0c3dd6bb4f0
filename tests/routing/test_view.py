"""The view as a fold: which record is believed, and what it covers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput
from routing.types import PeerRecord, PeerState, Span
from routing.view import TOMBSTONE_S, Event, Expired, PeerGone, RecordsSeen, View, apply, forgotten

N_BLOCKS = 8


def record(peer: str, span: str, **fields) -> PeerRecord:
    return PeerRecord(peer_id=peer, span=Span.parse(span), **{"expires_at": 100.0, **fields})


def fold(*events: Event, view: View | None = None) -> View:
    view = view or View({}, N_BLOCKS)
    for event in events:
        view = apply(view, event)
    return view


def seen(*records: PeerRecord) -> list[Event]:
    return [RecordsSeen([each]) for each in records]


def test_coverage_counts_serving_peers_and_draining_ones_apart():
    view = fold(
        *seen(
            record("a", "0:4"),
            record("b", "2:6"),
            record("c", "4:8", state=PeerState.DRAINING),
            record("d", "0:8", state=PeerState.JOINING),
            record("e", "0:8", state=PeerState.LEAVING),
        )
    )
    assert view.coverage(0.0) == [1, 1, 2, 2, 1, 1, 0, 0]
    assert view.draining(0.0) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert view.uncovered(0.0) == (6, 7)


def test_a_lower_sequence_never_replaces_a_newer_record():
    new, old = record("a", "0:4", sequence=7), record("a", "4:8", sequence=6, expires_at=10_000.0)
    assert fold(*seen(new, old)).records == {"a": new}
    assert fold(*seen(old, new)).records == {"a": new}


def test_the_same_record_changes_nothing():
    view = fold(*seen(record("a", "0:4", sequence=1)))
    assert apply(view, RecordsSeen([record("a", "0:4", sequence=1)])) is view


def test_apply_leaves_the_old_view_as_it_was():
    before = fold(*seen(record("a", "0:4")))
    after = apply(before, PeerGone("a", 5.0))
    assert "a" in before.records and "a" not in after.records


def test_leaving_removes_from_coverage_and_an_older_record_does_not_bring_it_back():
    serving = record("a", "0:8", sequence=1)
    view = fold(*seen(serving, record("a", "0:8", sequence=2, state=PeerState.LEAVING), serving))
    assert view.coverage(0.0) == [0] * N_BLOCKS


def test_an_expired_record_covers_nothing_even_before_the_event_says_so():
    view = fold(*seen(record("a", "0:8", expires_at=10.0)))
    assert view.coverage(10.0) == [1] * N_BLOCKS
    assert view.coverage(10.1) == [0] * N_BLOCKS
    assert fold(Expired(10.1), view=view).records == {}
    assert fold(Expired(10.0), view=view) is view


def test_a_gone_peer_returns_only_with_a_newer_record():
    old = record("a", "0:8", sequence=3)
    view = fold(*seen(old), PeerGone("a", 5.0), *seen(old))
    assert view.records == {}
    newer = record("a", "0:8", sequence=4)
    assert fold(*seen(newer), view=view).records == {"a": newer}


def test_the_sequence_outlives_the_record_that_expired():
    view = fold(*seen(record("a", "0:8", sequence=3, expires_at=10.0)), Expired(11.0))
    assert fold(*seen(record("a", "0:4", sequence=2, expires_at=500.0)), view=view).records == {}


def test_tombstones_do_not_pile_up():
    view = fold(*seen(record("a", "0:8")), PeerGone("a", 5.0))
    assert set(fold(Expired(5.0 + TOMBSTONE_S), view=view).tombstones) == {"a"}
    assert fold(Expired(5.1 + TOMBSTONE_S), view=view).tombstones == {}


def test_a_span_outside_the_model_is_ignored_and_hides_nothing():
    good = record("a", "0:8", sequence=1)
    assert fold(*seen(good, record("a", "0:9", sequence=2))).records == {"a": good}


def test_an_unknown_peer_may_go():
    view = View({}, N_BLOCKS)
    assert apply(view, PeerGone("nobody", 1.0)) is view


def test_a_model_has_blocks():
    with pytest.raises(BadInput):
        View({}, 0)


def test_a_peer_is_forgotten_when_its_tombstone_goes_and_it_has_not_come_back():
    view = fold(*seen(record("a", "0:4", expires_at=10.0), record("b", "0:4", expires_at=10.0)))
    gone = apply(view, Expired(11.0))
    assert not gone.records and not forgotten(view, gone), "it may come back at any moment"
    after = apply(gone, Expired(12.0 + TOMBSTONE_S))
    assert forgotten(gone, after) == {"a", "b"}
    back = apply(after, RecordsSeen([record("b", "0:4", sequence=9, expires_at=2 * TOMBSTONE_S)]))
    assert forgotten(gone, back) == {"a"} and not forgotten(after, back)


records = st.builds(
    lambda peer, start, length, state, sequence: record(
        peer, f"{start}:{min(start + length, N_BLOCKS)}", state=state, sequence=sequence
    ),
    st.sampled_from("abc"),
    st.integers(0, N_BLOCKS - 1),
    st.integers(1, N_BLOCKS),
    st.sampled_from(PeerState),
    st.integers(0, 50),
)


@given(st.lists(records, unique_by=lambda each: (each.peer_id, each.sequence)), st.randoms())
def test_records_may_come_in_any_order(arrivals, rng):
    shuffled = list(arrivals)
    rng.shuffle(shuffled)
    view = fold(*seen(*arrivals))
    assert fold(*seen(*shuffled)).records == view.records
    assert fold(RecordsSeen(shuffled)).records == view.records
    for each in arrivals:
        assert view.records[each.peer_id].sequence >= each.sequence


@given(st.lists(records, unique_by=lambda each: each.peer_id))
def test_coverage_is_the_plain_count(arrivals):
    serving = [each for each in arrivals if each.state is PeerState.SERVING]
    plain = [sum(block in each.span for each in serving) for block in range(N_BLOCKS)]
    assert fold(*seen(*arrivals)).coverage(0.0) == plain
