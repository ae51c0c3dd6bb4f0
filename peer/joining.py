"""How a newcomer finds its blocks: it chooses by what the swarm lacks, tells so, and looks again a moment later, since
others may have chosen at the same time. Whose choice stands is decided in `routing/joining.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from peer.announcer import Announcer
from peer.rebalancing import LeaseBook, Records
from routing.errors import SwarmError
from routing.joining import Known, going_first, known, must_choose_again
from routing.placement import best_span
from routing.rebalancing import Lease, with_leases
from routing.types import PeerRecord, Span
from routing.view import RecordsSeen, View, apply

log = logging.getLogger(__name__)

SETTLE_S = 1.0  # until what others announced at the same moment can be read; blocks load meanwhile


class Newcomer:
    def __init__(
        self, *, n_blocks: int, capacity: int, directory: Records, leases: LeaseBook, clock: Callable[[], float],
        settle_s: float = SETTLE_S,
    ):  # fmt: skip
        """`clock` is DHT time."""
        self._n_blocks, self._capacity, self._clock = n_blocks, capacity, clock
        self._directory, self._leases, self._settle_s = directory, leases, settle_s
        self._known: Known = frozenset()

    async def choose(self) -> Span:
        """What the swarm lacks most. Raises SwarmError if the directory cannot be read."""
        records, leases = await self._read()
        return self._best(records, leases)

    async def settle(self, announcer: Announcer, span: Span) -> Span:
        """`span` once it is announced, or other blocks where somebody that goes first took some of these as well."""
        try:
            mine = await announcer.announce()
            await asyncio.sleep(self._settle_s)
            records, leases = await self._read()
        except SwarmError as error:
            log.info("whether others chose the same blocks cannot be found out: %s", error)
            return span
        if not must_choose_again(records, mine, self._known):
            return span
        return self._best(going_first(records, mine, self._known), leases)

    async def _read(self) -> tuple[list[PeerRecord], list[Lease]]:
        return await asyncio.gather(self._directory.refresh(), self._leases.read())

    def _best(self, records: Iterable[PeerRecord], leases: list[Lease]) -> Span:
        records = list(records)
        self._known = known(records)
        view = with_leases(apply(View({}, self._n_blocks), RecordsSeen(records)), leases)
        return best_span(view, self._n_blocks, self._capacity, self._clock())
