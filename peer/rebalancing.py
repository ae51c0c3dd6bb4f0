"""A peer that serves looks now and then whether other blocks need it more, and goes there without anybody noticing.

Owns the order of things: look, lease, load beside the old blocks, look again, switch. Where there is no memory for
both, and others serve each of the old blocks: look, lease, drain, look again, replace. Whether and where is decided in
`routing/rebalancing.py`; how blocks are loaded and sessions handed over is the node's. Whatever fails on the way, the
old blocks are served on.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from peer.spread import AnyBlocks
from routing.errors import BadInput, DaemonFailed, NotEnoughMemory, SwarmError, TimedOut, Unreachable
from routing.rebalancing import Lease, Rebalancer, goes_first, living, may_leave
from routing.types import PeerId, PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply

log = logging.getLogger(__name__)

SETTLE_S = 3.0  # until a lease can be read by all who took one at the same moment
RENEW_S = 15.0
ALARM_S = 2.0  # those that hear that a peer drains look within so long
REST_LOOKS = 5  # that are left out after a move, or after blocks could not be loaded


class Records(Protocol):
    async def refresh(self) -> list[PeerRecord]: ...


class LeaseBook(Protocol):
    async def take(self, span: Span) -> Lease: ...
    async def renew(self, lease: Lease) -> Lease: ...
    async def give_back(self, lease: Lease) -> None: ...
    async def read(self) -> list[Lease]: ...


async def seen(directory: Records, leases: LeaseBook, n_blocks: int) -> tuple[View, list[Lease]]:
    """Who serves what, and who is about to. Raises TimedOut, DaemonFailed."""
    records, held = await asyncio.gather(directory.refresh(), leases.read())
    return apply(View({}, n_blocks), RecordsSeen(records)), held


class Rebalancing:
    def __init__(
        self,
        *,
        me: PeerId,
        n_blocks: int,
        capacity: int,
        directory: Records,
        leases: LeaseBook,
        clock: Callable[[], float],
        load: Callable[[Span], Awaitable[AnyBlocks]],
        switch: Callable[[AnyBlocks], Awaitable[None]],
        replace: Callable[[Span, Callable[[], Awaitable[bool]]], Awaitable[bool]],
        settle_s: float = SETTLE_S,
    ):
        """`clock` is DHT time. `load` brings blocks into memory beside those that are served (NotEnoughMemory: there is
        no room); `switch` serves them instead. `replace` drains first, asks whether it still may, and says whether it
        has; it raises SwarmError only where nothing can be served any more."""
        self._me, self._n_blocks, self._capacity = me, n_blocks, capacity
        self._directory, self._leases, self._clock = directory, leases, clock
        self._load, self._switch, self._replace, self._settle_s = load, switch, replace, settle_s
        self._patience = Rebalancer(me)
        self._resting = 0
        self._alarm = asyncio.Event()

    def heard(self, record: PeerRecord) -> None:
        """A record came to this node: who drains may be the last that serves its blocks, and does not wait for long."""
        if record.state is PeerState.DRAINING and record.peer_id != self._me:
            self._alarm.set()

    async def run(self, every_s: float) -> None:
        """Looks for ever, at times with jitter: peers that see the same gap must not all begin at once. Ends only with
        an error of `replace`."""
        clock = asyncio.get_running_loop().time
        due = clock() + every_s * random.uniform(0.5, 1.5)
        while True:
            rescue = await self._alarmed_before(due)
            if not rescue:
                due = clock() + every_s * random.uniform(0.5, 1.5)
            try:
                await self.look(rescue=rescue)
            except (Unreachable, TimedOut, DaemonFailed, BadInput) as error:
                log.info("whether to move cannot be found out now: %s", error)

    async def _alarmed_before(self, due: float) -> bool:
        try:
            async with asyncio.timeout_at(due):
                await self._alarm.wait()
                self._alarm.clear()
                await asyncio.sleep(random.uniform(0.0, ALARM_S))
        except TimeoutError:
            return False
        return True

    async def look(self, *, rescue: bool = False) -> bool:
        """Whether it has moved. `rescue`: out of turn, for blocks without peers alone. Raises SwarmError if the
        directory cannot be read or written."""
        if self._resting:
            self._resting -= not rescue
            return False
        view, leases = await self._seen()
        move = self._patience.look(view, leases, self._capacity, self._clock(), rescue=rescue)
        if move is None:
            return False
        lease = await self._leases.take(move.span)
        try:
            async with self._renewed(lease):
                await asyncio.sleep(self._settle_s)
                if not await self._still_first(lease):
                    return False
                why = "has nobody to serve it" if move.rescues else "is weak"
                log.info("loading blocks %s: a part of them %s", move.span, why)
                return await self._move(lease)
        finally:
            with suppress(SwarmError):  # then it expires
                await self._leases.give_back(lease)

    async def _move(self, lease: Lease) -> bool:
        try:
            blocks = await self._load(lease.span)
        except NotEnoughMemory as error:
            log.info("%s: the old ones go first, if others serve them", error)
            return await self._drain_first(lease)
        except (SwarmError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's
            log.warning("blocks %s could not be loaded, the old ones are served on: %s", lease.span, error)
            self._resting = REST_LOOKS
            return False
        if not await self._still_first(lease):
            return False
        await self._switch(blocks)
        self._resting = REST_LOOKS
        return True

    async def _drain_first(self, lease: Lease) -> bool:
        async def may() -> bool:
            try:
                view, leases = await self._seen()
            except SwarmError as error:
                log.info("whether the old blocks may be given up cannot be found out: %s", error)
                return False
            return self._is_first(view, leases, lease, drains=True)

        self._resting = REST_LOOKS
        return await may() and await self._replace(lease.span, may)

    async def _still_first(self, lease: Lease) -> bool:
        return self._is_first(*await self._seen(), lease)

    def _is_first(self, view: View, leases: list[Lease], lease: Lease, *, drains: bool = False) -> bool:
        """Whether the lease holds, and nobody is left without blocks by it."""
        now = self._clock()
        held = any(other.peer_id == self._me for other in living(leases, now))
        return held and goes_first(view, lease, leases, now) and may_leave(view, lease, leases, now, drains=drains)

    async def _seen(self) -> tuple[View, list[Lease]]:
        return await seen(self._directory, self._leases, self._n_blocks)

    @asynccontextmanager
    async def _renewed(self, lease: Lease) -> AsyncIterator[None]:
        async def renew() -> None:
            while True:
                await asyncio.sleep(RENEW_S)
                try:
                    await self._leases.renew(lease)
                except SwarmError as error:  # without a lease it will not move
                    log.info("the lease could not be renewed: %s", error)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
