"""Two services of one peer while it moves to other blocks: whose a frame is, and how the former one ends.

Both compute on the same thread and share the endpoint's links. The former service takes no new sessions; those that it
has are handed over like those of a peer that leaves, and it serves them until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable

from peer.service import Service
from routing.types import Span
from swarm.frames import Frame, FrameType
from swarm.link import Link
from swarm.tasks import until_one_ends
from swarm.transport import Endpoint

RETIRE_S = 120.0  # a session that nobody can take over stays: unlike one that leaves, this peer is in no hurry


class Succession:
    """A LinkHandler for a service and, for a while, the one before it."""

    def __init__(self, service: Service):
        self.current = service
        self._former: Service | None = None
        self._changed = asyncio.Event()

    @property
    def services(self) -> list[Service]:
        return [self.current] if self._former is None else [self.current, self._former]

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
        self._whose(frame).frame_received(link, frame)

    def link_lost(self, link: Link, reason: str) -> None:
        for service in self.services:
            service.link_lost(link, reason)

    def _whose(self, frame: Frame) -> Service:
        """By the session. One that is opened anew goes to who has its blocks: a client's view may be older."""
        current, former = self.current, self._former
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
        former, self._former, self.current = self.current, self.current, service
        service.fellows = former.fellows
        service.fellows.append(service)
        service.start(endpoint)
        for link in list(former.links):
            service.link_opened(link)
        self._changed.set()

    async def retire(self) -> None:
        """Hand the former service's sessions over, and end it. Clients that it asked to move them find this peer under
        a new connection: until then they take it for one that leaves."""
        former = self._former
        assert former is not None
        told = _clients(former)
        await former.hand_over(RETIRE_S)
        await former.close()
        self._former = None
        former.fellows.remove(former)
        self._changed.set()
        for link in told - _clients(self.current):
            assert isinstance(link, Link)
            await link.close()

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


def _clients(service: Service) -> set[Hashable]:
    return {session.client for session in service.table.sessions.values() if session.client is not None}
