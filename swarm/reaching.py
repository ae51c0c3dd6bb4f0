"""A client's ways to its peers: who is dialled, whose dial takes too long, who does not answer.

Owns the dials under way; links themselves are the endpoint's. Which peers are wanted others decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from routing.cost import CLIENT
from routing.errors import TimedOut, Unreachable
from routing.lateness import Dials
from routing.types import PeerId
from swarm.link import SILENT, Link

if TYPE_CHECKING:
    from swarm.client import SwarmClient

log = logging.getLogger(__name__)

PROBES_AT_ONCE = 8
PROBE_S = 3.0


class Reaching:
    def __init__(self, client: SwarmClient):
        self._client = client
        self._dials = Dials()
        self._under_way: dict[PeerId, asyncio.Task[bool]] = {}
        self._silence = False  # was what ended the last link, or dial

    async def probe(self, peers: Iterable[PeerId]) -> None:
        """Dial those that are not linked yet, and note the round trips of all. Links stay: they serve failovers."""
        limit = asyncio.Semaphore(PROBES_AT_ONCE)

        async def measure(peer_id: PeerId) -> None:
            async with limit:
                await self._measure(peer_id)

        await asyncio.gather(*map(measure, peers))

    async def _measure(self, peer_id: PeerId) -> None:
        client = self._client
        try:
            link = client.link(peer_id) or await self._dial(peer_id, PROBE_S)
            client.costs.observe_rtt(CLIENT, peer_id, await link.ping(PROBE_S))
            if link.place is not None:
                client.costs.place(peer_id, link.place)
        except (TimedOut, Unreachable) as error:
            client.health.failed(peer_id, time.monotonic())
            log.info("%s cannot be reached: %s", peer_id, error)

    def late(self) -> frozenset[PeerId]:
        """Those whose dial takes longer than it should, and goes on."""
        return self._dials.late(time.monotonic())

    async def connect(self, peers: Iterable[PeerId], timeout_s: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Make sure of a link to each; returns those that could not be reached, and those that are still being dialled.
        It ends early when a dial turns out to be late, or one that was late before has ended: the caller may have a
        better choice then. Dials go on."""
        unlinked = (peer_id for peer_id in peers if self._client.link(peer_id) is None)
        dials = {peer_id: self._reach_soon(peer_id, timeout_s) for peer_id in unlinked}
        late = self.late()
        others = {self._under_way[peer_id] for peer_id in (late & self._under_way.keys()) - dials.keys()}
        while waiting := {peer_id: task for peer_id, task in dials.items() if not task.done()}:
            if self.late() & waiting.keys() - late or any(task.done() for task in others):
                break
            patience_s = self._dials.next_late_s(waiting, time.monotonic())
            await asyncio.wait(
                [*waiting.values(), *others], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
        lost = frozenset(peer_id for peer_id, task in dials.items() if task.done() and not task.result())
        return lost, frozenset(waiting)

    def _reach_soon(self, peer_id: PeerId, timeout_s: float) -> asyncio.Task[bool]:
        if peer_id not in self._under_way:
            self._under_way[peer_id] = self._client.spawn(self._reach(peer_id, timeout_s))
        return self._under_way[peer_id]

    async def _reach(self, peer_id: PeerId, timeout_s: float) -> bool:
        try:
            await self._dial(peer_id, timeout_s)
        except (TimedOut, Unreachable) as error:
            self._client.health.failed(peer_id, time.monotonic())
            self._silence = isinstance(error, Unreachable) and error.silent
            log.info("%s cannot be reached: %s", peer_id, error)
            return False
        finally:
            del self._under_way[peer_id]
        return True

    async def _dial(self, peer_id: PeerId, timeout_s: float) -> Link:
        self._dials.begins(peer_id, 2 * self._client.costs.link_s(CLIENT, peer_id), time.monotonic())
        reached = False
        try:
            link = await self._client.dial(peer_id, timeout_s)
            reached = True
            return link
        finally:
            self._dials.ends(peer_id, time.monotonic(), reached=reached)

    async def silent_of(self, peers: Iterable[PeerId], timeout_s: float) -> frozenset[PeerId]:
        """Which of these do not answer us now."""

        async def ask(peer_id: PeerId) -> PeerId | None:
            link = self._client.link(peer_id)
            try:
                if link is None:
                    return peer_id
                await link.ping(timeout_s)
            except TimedOut:
                return peer_id
            return None

        answers = await asyncio.gather(*(ask(peer_id) for peer_id in peers))
        return frozenset(peer_id for peer_id in answers if peer_id is not None)

    def link_lost(self, reason: str) -> None:
        self._silence = reason.startswith(SILENT)

    @property
    def offline(self) -> bool:
        """Whether everybody has fallen silent and nobody refused us: most likely this machine's network is gone."""
        return self._silence and not any(self._client.link(record.peer_id) for record in self._client.records())
