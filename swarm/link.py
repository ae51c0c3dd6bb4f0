"""One authenticated connection to one remote process: frames both ways, pings, and the notice of its end.

Owns the hand-over between `Connection` (order, parts) and a `Channel` (bytes), the measuring of round trips
and the judgement of silence. Knows no session and no route; whom to link, and how often, the endpoint says.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from statistics import median_low
from typing import Protocol

from routing.coordinates import DIMENSIONS, Coordinate, Vivaldi
from routing.errors import BadInput, ProtocolError, TimedOut
from routing.types import PeerId
from swarm.channel import BUFFER_BYTES, Channel
from swarm.connection import Connection, Traffic
from swarm.frames import NO_SESSION, Frame, FrameType, Ping, Pong
from swarm.throughput import Throughput
from swarm.wire import Limits

SILENT, REPLACED = "silent", "replaced"  # begin the reason of a link that was given up, or that another one followed
_WRITE_BYTES = 128 * 1024  # taken from the queues at once
_TURN_BYTES = 1024 * 1024  # written in one turn of the loop; the rest in the next, so that reading goes on
_MOST_PONGS = 32  # queued, to one who asks and does not read
_MOST_PINGS = 64  # under way; older ones are given up
_RTT_SAMPLES = 8
_LATE_S = 0.1  # past a deadline: this process was not there to hear the answer
_ASKED_AGAIN = 3  # at most
LOSSES, LOSSES_S = 2, 120.0  # so many looks within that time at which a packet had been lost: they get lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Seconds. A watched link on which nothing comes is asked, asked again, and given up."""

    ping_after_s: float = 0.5
    ping_every_s: float = 0.5
    dead_after_s: float = 2.0
    measure_every_s: float = 5.0  # a ping on a watched link that is not silent, to keep its round trip current
    lossy_dead_after_s: float = 6.0  # where packets get lost: TCP sends one for the fourth time after 15 timeouts
    most_dead_after_s: float = 10.0  # however slow a link has shown itself

    def __post_init__(self) -> None:
        if not 0 < self.ping_every_s <= self.ping_after_s < self.dead_after_s or self.measure_every_s <= 0:
            raise BadInput("a heartbeat needs 0 < ping_every_s <= ping_after_s < dead_after_s")

    @property
    def tick_s(self) -> float:
        """Between two looks at a link: what a death may be noticed late."""
        return self.ping_every_s / 2


class Verdict(Enum):
    """What to do about a link's silence."""

    WAIT = "wait"
    PING = "ping"
    DEAD = "dead"


class SmoothedRtt:
    """How long answers take: mean and deviation, as TCP keeps them (RFC 6298, section 2). Seconds."""

    def __init__(self) -> None:
        self.mean_s = self.deviation_s = 0.0
        self._known = False

    def add(self, rtt_s: float) -> None:
        if not self._known:
            self.mean_s, self.deviation_s, self._known = rtt_s, rtt_s / 2, True
            return
        self.deviation_s += (abs(rtt_s - self.mean_s) - self.deviation_s) / 4
        self.mean_s += (rtt_s - self.mean_s) / 8

    @property
    def late_s(self) -> float:
        """An answer that takes longer is unusual; 0 while nothing is known."""
        return self.mean_s + 4 * self.deviation_s


class RecentRtt:
    """Of a watched link. After an interruption the answers to all pings of that time come at once: only the last of
    them tells how long the way takes, and a median of three leaves out what is told only once."""

    def __init__(self) -> None:
        self.smoothed = SmoothedRtt()
        self._least_s = math.inf  # since the last look
        self._last: deque[float] = deque(maxlen=3)

    def answered(self, rtt_s: float) -> None:
        self._least_s = min(self._least_s, rtt_s)

    def look(self) -> None:
        if self._least_s < math.inf:
            self._last.append(self._least_s)
            self.smoothed.add(median_low(self._last))
            self._least_s = math.inf


class Losses:
    """Whether packets get lost on a link that lives: then silence may only mean that TCP waits to send one again. What
    is lost while the other side is silent proves nothing; it may be dead."""

    def __init__(self) -> None:
        self._mishaps = 0
        self._seen: deque[float] = deque(maxlen=LOSSES)

    def heard(self, mishaps: int, now: float) -> None:
        """The other side lives, and there have been so many mishaps."""
        if mishaps > self._mishaps:
            self._seen.append(now)
        self._mishaps = max(mishaps, self._mishaps)

    def frequent(self, now: float) -> bool:
        return len(self._seen) == LOSSES and now - self._seen[0] < LOSSES_S


class Silence:
    """Judges how long the other side has been silent while we were there to hear it. Time is an argument.

    `rtt` and `losses` are what was measured of the link. One whose answers take long (a loaded uplink, a far satellite)
    is given time for two of them; one that loses packets, until TCP has sent one for the fourth time.
    """

    def __init__(
        self, heartbeat: Heartbeat, now: float, rtt: SmoothedRtt | None = None, losses: Losses | None = None
    ):
        self._heartbeat = heartbeat
        self._rtt, self._losses = rtt or SmoothedRtt(), losses or Losses()
        self._since = now
        self._asked = now

    def heard(self, now: float) -> None:
        """Any byte counts as life."""
        self._since = now

    def seconds(self, now: float) -> float:
        return max(0.0, now - self._since)

    def limit_s(self, now: float) -> float:
        """Silent for so long, the other side is dead."""
        beat = self._heartbeat
        slow_s = beat.ping_after_s + beat.ping_every_s + 2 * self._rtt.late_s
        least_s = beat.lossy_dead_after_s if self._losses.frequent(now) else beat.dead_after_s
        return max(least_s, min(slow_s, beat.most_dead_after_s))

    def look(self, now: float, due: float) -> Verdict:
        """What to do at `now`, for a look that was due at `due`.

        A late look means that this very process slept or was stopped: that time says nothing about others.
        """
        late = max(0.0, now - due)
        self._since = min(now, self._since + late)
        self._asked = min(now, self._asked + late)
        silent = now - self._since
        if silent >= self.limit_s(now):
            return Verdict.DEAD
        asked = now - self._asked
        asks = silent >= self._heartbeat.ping_after_s and asked >= self._heartbeat.ping_every_s
        if asks or asked >= self._heartbeat.measure_every_s:
            self._asked = now
            return Verdict.PING
        return Verdict.WAIT


class LinkHandler(Protocol):
    """Who takes what links bring. Called on the event loop; must not block."""

    def link_opened(self, link: Link) -> None: ...

    def frame_received(self, link: Link, frame: Frame) -> None: ...

    def link_lost(self, link: Link, reason: str) -> None:
        """The link ended, and not by its own `close()`. Nothing more comes from it."""


class Link:
    """One authenticated connection to one remote process. Made by an `Endpoint`."""

    def __init__(
        self,
        *,
        remote: PeerId,
        role: str,
        nonce: bytes,
        instance: bytes,
        channel: Channel,
        limits: Limits,
        traffic: Traffic,
        heartbeat: Heartbeat,
        handler: LinkHandler,
        forget: Callable[[Link], None],
        watch: Callable[[], None],
        active: Callable[[], int],
        coordinates: Vivaldi,
    ):
        self.remote, self.role = remote, role
        self.nonce, self.instance = (
            nonce,
            instance,
        )  # of this connection; of the remote process, if it dialled
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._channel, self._handler = channel, handler
        self._connection = Connection(limits, traffic)
        self._heartbeat = heartbeat
        self._silence: Silence | None = None
        self._forget, self._watch, self._active = forget, watch, active
        self._coordinates = coordinates
        self.place: Coordinate | None = None  # of the remote, as it says
        self.used = False  # whether anything but pings ever went over it
        self.sessions = 0  # of anybody, that were active at the remote when it last answered a ping
        self._flush_soon = False
        self._throughput = Throughput(BUFFER_BYTES * 3 // 4)  # a channel resumes when a quarter is left
        self._next_ping = 0
        self._asked: dict[int, float] = {}  # pings under way: when they were sent
        self._waiters: dict[int, asyncio.Future[float]] = {}
        self._rtts: deque[float] = deque(maxlen=_RTT_SAMPLES)
        self._recent_rtt, self._losses = RecentRtt(), Losses()
        self._heard = False  # since the last look

    def __repr__(self) -> str:
        return f"Link({self.role} {self.remote[-6:]}{' closed' if self.closed else ''})"

    @property
    def rtt_s(self) -> float | None:
        """The least of the last round trips measured, in seconds."""
        return min(self._rtts) if self._rtts else None

    @property
    def bytes_per_s(self) -> float:
        """How fast bulk left of late; 0: not known."""
        return self._throughput.bytes_per_s(time.monotonic())

    @property
    def watched(self) -> bool:
        """True while sessions are open: heartbeats are on, and a silent remote is given up."""
        return self._silence is not None

    @watched.setter
    def watched(self, value: bool) -> None:
        if value and self._silence is None and not self.closed:
            self._silence = Silence(self._heartbeat, time.monotonic(), self._recent_rtt.smoothed, self._losses)
            self._watch()
        elif not value:
            self._silence = None

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait here because the remote, or the network, does not take them yet."""
        return self._connection.queued_bytes

    def send(self, frame: Frame) -> None:
        """Send, or queue. Never blocks; dropped when closed. Raises BadInput if the frame breaks a limit."""
        self.used = True
        self._send(frame)

    def _send(self, frame: Frame) -> None:
        if self.closed:
            return
        self._connection.send(frame)
        # All frames of a turn of the loop leave together at its end: if the first ran ahead, the next hop would
        # begin a pass with it alone, and the others would wait for that pass.
        if not self._flush_soon:
            self._flush_soon = True
            self._loop.call_soon(self._flush)

    async def ping(self, timeout_s: float) -> float:
        """A round trip, in seconds. Raises TimedOut, also when the link ends meanwhile."""
        for _ in range(_ASKED_AGAIN):
            if self.closed:
                raise TimedOut(f"the link to {self.remote} has ended")
            number = self._ping()
            waiter = self._waiters[number] = self._loop.create_future()
            due = time.monotonic() + timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    return await waiter
            except TimeoutError:
                # If this very process slept, the answer may be there, unread: that says nothing about the other.
                if time.monotonic() - due < _LATE_S:
                    break
            finally:
                del self._waiters[number]
        raise TimedOut(f"{self.remote} did not answer a ping within {timeout_s:g} s")

    async def close(self) -> None:
        """Send what is queued and end the link; takes a second at most. The handler hears nothing of it."""
        if not self.closed:
            self._ended()
            while pieces := self._connection.data_to_send(_TURN_BYTES):
                self._channel.write(pieces)
                if self._channel.paused:
                    break  # the remote does not read; what is buffered is all it may still get
            self._channel.close()
        await asyncio.shield(self._channel.closed)

    def begin(self, rest: bytes) -> None:
        """Take over the channel; `rest` came behind the handshake."""
        self._channel.sink = self
        self._handler.link_opened(self)
        if not self.closed:
            self._ping()
        if rest:
            self.data_received(rest)

    def lose(self, reason: str) -> None:
        """End the link at once, and tell the handler."""
        if not self.closed:
            self._ended()
            self._channel.abort()
            self._handler.link_lost(self, reason)

    def look(self, now: float, due: float) -> None:
        """The endpoint's heartbeat, on the monotonic clock; `due` is when it should have come."""
        if self._silence is None:
            return
        if self._heard:
            self._losses.heard(self._channel.mishaps, now)
            self._heard = False
        self._recent_rtt.look()
        match self._silence.look(now, due):
            case Verdict.PING:
                self._ping()
            case Verdict.DEAD:
                self.lose(f"{SILENT} for {self._silence.seconds(now):.1f} s")

    # --- the channel's sink ---

    def data_received(self, data: bytes) -> None:
        if self._silence is not None:
            self._silence.heard(time.monotonic())
            self._heard = True
        try:
            if not self.closed:
                for frame in self._connection.receive_data(data):
                    if self.closed:
                        break
                    if frame.type is FrameType.PING:
                        self._pong(frame)
                    elif frame.type is FrameType.PONG:
                        self._answered(frame.body)
                    else:
                        self.used = True
                        self._handler.frame_received(self, frame)
        except ProtocolError as error:
            self.lose(f"protocol error: {error}")

    def writable(self) -> None:
        self._throughput.resumed(time.monotonic())
        if not self._flush_soon:
            self._flush()

    def channel_lost(self, reason: str) -> None:
        if not self.closed:
            self._ended()
            self._handler.link_lost(self, reason)

    # --- inside ---

    def _write(self, most: int) -> int:
        before = self._connection.queued_bytes
        pieces = self._connection.data_to_send(most)
        if pieces:
            self._throughput.wrote(sum(map(len, pieces)))
            self._channel.write(pieces)
        return before - self._connection.queued_bytes

    def _flush(self) -> None:
        self._flush_soon = False
        written = 0
        while not self.closed and not self._channel.paused and self._connection.queued_bytes:
            if written >= _TURN_BYTES:
                self._flush_soon = True
                self._loop.call_soon(self._flush)
                return
            written += self._write(_WRITE_BYTES)
        if self._channel.paused:
            self._throughput.paused(time.monotonic())
        else:
            self._throughput.emptied()

    def _ping(self) -> int:
        self._next_ping += 1
        if len(self._asked) >= _MOST_PINGS:
            del self._asked[next(iter(self._asked))]  # the oldest; it will hardly be answered
        self._asked[self._next_ping] = time.monotonic()
        self._send(Frame(type=FrameType.PING, body=Ping(self._next_ping)))
        return self._next_ping

    def _pong(self, ping: Frame) -> None:
        if self._connection.queued_frames(NO_SESSION) < _MOST_PONGS:
            here = self._coordinates.coordinate.numbers
            self._send(Frame(type=FrameType.PONG, body=Pong(ping.body.number, self._active(), here)))

    def _answered(self, pong: Pong) -> None:
        number = pong.number
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        rtt_s = time.monotonic() - asked
        self.sessions, self.place = pong.sessions, Coordinate.parse(pong.place)
        self._rtts.append(rtt_s)
        self._recent_rtt.answered(rtt_s)
        if self.place is not None:
            # Of the least of the last ones: Ledlie, Gardner, Seltzer 2007, "Network Coordinates in the Wild".
            away = tuple(random.gauss(0, 1) for _ in range(DIMENSIONS))
            self._coordinates.observe(self.place, min(self._rtts), away)
        waiter = self._waiters.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(rtt_s)

    def _ended(self) -> None:
        self.closed, self._silence = True, None
        self._forget(self)
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(TimedOut(f"the link to {self.remote} ended before it answered a ping"))
