"""Which broken connections a peer tells the client of."""

from __future__ import annotations

import pytest

from peer.effects import Sender, SessionLimits, ToLink, ToPeer
from peer.sessions import SessionTable
from routing.types import Span
from swarm.frames import Codec, Frame, FrameType, Open, OpenHop
from swarm.link import REPLACED
from swarm.names import NameChain
from tests.session.virtual import ROW, DigestStore

SESSION = bytes(range(16))


@pytest.fixture
def table() -> SessionTable:
    """Of the second hop of two, with an open session."""
    table = SessionTable(
        me="b",
        span=Span(3, 6),
        make_store=DigestStore,
        row_bytes=lambda codec: ROW,
        admit=lambda spans, positions: True,
        limits=SessionLimits(),
    )
    open_session(table, 0)
    table.take_effects()
    return table


def open_session(table: SessionTable, epoch: int, positions: int = 0) -> None:
    """`positions` that all hops are to hold."""
    route = (OpenHop("a", (), 0, 3, 2**32 - 1), OpenHop("b", (), 3, 6, 2**32 - 1))
    names = NameChain(b"secret")
    names.extend([5] * positions)
    body = Open(b"n" * 16, route, names.slice(0, positions), positions)
    opening = Frame(type=FrameType.OPEN, session=SESSION, epoch=epoch, body=body)
    table.receive(opening, Sender("client", "client", "link"), 0.0)


def told(table: SessionTable) -> list[str]:
    effects = table.take_effects()
    return [e.frame.type.name for e in effects if isinstance(e, ToLink) and e.frame.type is FrameType.LOST]


def step() -> Frame:
    names = NameChain(b"secret")
    names.extend([5])
    return Frame(
        type=FrameType.STEP, session=SESSION, hop=1, end=1, codec=Codec.FP32, names=names.slice(0, 1), rows=bytes(ROW)
    )


def test_one_that_ended_is_told(table: SessionTable) -> None:
    table.link_lost("a", "closed by the other side", 1.0)
    assert told(table) == ["LOST"]


def test_one_that_was_dead_before_the_session_and_is_renewed_is_not(table: SessionTable) -> None:
    table.link_lost("a", f"{REPLACED} by a new connection", 1.0)
    assert told(table) == []


def test_one_that_the_session_asked_over_is_told_though_it_is_renewed(table: SessionTable) -> None:
    """The question is lost with it, and is not repeated."""
    open_session(table, 1, positions=4)
    assert [e.frame.type for e in table.take_effects() if isinstance(e, ToPeer)] == [FrameType.GAP]
    table.link_lost("a", f"{REPLACED} by a new connection", 1.0)
    assert told(table) == ["LOST"]


def test_one_that_the_session_has_used_is_told_though_it_is_renewed(table: SessionTable) -> None:
    table.receive(step(), Sender("a", "peer", "link of a"), 0.5)
    table.take_effects()
    table.link_lost("a", f"{REPLACED} by a new connection", 1.0)
    assert told(table) == ["LOST"]
