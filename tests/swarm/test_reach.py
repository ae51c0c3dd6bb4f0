"""Peers that dial each other on request, over two real p2pd on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from routing.errors import ProtocolError, TimedOut
from routing.reach import Answer, Quota, Way
from routing.types import PeerRecord, Span
from swarm.about import ABOUT
from swarm.channel import format_address
from swarm.discovery import Directory
from swarm.frames import Frame
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.reach import PROTOCOL, Doorbell, ask, decode
from swarm.records import RecordPolicy
from swarm.transport import Endpoint, Link

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.processes]

SWARM = bytes(range(32))
HERE = ("127.0.0.1:1",)
ASKER, OTHER = Identity.generate(), Identity.generate()


class Deaf:
    def link_opened(self, link: Link) -> None:
        pass

    def frame_received(self, link: Link, frame: Frame) -> None:
        pass

    def link_lost(self, link: Link, reason: str) -> None:
        pass


class Counting:
    """A listener that counts who connects, and says nothing."""

    def __init__(self) -> None:
        self.connections = 0

    async def __aenter__(self) -> Counting:
        self._server = await asyncio.start_server(self._count, "127.0.0.1", 0)
        self.address = format_address(*self._server.sockets[0].getsockname())
        return self

    async def _count(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


async def hive(identity: Identity, bootstrap: list[str] | tuple[str, ...] = ()) -> Hive:
    return await Hive.start(identity=identity, bootstrap=bootstrap, record_policy=RecordPolicy(SWARM))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def asked() -> AsyncIterator[Hive]:
    async with await hive(OTHER) as other:
        yield other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bell(asked) -> Doorbell:
    bell = Doorbell(asked, Directory(asked, OTHER, SWARM, 4), HERE)
    await bell.serve()
    return bell


@pytest_asyncio.fixture(loop_scope="module")
async def asker(asked, bell) -> AsyncIterator[Hive]:
    bell._quota, bell._addresses = Quota(), HERE
    async with await hive(ASKER, await asked.addresses()) as asker:
        yield asker


async def announce(asker: Hive, *addresses: str) -> None:
    record = PeerRecord(peer_id=ASKER.peer_id, span=Span(0, 4), addresses=addresses)
    await Directory(asker, ASKER, SWARM, 4).announce(record)


async def test_a_closed_port_is_refused_and_the_stream_still_works(asker):
    with socket.socket() as closed:  # nobody else can take the port, and nobody listens
        closed.bind(("127.0.0.1", 0))
        address = format_address(*closed.getsockname())
        await announce(asker, address)
        await asker.serve_blob(ABOUT, lambda: b"about")
        assert await ask(asker, OTHER.peer_id) == Answer(OTHER.peer_id, Way.STREAM, ((address, "refused"),))


async def test_who_tells_nothing_by_stream_either_is_not_reached_at_all(asker):
    async with Counting() as mute:
        await announce(asker, mute.address)
        answer = await ask(asker, OTHER.peer_id)
    assert answer is not None and answer.way is Way.NONE and answer.tried[0][1] != "reached"


async def test_the_right_process_is_reached_and_another_one_is_not_taken_for_it(asker):
    async with (
        Endpoint(identity=ASKER, role="peer", handler=Deaf()) as right,
        Endpoint(identity=Identity.generate(), role="peer", handler=Deaf()) as wrong,
    ):
        addresses = await wrong.listen("127.0.0.1"), await right.listen("127.0.0.1")
        await announce(asker, *addresses)
        tried = tuple(zip(addresses, ("wrong identity", "reached"), strict=True))
        assert await ask(asker, OTHER.peer_id) == Answer(OTHER.peer_id, Way.DIRECT, tried)


async def test_only_what_stands_in_the_record_is_dialled_and_only_once_a_minute(asker):
    async with Counting() as own, Counting() as stranger:
        await announce(asker, own.address)
        reader, writer = await asker.open(OTHER.peer_id, PROTOCOL, 10)
        writer.write(msgspec.msgpack.encode((stranger.address,)) * 10)
        size = int.from_bytes(await reader.readexactly(2), "little")
        first = decode(await reader.readexactly(size), OTHER.peer_id)
        writer.close()
        assert first is not None and [address for address, _ in first.tried] == [own.address]
        assert (own.connections, stranger.connections) == (1, 0)
        assert await ask(asker, OTHER.peer_id) is None  # too soon
        assert own.connections == 1


async def test_addresses_of_a_kind_that_the_asked_has_not_are_not_dialled(asker, bell):
    bell._addresses = ("192.168.1.5:4001",)
    async with Counting() as own:
        await announce(asker, own.address)
        answer = await ask(asker, OTHER.peer_id)
        assert answer is not None and answer.tried == ((own.address, "no way there"),) and own.connections == 0


async def test_who_has_no_record_is_told_nothing(asked, bell):
    async with await hive(Identity.generate(), await asked.addresses()) as nobody:
        assert await ask(nobody, OTHER.peer_id) is None


async def test_an_asked_that_says_nothing_is_given_up(asked, asker):
    never = asyncio.Event()

    async def silent(*_: object) -> None:
        await never.wait()

    await asker.serve(PROTOCOL, silent)
    with pytest.raises(TimedOut):
        await ask(asked, ASKER.peer_id, 0.3)


async def test_nonsense_is_refused():
    later = msgspec.msgpack.encode((2, (("a:1", 99),), "more"))
    assert decode(later, "x") == Answer("x", Way.NONE, (("a:1", "failed"),))
    assert decode(msgspec.msgpack.encode((3,)), "x") is None and decode(msgspec.msgpack.encode((77,)), "x") is None
    for nonsense in (b"", b"\xc1", msgspec.msgpack.encode(("a",)), msgspec.msgpack.encode((1, [("a", 1)] * 9))):
        with pytest.raises(ProtocolError):
            decode(nonsense, "x")
