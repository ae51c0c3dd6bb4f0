from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from routing.coordinates import Coordinate
from routing.errors import BadInput, PortInUse, StartError, TimedOut, Unreachable
from swarm import dialling
from swarm.channel import TlsChannel, format_address, parse_address
from swarm.frames import Codec, Frame, FrameType
from swarm.handshake import make_certificate, server_context
from swarm.identity import Identity
from swarm.link import Losses, RecentRtt, Silence, SmoothedRtt, Verdict
from swarm.transport import Admission, Endpoint, Heartbeat, Link
from tests.full_disk import full_disk

IDENTITIES = sorted((Identity.generate() for _ in range(3)), key=lambda identity: identity.peer_id)
SMALLER, LARGER, THIRD = IDENTITIES
SESSION = bytes(range(16))


class Record:
    """A handler that writes down what it hears, and lets a test wait for it."""

    def __init__(self, on_frame: Callable[[Link, Frame], None] | None = None):
        self.opened: list[Link] = []
        self.lost: list[tuple[Link, str]] = []
        self.frames: list[tuple[Link, Frame]] = []
        self._on_frame = on_frame
        self._changed = asyncio.Event()

    def link_opened(self, link: Link) -> None:
        self.opened.append(link)
        self._changed.set()

    def frame_received(self, link: Link, frame: Frame) -> None:
        assert link in self.opened and link not in [lost for lost, _ in self.lost]
        self.frames.append((link, frame))
        if self._on_frame:
            self._on_frame(link, frame)
        self._changed.set()

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.append((link, reason))
        self._changed.set()

    async def until(self, done: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not done():
                self._changed.clear()
                await self._changed.wait()


class MemoryCarrier:
    """Streams over socket pairs, within this process."""

    def __init__(self, peer_id: str, net: dict[str, MemoryCarrier]):
        self.peer_id, self.net = peer_id, net
        self.handlers: dict[str, Callable[..., Awaitable[None]]] = {}
        self.opened = 0
        self.tasks: list[asyncio.Task[None]] = []
        net[peer_id] = self

    async def open(self, peer_id: str, protocol: str, timeout_s: float) -> Any:
        target = self.net.get(peer_id)
        if target is None or protocol not in target.handlers:
            raise Unreachable("no such stream")
        self.opened += 1
        here, there = socket.socketpair()
        ours, theirs = (
            await asyncio.open_connection(sock=here),
            await asyncio.open_connection(sock=there),
        )
        self.tasks.append(asyncio.ensure_future(target.handlers[protocol](self.peer_id, *theirs)))
        return ours

    async def serve(self, protocol: str, handler: Callable[..., Awaitable[None]]) -> None:
        self.handlers[protocol] = handler


def open_sockets() -> set[str]:
    """Of this process, where the system shows them; the listing's own descriptor is no socket."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return {target for target in found if target.startswith("socket")}


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Fails if a task or a file descriptor outlives the block."""
    before, open_before = asyncio.all_tasks(), open_sockets()
    yield
    for _ in range(3):
        await asyncio.sleep(0)  # callbacks of closed transports
    assert asyncio.all_tasks() == before
    assert open_sockets() <= open_before


def endpoint(identity: Identity, record: Record, role: str = "peer", **options: Any) -> Endpoint:
    return Endpoint(identity=identity, role=role, handler=record, **options)


def step(size: int = 576, tag: int = 0, session: bytes = SESSION) -> Frame:
    return Frame(
        type=FrameType.STEP, session=session, epoch=tag, start=0, end=1, codec=Codec.FP32, names=bytes(16),
        rows=os.urandom(4 * size),
    )  # fmt: skip


def ack(tag: int, session: bytes = SESSION) -> Frame:
    return Frame(type=FrameType.ACK, session=session, epoch=tag)


# --- addresses ---


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("127.0.0.1:4001", ("127.0.0.1", 4001)),
        ("[::1]:1", ("::1", 1)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_addresses_are_read_and_written(text, pair):
    assert parse_address(text) == pair
    assert format_address(*pair) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":4001", "host:", "host:0", "host:65536", "::1:4001", "[]:1", "host:-1", "host:²"]
)
def test_wrong_addresses_are_named(text):
    with pytest.raises(BadInput):
        parse_address(text)


# --- silence, on virtual time ---


def watch(
    silent: Callable[[float], bool], until: float, stops: dict[float, float] | None = None
) -> tuple[float | None, list[float]]:
    """A link watched from 0 on: (when given up, when asked). `stops` of our own: from when, for how long."""
    heartbeat = Heartbeat()
    silence, now, asked, stops = Silence(heartbeat, 0.0), 0.0, [], dict(stops or {})
    while now < until:
        due = now + heartbeat.tick_s
        now = due
        for begin in [begin for begin in stops if begin <= due]:
            now += stops.pop(begin)
        if not silent(now):
            silence.heard(now)
        verdict = silence.look(now, due)
        if verdict is Verdict.DEAD:
            return now, asked
        if verdict is Verdict.PING:
            asked.append(now)
    return None, asked


def test_a_frozen_peer_is_asked_and_given_up_in_time():
    dead_at, asked = watch(lambda now: now > 10, until=60)
    assert dead_at is not None and 12.0 <= dead_at <= 12.0 + Heartbeat().tick_s
    assert [moment for moment in asked if moment > 10] == [10.5, 11.0, 11.5]


def test_a_peer_that_was_never_heard_is_given_up_in_time():
    dead_at, asked = watch(lambda now: True, until=60)
    assert dead_at == 2.0 and asked == [0.5, 1.0, 1.5]


def test_a_live_link_is_measured_now_and_then_and_never_given_up():
    dead_at, asked = watch(lambda now: False, until=60)
    assert dead_at is None and asked == [5.0 * count for count in range(1, 13)]


def test_who_slept_for_an_hour_accuses_nobody():
    assert watch(lambda now: False, until=7300, stops={10: 3600.0})[0] is None


@given(st.floats(3.0, 20.0), st.floats(0.0, 7200.0))
def test_who_slept_still_notices_who_is_dead(begin, pause):
    """The dead one is given up 2 s of our own waking time after its last word."""
    dead_at, _ = watch(lambda now: now > 1.0, until=9000, stops={begin: pause})
    assert dead_at is not None and 3.0 <= dead_at <= 3.0 + pause + 2 * Heartbeat().tick_s


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 100)), max_size=5))
def test_no_pause_of_ours_makes_a_peer_that_answers_look_dead(pauses):
    """It answers what we ask, but only after we look again: its answer lies unread while we sleep."""
    heartbeat, now, answered, stops = Heartbeat(), 0.0, True, sorted(pauses)
    silence = Silence(heartbeat, now)
    while now < 60:
        due = now + heartbeat.tick_s
        now = due
        while stops and stops[0][0] <= due:
            now += stops.pop(0)[1]
        verdict = silence.look(now, due)
        assert verdict is not Verdict.DEAD
        if not answered:
            silence.heard(now)
        answered = verdict is not Verdict.PING


def test_a_link_whose_answers_take_long_is_given_time_for_two():
    rtt = SmoothedRtt()
    for rtt_s in [1.0, 1.4] * 20:
        rtt.add(rtt_s)
    assert 1.15 < rtt.mean_s < 1.25 and 0.15 < rtt.deviation_s < 0.25
    limit_s = Silence(Heartbeat(), 0.0, rtt).limit_s(0.0)
    assert 0.5 + 2 * 1.4 < limit_s < 6


@given(st.lists(st.floats(0.0, 100.0), max_size=20))
def test_the_limit_of_silence_has_bounds(rtts_s):
    rtt = SmoothedRtt()
    for rtt_s in rtts_s:
        rtt.add(rtt_s)
    assert 2.0 <= Silence(Heartbeat(), 0.0, rtt).limit_s(0.0) <= 10.0


def test_a_link_that_loses_packets_is_given_time_until_it_has_been_clean_for_long():
    losses = Losses()
    silence = Silence(Heartbeat(), 0.0, losses=losses)
    losses.heard(1, 1.0)
    losses.heard(1, 2.0)
    assert silence.limit_s(2.0) == 2.0, "once is no habit"
    losses.heard(3, 50.0)
    assert silence.limit_s(60.0) == 6.0
    assert silence.limit_s(122.0) == 2.0


@pytest.mark.parametrize("round_trip_s, looks", [(0.03, 1), (0.2, 2)])
def test_an_interruption_does_not_make_a_link_slow(round_trip_s, looks):
    """The pings of eight seconds are answered at once, or the first of them a round trip before the others."""
    rtt = RecentRtt()
    for _ in range(3):
        rtt.answered(round_trip_s)
        rtt.look()
    late = [8.0 - 0.5 * ping + round_trip_s for ping in range(16)]
    for answers in [late] if looks == 1 else [late[:1], late[1:]]:
        for rtt_s in answers:
            rtt.answered(rtt_s)
        rtt.look()
        rtt.look()
    assert Silence(Heartbeat(), 0.0, rtt.smoothed).limit_s(0.0) < 3.0


def test_a_link_that_becomes_slow_is_given_time_after_three_answers():
    rtt = RecentRtt()
    for rtt_s in [0.03, 2.0, 2.0, 2.0]:
        rtt.answered(rtt_s)
        rtt.look()
    assert Silence(Heartbeat(), 0.0, rtt.smoothed).limit_s(0.0) > 5.0


def test_a_quick_link_is_given_no_more_time():
    rtt = SmoothedRtt()
    rtt.add(0.15)
    assert Silence(Heartbeat(), 0.0, rtt).limit_s(0.0) == 2.0


@pytest.mark.parametrize(
    "options", [{"ping_after_s": 3.0}, {"ping_every_s": 0.0}, {"ping_every_s": 2.0}, {"measure_every_s": 0}]
)
def test_a_senseless_heartbeat_is_refused(options):
    with pytest.raises(BadInput):
        Heartbeat(**options)


class Transport:
    """Of a connection that stands, or that has been closed while nobody was told yet."""

    def __init__(self, closing: bool):
        self.closing, self.told = closing, []

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> Any:
        assert not self.closing, "the descriptor may be another socket's"
        return SimpleNamespace(setsockopt=lambda *option: self.told.append(option[1]))

    def abort(self) -> None:
        self.told.append("aborted")


@pytest.mark.parametrize("closing", [False, True])
async def test_a_connection_is_given_up_with_a_reset_unless_it_is_closed_already(closing: bool) -> None:
    channel = TlsChannel(lambda channel: None)
    transport = channel._transport = Transport(closing)  # type: ignore[assignment]
    channel.abort()
    assert transport.told == ([] if closing else [socket.SO_LINGER]) + ["aborted"]
    assert not closing or channel.mishaps == 0


async def test_a_connection_whose_end_nobody_tells_is_at_an_end_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.channel._CLOSE_S", 0.01)
    ended: list[str] = []
    channel = TlsChannel(lambda channel: None)
    channel._transport, channel.sink = Transport(closing=True), SimpleNamespace(channel_lost=ended.append)  # type: ignore[assignment]
    channel.abort()
    await asyncio.wait_for(channel.closed, 5)
    channel.connection_lost(None)
    assert len(ended) == 1


# --- links over TLS ---


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("role", ["client", "peer"])
async def test_frames_go_both_ways_in_order(host, role):
    async with nothing_left():
        here, there = Record(), Record(lambda link, frame: link.send(frame))
        async with endpoint(SMALLER, here, role) as a, endpoint(LARGER, there) as b:
            try:
                address = await b.listen(host)
            except OSError:
                pytest.skip(f"no {host} here")
            link = await a.connect(LARGER.peer_id, [address], 10)
            assert (link.remote, link.role) == (LARGER.peer_id, "peer")
            sent = [step(size, tag) for tag, size in enumerate((1, 576, 100_000, 2, 50_000))]
            for frame in sent:
                link.send(frame)
            await here.until(lambda: len(here.frames) == len(sent))
            assert [(f.epoch, bytes(f.rows)) for _, f in here.frames] == [(f.epoch, f.rows) for f in sent]
            assert (there.opened[0].remote, there.opened[0].role) == (SMALLER.peer_id, role)
            assert link.queued_bytes == 0
            assert here.lost == there.lost == []


async def test_a_peer_is_linked_once_and_dials_are_joined():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b:
        address = await b.listen("127.0.0.1")
        links = await asyncio.gather(*(a.connect(LARGER.peer_id, [address], 10) for _ in range(5)))
        links.append(await a.connect(LARGER.peer_id, [], 10))
        assert len(set(links)) == 1 == len(here.opened)
        await there.until(lambda: there.opened)
        assert a.link(LARGER.peer_id) is links[0] and b.link(SMALLER.peer_id) is there.opened[0]
        assert await b.connect(SMALLER.peer_id, [], 10) is there.opened[0]
        assert a.link(THIRD.peer_id) is None


async def test_clients_that_share_an_id_are_kept_apart():
    server, first, second = Record(), Record(), Record()
    async with (
        endpoint(LARGER, server) as b,
        endpoint(SMALLER, first, "client") as one,
        endpoint(SMALLER, second, "client") as two,
    ):
        address = await b.listen("127.0.0.1")
        for client in (one, two):
            await client.connect(LARGER.peer_id, [address], 10)
        await server.until(lambda: len(server.opened) == 2)
        for tag, link in enumerate(server.opened):
            link.send(ack(tag))
        await first.until(lambda: first.frames)
        await second.until(lambda: second.frames)
        assert {first.frames[0][1].epoch, second.frames[0][1].epoch} == {0, 1}
        assert server.lost == [] and b.link(SMALLER.peer_id) is None


class Standing:
    """Says always that it is at the same place."""

    def __init__(self, *numbers: float):
        self.coordinate, self.numbers = self, numbers

    def observe(self, *_: Any) -> None:
        pass


async def test_a_ping_tells_where_the_other_is_and_how_much_is_computed_there():
    async with endpoint(LARGER, Record(), active=lambda: 7) as b, endpoint(SMALLER, Record()) as a:
        there = Coordinate(place=(0.1, 0.2, 0.3), height=0.01, error=0.1)
        b.coordinates = Standing(*there.numbers)
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        before = a.coordinates.coordinate
        await link.ping(10)
        assert link.place == there and link.sessions == 7
        assert a.coordinates.coordinate.rtt_s(there) < before.rtt_s(there), "it has moved there"


@pytest.mark.parametrize("place", [(), (1.0,), (float("nan"),) * 5, (0.0, 0.0, 0.0, -1.0, 0.1)])
async def test_a_place_that_is_none_does_no_harm(place):
    async with endpoint(LARGER, Record()) as b, endpoint(SMALLER, Record()) as a:
        b.coordinates = Standing(*place)
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        assert await link.ping(10) > 0
        assert link.place is None and a.coordinates.coordinate == Coordinate()


async def test_pings_are_answered_by_the_transport():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client") as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        seconds = await link.ping(10)
        assert 0 < seconds < 10 and link.rtt_s is not None and 0 < link.rtt_s <= seconds
        assert here.frames == there.frames == []
        await link.close()
        with pytest.raises(TimedOut):
            await link.ping(10)
        await there.until(lambda: there.lost)
        assert there.lost == [(there.opened[0], "closed by the other side")] and here.lost == []
        link.send(ack(1))  # dropped, silently
        assert link.closed and link.queued_bytes == 0


async def test_what_was_sent_before_close_arrives():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client") as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        for tag in range(50):
            link.send(ack(tag))
        await link.close()
        await there.until(lambda: there.lost)
        assert [frame.epoch for _, frame in there.frames] == list(range(50))


async def test_decode_overtakes_bulk_that_waits():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client") as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        reading = there.opened[0]._channel._transport
        reading.pause_reading()
        for tag in range(4):
            link.send(step(3_000_000, tag, session=b"bulk" * 4))
        left = 0
        while link.queued_bytes != left:  # until the way is full
            left = link.queued_bytes
            await asyncio.sleep(0.02)
        assert left > 35_000_000
        link.send(ack(9))
        reading.resume_reading()
        await there.until(lambda: len(there.frames) == 5)
        assert [frame.epoch for _, frame in there.frames] == [9, 0, 1, 2, 3]


async def test_a_broken_protocol_ends_the_link_by_name():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client") as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        link._channel.write([b"\xff" * 36])
        await there.until(lambda: there.lost)
        assert there.lost[0][1].startswith("protocol error: frame type 255")
        await here.until(lambda: here.lost)
        assert b._clients == set()


async def test_a_restarted_peer_replaces_its_old_link():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a:
        address = await a.listen("127.0.0.1")
        before, after = endpoint(LARGER, Record()), endpoint(LARGER, there)
        async with before, after:
            await before.connect(SMALLER.peer_id, [address], 10)
            await here.until(lambda: here.opened)
            link = await after.connect(SMALLER.peer_id, [address], 10)
            await here.until(lambda: len(here.opened) == 2)
            assert [lost for lost, _ in here.lost] == [here.opened[0]]
            assert "replaced" in here.lost[0][1]
            link.send(ack(1))
            await here.until(lambda: here.frames)
            assert here.frames[0][0] is here.opened[1] is a.link(LARGER.peer_id)


@pytest.mark.parametrize("role", ["client", "peer"])
async def test_a_remote_that_lost_its_side_replaces_the_link(role):
    """The listener has not noticed: no end of the old connection ever reaches it."""
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a, endpoint(LARGER, there, role) as b:
        address = await a.listen("127.0.0.1")
        link = await b.connect(SMALLER.peer_id, [address], 10)
        await here.until(lambda: here.opened)
        link._ended()  # as after an abort whose RST was lost: the socket is open, the link is not
        again = await b.connect(SMALLER.peer_id, [address], 10)
        await here.until(lambda: len(here.opened) == 2)
        assert [lost for lost, _ in here.lost] == [here.opened[0]]
        again.send(ack(1))
        await here.until(lambda: here.frames)


@pytest.mark.parametrize("lead_turns", range(0, 60, 3))
async def test_two_that_dial_each_other_at_once_agree_on_one_link(lead_turns):
    """Whichever begins, by however many turns of the loop, no link is reported lost and no frame vanishes."""
    for early, late in ((SMALLER, LARGER), (LARGER, SMALLER)):
        records = {early.peer_id: Record(), late.peer_id: Record()}
        async with endpoint(early, records[early.peer_id]) as a, endpoint(late, records[late.peer_id]) as b:
            to_a, to_b = await a.listen("127.0.0.1"), await b.listen("127.0.0.1")

            async def dial(mine: Endpoint, other: Identity, address: str, turns: int) -> Link:
                for _ in range(turns):
                    await asyncio.sleep(0)
                link = await mine.connect(other.peer_id, [address], 10)
                for tag in range(3):
                    link.send(ack(tag))
                return link

            links = await asyncio.gather(dial(a, late, to_b, 0), dial(b, early, to_a, lead_turns))
            for record in records.values():
                await record.until(lambda record=record: len(record.frames) == 3)
            await asyncio.gather(*(link.ping(10) for link in links))
            for record, mine in zip(records.values(), links, strict=True):
                assert record.lost == [] and record.opened == [mine]
                assert [frame.epoch for _, frame in record.frames] == [0, 1, 2]
            assert links[0].nonce == links[1].nonce, "two different connections"


@contextlib.asynccontextmanager
async def slow_way(
    address: str, there_s: float, back_s: float, gate: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """Another address for `address`, with a delay each way, and a gate that holds up what goes there."""
    loop, writers = asyncio.get_running_loop(), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(*parse_address(address))
        writers.extend((writer, outer))
        await asyncio.gather(pump(reader, outer, there_s, gate), pump(inner, writer, back_s, None))

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, gate: asyncio.Event | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if gate is not None:
                    await asyncio.sleep(delay_s)
                    await gate.wait()
                    writer.write(data)
                else:
                    loop.call_later(delay_s, writer.write, data)
        loop.call_later(delay_s, writer.close)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield format_address(*server.sockets[0].getsockname()[:2])
    server.close()
    for writer in writers:
        writer.transport.abort()


@pytest.mark.parametrize("seed", range(16))
async def test_two_that_dial_each_other_over_slow_ways_agree_on_one_link(seed):
    chance = Random(seed)
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b:
        ways = [await a.listen("127.0.0.1"), await b.listen("127.0.0.1")]
        delays = [chance.choice([0.0, 0.003, 0.01, 0.02]) for _ in range(6)]
        async with slow_way(ways[0], *delays[:2]) as to_a, slow_way(ways[1], *delays[2:4]) as to_b:

            async def dial(mine: Endpoint, other: Identity, address: str, after_s: float) -> Link:
                await asyncio.sleep(after_s)
                link = await mine.connect(other.peer_id, [address], 10)
                link.send(ack(1))
                return link

            one, two = await asyncio.gather(dial(a, LARGER, to_b, delays[4]), dial(b, SMALLER, to_a, delays[5]))
            await here.until(lambda: here.frames)
            await there.until(lambda: there.frames)
            await asyncio.sleep(0.08)  # four times the longest way: what was dropped has been heard of
            assert here.lost == there.lost == [] and one.nonce == two.nonce
            assert (here.opened, there.opened) == ([one], [two])


async def test_a_hello_that_comes_after_the_other_connection_stands_does_not_displace_it():
    """The larger id's hello is on its way for so long that the smaller one's dial begins and ends meanwhile."""
    here, there, gate = Record(), Record(), asyncio.Event()
    gate.set()
    async with (
        endpoint(SMALLER, here) as a,
        endpoint(LARGER, there) as b,
        slow_way(await a.listen("127.0.0.1"), 0.05, 0.0, gate) as to_a,
    ):
        waiting = asyncio.ensure_future(b.connect(SMALLER.peer_id, [to_a], 10))
        while not (b._dials and b._dials[SMALLER.peer_id].greeted):  # noqa: ASYNC110  nor a dialler's
            await asyncio.sleep(0)
        gate.clear()
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        assert (await waiting).nonce == link.nonce
        assert len(a._pending) == 1  # the other connection, whose hello has not come yet
        gate.set()
        async with asyncio.timeout(10):
            while a._pending:  # noqa: ASYNC110  nothing tells a listener's own bookkeeping
                await asyncio.sleep(0.005)
        link.send(ack(1))
        await there.until(lambda: there.frames)
        assert here.lost == there.lost == [] and here.opened == [link]


async def test_who_cannot_dial_is_reached_by_the_other_side():
    """The smaller id's own dial leads nowhere; the larger one's connection serves both."""
    here, there = Record(), Record()
    dead = socket.socket()
    dead.bind(("127.0.0.1", 0))
    dead.listen()  # takes the connection, and never says a word
    try:
        async with endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b:
            to_a = await a.listen("127.0.0.1")
            waiting = asyncio.ensure_future(a.connect(LARGER.peer_id, [format_address(*dead.getsockname())], 10))
            await asyncio.sleep(0)
            link = await b.connect(SMALLER.peer_id, [to_a], 10)
            assert (await waiting).nonce == link.nonce
    finally:
        dead.close()


class Blackhole:
    """Listens with a peer's own certificate, says the preface or nothing, and never a verdict."""

    def __init__(self, identity: Identity, preface: bytes = b"SWRM\x01\x00" + bytes(16) + bytes(32)):
        self._tls, self._preface = server_context(*make_certificate(identity)), preface
        self.greeted, self.ended = asyncio.Event(), asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=self._tls)
        return format_address(*self.server.sockets[0].getsockname()[:2])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        writer.write(self._preface)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readexactly(7)
            self.greeted.set()
            await reader.read()
        self.ended.set()

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()


async def test_a_connection_held_back_is_taken_when_ones_own_dial_fails():
    """The smaller id's hello is under way to a place that never answers; the larger one dials meanwhile."""
    here, there = Record(), Record()
    hole = Blackhole(LARGER)
    quick = Admission(handshake_s=0.5)
    async with hole as address, endpoint(SMALLER, here, admission=quick) as a, endpoint(LARGER, there) as b:
        to_a = await a.listen("127.0.0.1")
        waiting = asyncio.ensure_future(a.connect(LARGER.peer_id, [address], 10))
        await hole.greeted.wait()
        link = await b.connect(SMALLER.peer_id, [to_a], 10)
        assert (await waiting).nonce == link.nonce
        assert here.lost == there.lost == []


async def test_the_losers_of_a_race_are_dropped():
    here, there = Record(), Record()
    hole = Blackhole(LARGER, preface=b"")
    async with hole as mute, endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [mute, await b.listen("127.0.0.1")], 10)
        async with asyncio.timeout(5):
            await hole.ended.wait()
        assert await link.ping(10) > 0


# --- who is not let in, and what cannot be reached ---


async def test_another_process_at_the_address_is_not_taken_for_the_peer():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b:
        address = await b.listen("127.0.0.1")
        with pytest.raises(Unreachable, match=f"another process than {THIRD.peer_id}"):
            await a.connect(THIRD.peer_id, [address], 10)
        assert here.opened == there.opened == []


async def test_a_wrong_address_beside_a_right_one_does_no_harm():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here) as a, endpoint(LARGER, there) as b, endpoint(THIRD, Record()) as c:
        right, wrong = await b.listen("127.0.0.1"), await c.listen("127.0.0.1")
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        try:
            mute = format_address(*silent.getsockname())
            link = await a.connect(LARGER.peer_id, [mute, "nonsense", wrong, "127.0.0.1:1", right], 10)
        finally:
            silent.close()
        assert await link.ping(10) > 0


async def test_what_cannot_be_reached_is_named_with_reasons():
    async with endpoint(SMALLER, Record()) as a:
        with pytest.raises(Unreachable, match="no address is known"):
            await a.connect(LARGER.peer_id, [], 10)
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1: ") as caught:
            await a.connect(LARGER.peer_id, ["127.0.0.1:1"], 10)
        assert caught.value.why == "127.0.0.1:1: refused"
        with pytest.raises(BadInput, match="dial itself"):
            await a.connect(SMALLER.peer_id, [], 10)
        with pytest.raises(BadInput, match="peer id"):
            await a.connect("nobody", [], 10)
    with pytest.raises(BadInput, match="closed"):
        await a.connect(LARGER.peer_id, [], 10)


async def test_the_callers_time_is_kept_and_the_dial_ends_with_its_last_waiter():
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    try:
        async with nothing_left(), endpoint(SMALLER, Record()) as a:
            address = format_address(*silent.getsockname())
            patient = asyncio.ensure_future(a.connect(LARGER.peer_id, [address], 10))
            with pytest.raises(Unreachable, match=r"within 0\.05 s"):
                await a.connect(LARGER.peer_id, [address], 0.05)
            assert a._dials
            patient.cancel()
            with pytest.raises(asyncio.CancelledError):
                await patient
            assert not a._dials
    finally:
        silent.close()


async def test_a_port_in_use_is_named_and_a_client_never_listens():
    async with endpoint(SMALLER, Record()) as a, endpoint(LARGER, Record(), "client") as b:
        host, port = parse_address(await a.listen("127.0.0.1"))
        async with endpoint(THIRD, Record()) as c:
            with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
                await c.listen(host, port)
        with pytest.raises(BadInput, match="never listens"):
            await b.listen("127.0.0.1")
    with pytest.raises(BadInput, match="not a role"):
        endpoint(SMALLER, Record(), "king")


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = parse_address(address)
    return await asyncio.open_connection(host, port, ssl=context)


async def test_without_room_for_a_temporary_file_nobody_listens_and_that_is_said():
    async with endpoint(SMALLER, Record()) as a:
        with full_disk(), pytest.raises(StartError, match="no temporary file can be written"):
            await a.listen("127.0.0.1")
        assert await a.listen("127.0.0.1")


async def test_who_says_no_hello_is_dropped_and_who_talks_nonsense_is_told_why():
    there = Record()
    async with endpoint(LARGER, there, admission=Admission(handshake_s=0.3)) as b:
        address = await b.listen("127.0.0.1")
        reader, writer = await raw(address)
        async with asyncio.timeout(5):
            assert (await reader.read(54))[:6] == b"SWRM\x01\x00"
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
        writer.close()
        reader, writer = await raw(address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(5):
            assert b"does not speak this protocol" in await reader.read()
        writer.close()
        assert there.opened == [] and not b._pending


async def test_only_so_many_may_linger_without_a_hello_and_only_so_many_may_be_in():
    there = Record()
    async with endpoint(LARGER, there, admission=Admission(unauthenticated=1, inbound=1)) as b:
        address = await b.listen("127.0.0.1")
        reader, writer = await raw(address)
        await reader.readexactly(54)
        async with endpoint(SMALLER, Record(), "client") as a:
            with pytest.raises(Unreachable):
                await a.connect(LARGER.peer_id, [address], 5)
            writer.transport.abort()
            while b._pending:  # noqa: ASYNC110  nothing tells a listener's own bookkeeping
                await asyncio.sleep(0.01)
            await a.connect(LARGER.peer_id, [address], 10)
            async with endpoint(THIRD, Record(), "client") as c:
                with pytest.raises(Unreachable, match="as many connections as it can"):
                    await c.connect(LARGER.peer_id, [address], 10)


# --- heartbeats on a live link ---

QUICK = Heartbeat(ping_after_s=0.1, ping_every_s=0.05, dead_after_s=0.25)


async def test_a_remote_that_freezes_is_given_up_only_while_watched():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client", heartbeat=QUICK) as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        await link.ping(10)
        link.watched = True
        for _ in range(4):  # far beyond 0.25 s: what lives is not given up
            await asyncio.sleep(0.15)
        assert here.lost == [] and link.watched
        there.opened[0]._channel._transport.pause_reading()
        begin = time.monotonic()
        await here.until(lambda: here.lost)
        assert here.lost[0][0] is link and here.lost[0][1].startswith("silent for 0.")
        assert time.monotonic() - begin < 2
        assert link.closed and not link.watched and a.link(LARGER.peer_id) is None


async def test_a_process_whose_loop_stood_still_accuses_nobody():
    here, there = Record(), Record()
    async with endpoint(SMALLER, here, "client", heartbeat=QUICK) as a, endpoint(LARGER, there) as b:
        link = await a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10)
        link.watched = True
        await asyncio.sleep(0.1)
        time.sleep(0.6)  # noqa: ASYNC251  the whole loop stands still, both ends with it
        await asyncio.sleep(0.1)
        assert await link.ping(10) < 10 and here.lost == []


# --- the stream fallback ---


def carriers(*peer_ids: str) -> list[MemoryCarrier]:
    net: dict[str, MemoryCarrier] = {}
    return [MemoryCarrier(peer_id, net) for peer_id in peer_ids]


@pytest.mark.parametrize("role", ["client", "peer"])
async def test_frames_go_over_streams_when_there_is_no_direct_way(role):
    async with nothing_left():
        ours = SMALLER.peer_id if role == "peer" else THIRD.peer_id  # a client's stream has an id of its own
        mine, other = carriers(ours, LARGER.peer_id)
        here, there = Record(), Record(lambda link, frame: link.send(frame))
        async with endpoint(SMALLER, here, role, streams=mine) as a, endpoint(LARGER, there, streams=other):
            link = await a.connect(LARGER.peer_id, ["127.0.0.1:1"], 10)
            sent = [step(size, tag) for tag, size in enumerate((576, 1_000_000, 2))]
            for frame in sent:
                link.send(frame)
            await here.until(lambda: len(here.frames) == 3)
            assert [bytes(f.rows) for _, f in here.frames] == [f.rows for f in sent]
            assert there.opened[0].remote == SMALLER.peer_id and there.opened[0].role == role
            assert await link.ping(10) > 0
            await link.close()
            await there.until(lambda: there.lost)
        await asyncio.gather(*mine.tasks)


async def test_direct_is_preferred_and_can_be_switched_off():
    mine, other = carriers(SMALLER.peer_id, LARGER.peer_id)
    here, there = Record(), Record()
    async with endpoint(LARGER, there, streams=other) as b:
        address = await b.listen("127.0.0.1")
        async with endpoint(SMALLER, here, streams=mine) as a:
            await a.connect(LARGER.peer_id, [address], 10)
            assert mine.opened == 0
        async with endpoint(SMALLER, here, streams=mine, direct=False) as a:
            await a.connect(LARGER.peer_id, [address], 10)
            assert mine.opened == 1


async def test_a_slow_handshake_is_waited_for_rather_than_taking_a_stream(monkeypatch):
    """A busy machine answers late: its streams would be late too, and they end with p2pd."""
    monkeypatch.setattr(dialling, "_STREAM_AFTER_S", 0.05)
    mine, other = carriers(SMALLER.peer_id, LARGER.peer_id)
    gate = asyncio.Event()
    async with (
        endpoint(LARGER, Record(), streams=other) as b,
        endpoint(SMALLER, Record(), streams=mine) as a,
        slow_way(await b.listen("127.0.0.1"), 0.0, 0.0, gate) as address,
    ):
        asyncio.get_running_loop().call_later(0.3, gate.set)
        link = await a.connect(LARGER.peer_id, [address], 10)
        assert mine.opened == 0 and await link.ping(10) > 0


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_process_that_was_held_up_while_it_dialled_takes_no_stream_for_it(turns, monkeypatch):
    """When it looks again the time for a direct way is over, and the answer lies there unread."""
    monkeypatch.setattr(dialling, "_STREAM_AFTER_S", 0.2)
    mine, other = carriers(SMALLER.peer_id, LARGER.peer_id)
    async with endpoint(LARGER, Record(), streams=other) as b, endpoint(SMALLER, Record(), streams=mine) as a:
        dialling_it = asyncio.ensure_future(a.connect(LARGER.peer_id, [await b.listen("127.0.0.1")], 10))
        for _ in range(turns):  # of the loop: the dial has begun, or the connection
            await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251
        link = await dialling_it
        assert mine.opened == 0 and await link.ping(10) > 0


async def test_a_stream_from_another_than_it_says_is_refused():
    """The hello is bound to the ids that the channel authenticated: no other stream can carry it."""
    mine, other = carriers(SMALLER.peer_id, LARGER.peer_id)
    there = Record()
    async with endpoint(LARGER, there, streams=other), endpoint(SMALLER, Record(), streams=mine) as a:
        mine.peer_id = THIRD.peer_id  # what the listener's channel says of us
        a._streams.peer_id = THIRD.peer_id
        honest = await a.connect(LARGER.peer_id, [], 10)
        await honest.close()

        class Liar(MemoryCarrier):
            async def open(self, peer_id: str, protocol: str, timeout_s: float) -> Any:
                return await mine.open(peer_id, protocol, timeout_s)

        liar = Liar(SMALLER.peer_id, {})
        async with endpoint(SMALLER, Record(), streams=liar) as c:
            with pytest.raises(Unreachable, match="not its own"):
                await c.connect(LARGER.peer_id, [], 10)


async def test_close_ends_dials_streams_and_links_and_tells_no_handler():
    async with nothing_left():
        mine, other = carriers(SMALLER.peer_id, LARGER.peer_id)
        here, there = Record(), Record()
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        a = endpoint(SMALLER, here, streams=mine)
        b = endpoint(LARGER, there, streams=other)
        await b.open()
        await a.connect(LARGER.peer_id, [], 10)
        mine.net.pop(LARGER.peer_id)
        dial = asyncio.ensure_future(a.connect(THIRD.peer_id, [format_address(*silent.getsockname())], 10))
        await asyncio.sleep(0.01)
        await a.close()
        with pytest.raises(Unreachable, match="this endpoint was closed"):
            await dial
        stranger, writer = await raw(await b.listen("127.0.0.1"))
        await stranger.readexactly(54)
        await there.until(lambda: there.lost)
        await b.close()
        await b.close()  # twice does no harm
        async with asyncio.timeout(2):  # much less than a handshake's deadline
            with contextlib.suppress(OSError):
                assert await stranger.read() == b""
        writer.transport.abort()
        await asyncio.gather(*mine.tasks)
        silent.close()
        assert here.lost == []


@pytest.mark.parametrize(
    "scenario",
    [
        lambda: test_frames_go_both_ways_in_order("127.0.0.1", "peer"),
        lambda: test_frames_go_over_streams_when_there_is_no_direct_way("client"),
        lambda: test_two_that_dial_each_other_at_once_agree_on_one_link(0),
        test_pings_are_answered_by_the_transport,
        test_decode_overtakes_bulk_that_waits,
        test_a_remote_that_freezes_is_given_up_only_while_watched,
        test_a_process_whose_loop_stood_still_accuses_nobody,
        test_a_wrong_address_beside_a_right_one_does_no_harm,
        test_close_ends_dials_streams_and_links_and_tells_no_handler,
    ],
)
def test_it_is_the_same_on_uvloop(scenario):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
