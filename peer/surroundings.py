"""Learns where this peer is in the network before any session comes: else nobody could tell what a way to it takes.

Owns when it looks and for how long. Whom it asks is in `routing/neighbours.py`, what a round trip says of the place in
`routing/coordinates.py`: the endpoint's links see to that whenever they are pinged. Nothing waits for it. How much a
way carries is not measured: that takes bulk, which sessions bring.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from peer.rebalancing import Records
from routing.errors import BadInput, SwarmError, TimedOut, Unreachable
from routing.neighbours import neighbours
from routing.types import PeerRecord, Span
from routing.view import RecordsSeen, View, apply
from swarm.link import Link
from swarm.transport import Endpoint

log = logging.getLogger(__name__)

SOON_S = 1.0  # to the first look
AGAIN_S, RARER, EVERY_S = 20.0, 1.3, 600.0  # to the next, longer each time: the more ways, the truer the places
JITTER = (0.5, 1.5)  # peers that started together do not ask together
LOOK_S = 10.0  # at most
DIAL_S, PING_S = 3.0, 2.0
PINGS, APART_S = 4, 0.05  # of each, while the place is not known; later one, or the last few ways would count for all


class Surroundings:
    """Of a peer in one swarm."""

    def __init__(
        self,
        endpoint: Endpoint,
        directory: Records,
        n_blocks: int,
        span: Callable[[], Span],
        clock: Callable[[], float],
        tell: Callable[[], None],
        chance: random.Random | None = None,
    ):
        """`span`: what is served now; `clock`: DHT time. `tell` is called once the place is known."""
        self._endpoint, self._directory, self._n_blocks = endpoint, directory, n_blocks
        self._span, self._clock, self._tell = span, clock, tell
        self._chance = chance or random.Random()
        self._dialled: list[Link] = []  # for this alone, and still open

    @property
    def known(self) -> bool:
        return self._endpoint.coordinates.coordinate.known

    async def run(self) -> None:
        """For ever."""
        pause_s, next_s = SOON_S, AGAIN_S
        while True:
            await asyncio.sleep(pause_s * self._chance.uniform(*JITTER))
            before = self.known
            try:
                await self.look()
            except SwarmError as error:  # whatever it is: a peer must not end for this
                log.info("the ways to others cannot be measured now: %s", error)
            if self.known and not before:
                self._tell()
            pause_s, next_s = next_s, min(RARER * next_s, EVERY_S)

    async def look(self) -> None:
        """Measure the ways to a few others now. Raises SwarmError if the directory cannot be read.

        The links of the last look end if nobody used them since. Not sooner: the other end may have begun to.
        """
        await self._close_unused()
        view = apply(View({}, self._n_blocks), RecordsSeen(await self._directory.refresh()))
        chosen = neighbours(view, self._endpoint.peer_id, self._span(), self._clock(), self._chance)
        pings = 1 if self.known else PINGS
        try:
            async with asyncio.timeout(LOOK_S):
                await asyncio.gather(*(self._measure(record, pings) for record in chosen))
        except TimeoutError:
            log.info("measuring the ways to others took longer than %g s", LOOK_S)

    async def _measure(self, record: PeerRecord, pings: int) -> None:
        linked = self._endpoint.link(record.peer_id) is not None
        try:
            link = await self._endpoint.connect(record.peer_id, record.addresses, DIAL_S)
        except (Unreachable, BadInput) as error:  # BadInput: this peer is closing
            log.info("the way to %s cannot be measured: %s", record.peer_id, error)
            return
        if not linked:
            self._dialled.append(link)
        try:
            for _ in range(pings):
                await link.ping(PING_S)
                await asyncio.sleep(APART_S)
        except TimedOut as error:
            log.info("%s", error)

    async def _close_unused(self) -> None:
        dialled, self._dialled = self._dialled, []
        await asyncio.gather(*(link.close() for link in dialled if not (link.used or link.watched)))
