"""Frames that are broken, that nobody may send, or that nobody expects: refused by name, and no session is harmed."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peer.effects import SessionLimits
from routing.errors import SwarmError
from swarm.driver import Driver
from swarm.frames import Codec, Frame, FrameType, Lost, Open, Opened, OpenHop, Problem, Stale
from swarm.handshake import INSTANCE_BYTES, MAGIC, NONCE_BYTES, VERSION, client_context
from swarm.identity import Identity
from swarm.link import Link
from swarm.model import TextSession
from swarm.transport import Endpoint
from swarm.wire import HEADER_BYTES, MAX_FRAGMENT
from tests.whole.inprocess import InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.stand_ins import until

PROMPT = "Whoever knocks "
HIDDEN = 64


class Stranger:
    """Somebody who speaks the protocol and says what it likes."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost = ""

    def link_opened(self, link: Link) -> None:
        pass

    def frame_received(self, link: Link, frame: Frame) -> None:
        self.frames.append(frame)

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost = reason


@asynccontextmanager
async def stranger(peer: InProcessPeer, role: str) -> AsyncIterator[tuple[Stranger, Link]]:
    who = Stranger()
    async with Endpoint(identity=Identity.generate(), role=role, handler=who) as endpoint:
        yield who, await endpoint.connect(peer.peer_id, [peer.address], 10)


@dataclass
class Scene:
    """A session in mid-answer on two hops."""

    swarm: InProcessSwarm
    session: TextSession
    local: Reference
    tokens: list[int]

    @property
    def driver(self) -> Driver:
        return self.session._session.driver

    def hop(self, index: int) -> InProcessPeer:
        assert self.session.route is not None
        return self.swarm.by_id(self.session.route[index].peer_id)

    async def more(self, count: int) -> None:
        ids = self.local.ids(PROMPT)
        async for token in self.session.generate(self.tokens[-1:] or ids, max_new_tokens=count, ignore_eos=True):
            self.tokens.append(token.id)
        self.local.check(ids, self.tokens, len(self.tokens))

    def frame(self, kind: FrameType, **fields: Any) -> Frame:
        return Frame(type=kind, **{"session": self.driver.id, "epoch": self.driver.epoch, **fields})

    def step(self, kind: FrameType = FrameType.STEP, **fields: Any) -> Frame:
        """The position that would come next, with honest names."""
        at = len(self.driver.tokens)
        names = self.driver.names.slice(at, at) + bytes(8)
        rows = bytes(4 * HIDDEN)
        honest = {"start": at, "end": at + 1, "codec": Codec.FP32, "names": names, "rows": rows}
        return self.frame(kind, **{**honest, **fields})

    def open(self, **fields: Any) -> Frame:
        assert self.session.route is not None
        route = tuple(OpenHop(hop.peer_id, (), hop.entry, hop.exit, 2**32 - 1) for hop in self.session.route)
        body = Open(nonce=bytes(8), route=route, names=self.driver.names.slice(0, 3), need_end=0)
        return self.frame(FrameType.OPEN, **{"epoch": self.driver.epoch + 1, "body": body, **fields})


@pytest.fixture
async def scene(tiny: Path, local: Reference) -> AsyncIterator[Scene]:
    async with InProcessSwarm(tiny) as swarm:
        for span in ("0:3", "3:6"):
            await swarm.add(span, limits=SessionLimits(hold_s=0.1, hold_frames=8))
        async with swarm.model() as model, model.session() as session:
            scene = Scene(swarm, session, local, [])
            await scene.more(5)
            yield scene
            await scene.more(20)
            assert len(session.recoveries) == 1  # whatever was tried, the session did not even stumble
            assert not model.client.health.banned_peers(time.monotonic())
        await swarm.all_closed()


PEER, CLIENT = "peer", "client"
MAY_NOT: dict[str, tuple[str, int, Callable[[Scene], Frame]]] = {
    "STEP of a stranger": (PEER, 1, lambda s: s.step(hop=1)),
    "STEP of another client": (CLIENT, 0, lambda s: s.step(hop=0)),
    "STEP past the route": (PEER, 1, lambda s: s.step(hop=7)),
    "FILL of a stranger": (PEER, 1, lambda s: s.step(FrameType.FILL, hop=1)),
    "GAP of no neighbour": (PEER, 0, lambda s: s.frame(FrameType.GAP, hop=1, start=0, end=5)),
    "GAP of another client": (CLIENT, 0, lambda s: s.frame(FrameType.GAP, hop=1, start=0, end=5)),
    "ACK of no neighbour": (PEER, 0, lambda s: s.frame(FrameType.ACK, hop=1, start=4096)),
    "OPEN of another client": (CLIENT, 0, lambda s: s.open()),
    "OPEN of a peer": (PEER, 0, lambda s: s.open()),
    "CLOSE of another client": (CLIENT, 0, lambda s: s.frame(FrameType.CLOSE, epoch=99)),
    "CLOSE of a peer": (PEER, 0, lambda s: s.frame(FrameType.CLOSE, epoch=99)),
    "RESULT to a peer": (PEER, 0, lambda s: s.step(FrameType.RESULT)),
    "LOST to a peer": (PEER, 0, lambda s: s.frame(FrameType.LOST, body=Lost(s.hop(0).peer_id, s.hop(1).peer_id))),
    "OPENED to a peer": (CLIENT, 0, lambda s: s.frame(FrameType.OPENED, body=Opened(((0, 3),)))),
    "STALE to a peer": (CLIENT, 0, lambda s: s.frame(FrameType.STALE, body=Stale(99, bytes(8)))),
}


@pytest.mark.parametrize("name", MAY_NOT)
async def test_who_may_not_send_a_frame_is_told_so(name: str, scene: Scene) -> None:
    role, hop, make = MAY_NOT[name]
    async with stranger(scene.hop(hop), role) as (who, link):
        link.send(make(scene))
        (answer,) = await until(lambda: who.frames)
        assert answer.type is FrameType.ERROR and answer.body.kind == "refused" and answer.body.message
        assert not link.closed


@pytest.mark.parametrize(
    "make",
    [
        lambda s: s.frame(FrameType.ERROR, body=Problem("failed", "it was me", (s.hop(0).peer_id, s.hop(1).peer_id))),
        lambda s: s.frame(FrameType.UNKNOWN),
    ],
)
async def test_answers_of_strangers_are_no_news(make: Callable[[Scene], Frame], scene: Scene) -> None:
    async with stranger(scene.hop(0), PEER) as (who, link):
        link.send(make(scene))
        await link.ping(5)  # it has been read by then
        assert who.frames == []


@pytest.mark.parametrize("known", [False, True])
async def test_a_frame_before_its_open_is_held_and_then_unknown(known: bool, scene: Scene) -> None:
    frame = scene.step(hop=1, epoch=scene.driver.epoch + 5, session=scene.driver.id if known else b"?" * 16)
    async with stranger(scene.hop(1), PEER) as (who, link):
        link.send(frame)
        await link.ping(5)
        assert who.frames == []
        (answer,) = await until(lambda: who.frames)
        assert answer.type is FrameType.UNKNOWN and answer.session == frame.session


async def test_a_flood_of_frames_for_unknown_sessions_is_bounded(scene: Scene) -> None:
    async with stranger(scene.hop(1), PEER) as (who, link):
        for number in range(200):
            link.send(scene.step(hop=1, session=number.to_bytes(16, "little")))
        await until(lambda: len(who.frames) == 200)
        assert {frame.type for frame in who.frames} == {FrameType.UNKNOWN}
    assert await until(lambda: not scene.hop(1).service.table._early) is True


# -- bytes ---------------------------------------------------------------------------------------------------


def header(kind: int, *, flags: int = 0, length: int = 0, session: bytes = b"s" * 16) -> bytes:
    packed = bytes([kind, flags, 0, 0]) + session + bytes(12) + length.to_bytes(4, "little")
    assert len(packed) == HEADER_BYTES
    return packed


BROKEN = {
    "noise": b"\xff" * 100,
    "unknown type": header(99),
    "reserved type": header(FrameType.PAGES),
    "unknown flag": header(FrameType.CLOSE, flags=0x80),
    "oversized part": header(FrameType.STEP, length=MAX_FRAGMENT + 1),
    "no position": header(FrameType.STEP, length=10) + bytes(10),
    "no msgpack": header(FrameType.OPEN, length=3) + b"\xc1\xc1\xc1",
    "other msgpack": header(FrameType.OPEN, length=1) + b"\x90",
    "body where none is": header(FrameType.CLOSE, length=1) + b"x",
    "oversized control": 20 * (header(FrameType.OPEN, flags=1, length=MAX_FRAGMENT) + bytes(MAX_FRAGMENT)),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("role", [PEER, CLIENT])
async def test_broken_bytes_end_the_connection_and_nothing_else(role: str, name: str, scene: Scene) -> None:
    peer = scene.hop(0)
    async with stranger(peer, role) as (who, link):
        link._channel.write([BROKEN[name]])
        await until(lambda: who.lost)
    ((_, why),) = await until(lambda: peer.tap.lost)
    assert why.startswith("protocol error: ")


async def test_a_frame_cut_off_in_the_middle_is_no_frame(scene: Scene) -> None:
    async with stranger(scene.hop(1), PEER) as (who, link):
        link._channel.write([header(FrameType.STEP, length=5000) + bytes(100)])
        link._channel.abort()
        await until(lambda: who.lost)
    await until(lambda: scene.hop(1).tap.lost)


async def test_another_version_is_told_which_one_is_spoken(scene: Scene) -> None:
    host, port = scene.hop(0).address.split(":")
    context: ssl.SSLContext = client_context()
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="")
    writer.write(MAGIC + (VERSION + 1).to_bytes(2, "little"))
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert len(said) > len(MAGIC) + 2 + INSTANCE_BYTES + NONCE_BYTES
    assert f"version {VERSION + 1}".encode() in said and f"version {VERSION}".encode() in said


# -- an own client's nonsense ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"codec": Codec.NONE, "rows": b""},
        {"rows": b""},
        {"rows": bytes(4)},
        {"rows": bytes(4 * HIDDEN * 2)},
        {"codec": Codec.BF16, "rows": bytes(2 * HIDDEN + 2)},
    ],
    ids=["no codec", "no rows", "a short row", "two rows", "a crooked row"],
)
async def test_rows_of_a_wrong_size_stop_nobody_else(fields: dict[str, Any], tiny: Path, local: Reference) -> None:
    """From the session's own client: it gets an error, and the peer goes on serving others."""
    async with InProcessSwarm(tiny, ["0:6"]) as swarm, swarm.model() as model, model.session() as session:
        scene = Scene(swarm, session, local, [])
        await scene.more(3)
        heard: list[Frame] = []
        real = session._session.frame_received
        session._session.frame_received = lambda frame, sender: heard.append(frame)  # type: ignore[method-assign]
        link = model.client.link(scene.hop(0).peer_id)
        assert link is not None
        link.send(scene.step(**fields))
        (answer,) = await until(lambda: heard)
        assert answer.type is FrameType.ERROR and answer.body.kind == "bad-rows"
        session._session.frame_received = real  # type: ignore[method-assign]
        async with model.session() as other:
            await Scene(swarm, other, local, []).more(3)
        await scene.more(3)


@pytest.mark.parametrize(
    ("peer_id", "addresses"),
    [
        ("nobody", ()),
        (Identity.generate().peer_id, ("", "nowhere", "[::1]:99999", "127.0.0.1:1")),
        (Identity.generate().peer_id, ("x" * 70 + ".invalid:80", "\x00:80", "localhost:1")),
    ],
    ids=["no peer id", "no address", "names"],
)
async def test_a_route_to_nobody_is_reported_and_harms_nobody(
    peer_id: str, addresses: tuple[str, ...], tiny: Path, local: Reference
) -> None:
    async with InProcessSwarm(tiny, ["0:3", "3:6"]) as swarm, swarm.model() as model, model.session() as session:
        scene = Scene(swarm, session, local, [])
        await scene.more(3)
        peer = scene.hop(0)
        watching = asyncio.ensure_future(peer.host.arun(peer.service.watch()))
        heard: list[Frame] = []
        real = session._session.frame_received
        session._session.frame_received = lambda frame, sender: heard.append(frame)  # type: ignore[method-assign]
        driver = scene.driver
        driver.epoch += 1
        route = (OpenHop(peer.peer_id, (), 0, 3, 2**32 - 1), OpenHop(peer_id, addresses, 3, 6, 2**32 - 1))
        body = Open(nonce=driver.nonce, route=route, names=driver.names.slice(0, 3), need_end=0)
        link = model.client.link(peer.peer_id)
        assert link is not None
        link.send(scene.frame(FrameType.OPEN, body=body))
        lost = await until(lambda: next((frame for frame in heard if frame.type is FrameType.LOST), None))
        assert lost.body.target == peer_id and "no answer" not in lost.body.reason
        session._session.frame_received = real  # type: ignore[method-assign]
        driver.link_lost(peer.peer_id, "the test is over")
        await scene.more(3)
        assert not watching.done()
        watching.cancel()


async def test_a_peer_that_cannot_compute_any_more_does_not_seem_to_serve(tiny: Path, local: Reference) -> None:
    """An error nobody thought of ends the service, by name, instead of leaving a peer that takes work for nothing."""
    async with InProcessSwarm(tiny, ["0:6"]) as swarm, swarm.model() as model, model.session() as session:
        peer = swarm.peers[0]
        watching = asyncio.ensure_future(peer.host.arun(peer.service.watch()))

        def begin(items: Any) -> Any:
            raise KeyError("nobody thought of this")

        peer.service.stages[0].executor.begin = begin  # type: ignore[method-assign]
        task = asyncio.ensure_future(Scene(swarm, session, local, []).more(1))
        with pytest.raises(SwarmError, match="nobody thought of this"):
            await asyncio.wait_for(watching, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- what peers say to clients ---------------------------------------------------------------------------------


async def test_a_client_believes_only_peers_of_its_route(tiny: Path, local: Reference) -> None:
    """A peer that is out of the route cannot stop the session, nor speak for others."""
    async with InProcessSwarm(tiny, ["0:3", "3:6", "0:3"]) as swarm, swarm.model() as model, model.session() as session:
        scene = Scene(swarm, session, local, [])
        await scene.more(3)
        used = [scene.hop(0), scene.hop(1)]
        outside = next(peer for peer in swarm.peers if peer not in used)
        driver = scene.driver
        driver._seats.add((outside.peer_id, 0, 3))  # it was in the route once
        ids = (used[0].peer_id, used[1].peer_id)
        for frame in (
            scene.frame(FrameType.LOST, body=Lost(*ids)),
            scene.frame(FrameType.UNKNOWN),
            scene.frame(FrameType.ERROR, body=Problem("nonfinite-input", "I saw it", ids)),
            scene.frame(FrameType.ERROR, body=Problem("failed", "me")),
            scene.step(FrameType.RESULT),
        ):
            session._session.frame_received(frame, outside.peer_id)
        # A hop of the route may accuse the one before it, and nobody else.
        session._session.frame_received(
            scene.frame(FrameType.LOST, body=Lost(ids[1], outside.peer_id)), used[0].peer_id
        )
        assert not driver.healing
        await scene.more(5)
        assert len(session.recoveries) == 1


@pytest.mark.parametrize("rows", [b"", bytes(4 * HIDDEN * 2), bytes(4)], ids=["none", "two", "short"])
async def test_a_result_with_wrong_rows_costs_the_connection(rows: bytes, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, ["0:3", "3:6", "3:6"]) as swarm, swarm.model() as model, model.session() as session:
        scene = Scene(swarm, session, local, [])
        await scene.more(3)
        liar = scene.hop(1)
        real = liar.service._send

        def send(link: Link, frame: Frame) -> None:
            if frame.type is FrameType.RESULT:
                frame.rows = rows
            real(link, frame)

        liar.service._send = send  # type: ignore[method-assign]
        await scene.more(5)
        assert scene.hop(1) is not liar
        assert [peer_id for _, peer_id, _ in model.client.links_lost] == [liar.peer_id]
