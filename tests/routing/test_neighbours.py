"""Whom a newcomer measures its way to."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from routing.coordinates import Coordinate
from routing.neighbours import MOST, neighbours
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply

PLACE = Coordinate(place=(0.01, 0.0, 0.0), error=0.1)


def view_of(*peers: tuple[str, str], placed: str = "", state: PeerState = PeerState.SERVING) -> View:
    """A swarm of 12 blocks; those whose names are in `placed` say where they are."""
    records = [
        PeerRecord(
            peer_id=peer, span=Span.parse(span), state=state, expires_at=100.0, place=PLACE if peer in placed else None
        )
        for peer, span in peers
    ]
    return apply(View({}, 12), RecordsSeen(records))


def chosen(view: View, span: str, seed: int = 1) -> list[str]:
    return [record.peer_id for record in neighbours(view, "me", Span.parse(span), 0.0, Random(seed))]


CROWD = (*((f"a{i}", "0:4") for i in range(9)), *((f"b{i}", "4:8") for i in range(9)), ("c", "8:12"), ("me", "4:8"))


@pytest.mark.parametrize("seed", range(20))
def test_one_before_it_one_behind_it_and_as_many_others_as_there_is_room_for(seed: int) -> None:
    before, after, *others = chosen(view_of(*CROWD), "4:8", seed)
    assert before.startswith("a") and after == "c" and len(others) == MOST - 2
    assert "me" not in others and len({before, after, *others}) == MOST


def test_the_first_and_the_last_blocks_have_a_neighbour_on_one_side() -> None:
    assert chosen(view_of(("a", "0:4"), ("b", "4:8"), ("c", "8:12")), "0:4")[0] == "b"
    assert chosen(view_of(("a", "0:4"), ("b", "4:8"), ("c", "8:12")), "8:12")[0] == "b"


def test_of_others_those_come_first_that_know_where_they_are() -> None:
    assert set(chosen(view_of(*CROWD, placed="b3 b7"), "4:8")[2:]) == {"b3", "b7"}


def test_many_newcomers_do_not_ask_the_same_few() -> None:
    asked = Counter(peer for seed in range(100) for peer in chosen(view_of(*CROWD), "4:8", seed) if peer != "c")
    assert len(asked) == 18 and max(asked.values()) < 40


def test_of_a_small_swarm_all_are_asked_and_alone_nobody() -> None:
    assert set(chosen(view_of(("a", "0:12"), ("b", "0:12")), "0:12")) == {"a", "b"}
    assert chosen(view_of(("me", "0:12")), "0:12") == []
    assert chosen(view_of(("a", "0:4"), state=PeerState.JOINING), "4:8") == []
