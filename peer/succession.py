"""Two services of one peer while it moves to other blocks: whose a frame is, and how the former one ends.

Both compute on the same thread and share the endpoint's links. After some seconds the former service takes no new
sessions; those that it has are handed over like those of a peer that leaves, and it serves them until then. Where there
is no memory for both, the former one ends first, and for a while there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable

from peer.effects import ANSWERS, SessionLimits
from peer.service import Service
from routing.types import Span
from swarm.frames import Busy, Frame, FrameType
from swarm.link import Link
from swarm.tasks import until_one_ends
from swarm.transport import Endpoint

LATE_S = 10.0  # a client reads the directory every five seconds or so
RETIRE_S = 120.0  # a session that nobody can take over stays: unlike one that leaves, this peer is in no hurry


class Succession:
    """A LinkHandler for a service and, for a while, the one before it."""

    def __init__(self, service: Service):
        self._current: Service | None = service
        self._former: Service | None = None
        self._fellows: list[Service] = []  # of this peer's other models, while nothing is served here
        self._changed = asyncio.Event()

    @property
    def current(self) -> Service:
        assert self._current is not None, "nothing is served now"
        return self._current

    @property
    def services(self) -> list[Service]:
        return [service for service in (self._current, self._former) if service is not None]

    @property
    def sessions(self) -> int:
        return sum(service.sessions for service in self.services)

    @property
    def computed_sessions(self) -> int:
        return sum(service.computed_sessions for service in self.services)

    # -- LinkHandler -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> None:
        for service in self.services:
            service.link_opened(link)

    def frame_received(self, link: Link, frame: Frame) -> None:
        if self._current is not None:
            self._whose(frame, self._current).frame_received(link, frame)
        elif answer := _away(frame):
            link.send(answer)

    def link_lost(self, link: Link, reason: str) -> None:
        for service in self.services:
            service.link_lost(link, reason)

    def _whose(self, frame: Frame, current: Service) -> Service:
        """By the session. One that is opened anew goes to who has its blocks: a client's view may be older."""
        former = self._former
        if former is None or frame.session in current.table.sessions:
            return current
        if frame.type is FrameType.OPEN:
            mine = [hop for hop in frame.body.route + frame.body.standby if hop.peer_id == current.me]
            spans = [Span(hop.entry, hop.exit) for hop in mine if hop.entry < hop.exit]
            known = frame.session in former.table.sessions
            order = (former, current) if known else (current, former)
            return next((service for service in order if _within(spans, service.blocks.span)), order[0])
        return former if frame.session in former.table.sessions else current

    # -- life ------------------------------------------------------------------------------------------------

    def succeed(self, service: Service, endpoint: Endpoint) -> None:
        """New sessions go to `service` from now on."""
        former, self._former, self._current = self._current, self._current, service
        service.fellows = self._fellows if former is None else former.fellows
        service.fellows.append(service)
        service.start(endpoint)
        for link in endpoint.links:
            service.link_opened(link)
        self._changed.set()

    async def retire(self, late_s: float = LATE_S) -> None:
        """Hand the former service's sessions over, and end it. Before that it takes new ones for `late_s`: who comes
        for the old blocks has not read yet that they are served elsewhere."""
        former = self._former
        assert former is not None
        await asyncio.sleep(late_s)
        told = _clients(former)
        await former.hand_over(RETIRE_S)
        await former.close()
        self._former = None
        former.fellows.remove(former)
        self._changed.set()
        await _close(told - _clients(self.current))

    async def vacate(self, may: Callable[[], Awaitable[bool]]) -> bool:
        """Hand all sessions over and end the only service, so that its memory is free; whoever asks meanwhile is told
        to come again. False if some session stays, or when all are gone it may not do so: then it serves on."""
        service = self.current
        told = _clients(service)
        gone = await service.hand_over(RETIRE_S) and await may()
        if gone:
            self._current, self._fellows = None, service.fellows
            self._fellows.remove(service)
            self._changed.set()
            await service.close()
        else:
            service.stay()
        await _close(told - (frozenset() if gone else _clients(service)))
        return gone

    async def hand_over(self) -> None:
        """Before this peer is left."""
        await asyncio.gather(*(service.hand_over() for service in self.services))

    async def watch(self) -> None:
        """Ends only with an error of one of them. Raises SwarmError."""
        while True:
            self._changed.clear()
            await until_one_ends([*(service.watch() for service in self.services), self._changed.wait()])

    async def close(self) -> None:
        for service in self.services:
            await service.close()


def _within(spans: list[Span], served: Span) -> bool:
    return all(served.start <= span.start and span.end <= served.end for span in spans)


def _away(frame: Frame) -> Frame | None:
    """What is answered while nothing is served."""
    if frame.type is FrameType.OPEN:
        busy = Busy(SessionLimits().retry_after_ms)
        return Frame(type=FrameType.BUSY, session=frame.session, epoch=frame.epoch, body=busy)
    if frame.type in (*ANSWERS, FrameType.CLOSE):
        return None
    return Frame(type=FrameType.UNKNOWN, session=frame.session, epoch=frame.epoch, hop=frame.hop)


async def _close(links: Iterable[Hashable]) -> None:
    """Clients that were asked to move their sessions take this peer for one that leaves until they connect anew."""
    for link in links:
        assert isinstance(link, Link)
        await link.close()


def _clients(service: Service) -> set[Hashable]:
    return {session.client for session in service.table.sessions.values() if session.client is not None}
