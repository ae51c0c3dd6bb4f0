"""Newcomers choose their blocks one after the other, so that those that start together do not all fill the same gap.

Owns one newcomer's turn: a lease of all blocks while it chooses, then of those that it chose until others can see its
record. Whose turn comes first is decided in `routing/rebalancing.py`. It is worth a moment and no more: leases end
soon, and where none can be stored a newcomer chooses without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from peer.rebalancing import LeaseBook
from routing.errors import SwarmError
from routing.rebalancing import Lease, living, may_choose
from routing.types import Span

log = logging.getLogger(__name__)

TURN_S = 10.0  # of a lease: nobody waits for longer
LOOK_S = 0.05


class Turn:
    """Of one newcomer in a swarm of `n_blocks` blocks. Its `leases` live for `TURN_S`; `clock` is DHT time."""

    def __init__(self, n_blocks: int, leases: LeaseBook, clock: Callable[[], float]):
        self._n_blocks, self._leases, self._clock = n_blocks, leases, clock
        self._mine: Lease | None = None

    async def come(self) -> list[Lease]:
        """Waits for it. The leases that live then: who chose before is in them, or in the directory from now on. Raises
        TimedOut, DaemonFailed."""
        try:
            self._mine = await self._leases.take(Span(0, self._n_blocks))
        except SwarmError as error:
            log.info("choosing blocks out of turn: %s", error)
        while True:
            leases, now = await self._leases.read(), self._clock()
            if self._mine is None or may_choose(self._mine, leases, self._n_blocks, now):
                return living(leases, now)
            await asyncio.sleep(LOOK_S)

    async def chosen(self, span: Span) -> None:
        """The next one may choose."""
        if self._mine is not None:
            with suppress(SwarmError):  # it expires
                await self._leases.renew(replace(self._mine, span=span))
