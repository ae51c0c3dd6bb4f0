"""Who stands by, and where a session is to move."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from routing.constraints import Constraints
from routing.types import Hop, Route
from swarm.standbys import Standbys

FIRST, LAST = Hop("a", 0, 3), Hop("b", 3, 6)
ROUTE = Route((FIRST, LAST))
NOBODY: frozenset[Any] = frozenset()


class Peers:
    """What is asked of a client: who serves the same blocks."""

    def __init__(self, **spares: list[str]):
        self.spans = spares
        self.leaving: set[str] = set()

    def spares(self, hop: Hop, without: Any, constraints: Constraints) -> list[str]:
        return [peer for peer in self.spans.get(hop.peer_id, []) if peer not in without | self.leaving]

    def link(self, peer_id: str) -> Any:
        return SimpleNamespace()


@pytest.fixture
def peers() -> Peers:
    return Peers(a=["c", "fast"], b=["d"])


@pytest.fixture
def standbys(peers: Peers) -> Standbys:
    found = Standbys(peers, "none", Constraints())  # type: ignore[arg-type]
    found.targets = {(0, 3): "fast", (3, 6): "b"}
    return found


def choose(standbys: Standbys) -> tuple[Hop, ...]:
    return standbys.choose(ROUTE, (), NOBODY, NOBODY, NOBODY, 0.0)


def test_who_is_to_take_a_hop_is_made_ready(standbys: Standbys) -> None:
    assert choose(standbys) == (Hop("fast", 0, 3),) and standbys.moving(ROUTE)
    assert standbys.lazy(ROUTE, (Hop("fast", 0, 3),)) == NOBODY


def test_a_move_to_a_peer_that_serves_other_blocks_by_now_is_given_up(standbys: Standbys, peers: Peers) -> None:
    peers.spans["a"] = ["c"]
    assert choose(standbys) == () and not standbys.moving(ROUTE)


def test_a_move_to_a_peer_that_leaves_is_given_up(standbys: Standbys) -> None:
    standbys.leaves("d")
    assert standbys.moving(ROUTE)
    standbys.leaves("fast")
    assert not standbys.moving(ROUTE)


def test_a_hop_whose_peer_leaves_gets_a_standby_that_computes(standbys: Standbys, peers: Peers) -> None:
    standbys.targets = {}
    peers.leaving.add("b")
    assert choose(standbys) == (Hop("d", 3, 6),) and standbys.moving(ROUTE)
    assert standbys.lazy(ROUTE, (Hop("d", 3, 6),)) == NOBODY
