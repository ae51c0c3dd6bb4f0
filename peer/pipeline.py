"""Owns the passes of a service: which comes next on each device, where it goes on, and what is learned from it.

A device is a stage (`stage.py`) with turns of its own, so that while one computes the second half of some sessions'
steps the one before begins with others'. What a pass is, is `batch.py`'s and `executor.py`'s; what may be computed at
all, the session table's.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peer.batch import Batch, by_exit, cache_of
from peer.seats import Work
from peer.sessions import SessionTable
from peer.stage import Kind, Stage
from routing.errors import DeviceLost
from swarm.frames import HopTiming, Problem

log = logging.getLogger(__name__)

ACTIVE_S = 2.0  # a session that was heard of within this time will be heard of soon
SMOOTHING = 0.1  # of a new measurement
PREFILL_SHARE = 0.5  # of a decode pass's time: what prefill has between two of them at least


@dataclass(slots=True)
class Load:
    """Running means, in seconds."""

    decode_s: float  # one token through one block
    prefill_s: float  # one token of a chunk through one block
    queue_s: float = 0.0  # between a work's arrival and its pass

    def decoded(self, per_block_s: float) -> None:
        self.decode_s += SMOOTHING * (per_block_s - self.decode_s)

    def prefilled(self, per_token_block_s: float) -> None:
        self.prefill_s += SMOOTHING * (per_token_block_s - self.prefill_s)

    def waited(self, seconds: float) -> None:
        self.queue_s += SMOOTHING * (seconds - self.queue_s)


class Pipeline:
    def __init__(
        self,
        stages: Sequence[Stage],
        table: SessionTable,
        load: Load,
        reclaim: Callable[[Callable[[], bool]], bool],
        act: Callable[[], None],
    ):
        """`reclaim(enough)` evicts until there is enough room, and says whether there is; `act` carries out what the
        table has decided."""
        self.stages, self.load = tuple(stages), load
        self._table, self._reclaim, self._act = table, reclaim, act
        self.passes = 0
        for index, stage in enumerate(self.stages):
            stage.later = self.stages[index + 1 :]

    def add(self, work: Work) -> None:
        stage = next(stage for stage in self.stages if work.seat.entry in stage.blocks.span)
        stage.scheduler.add(work)
        stage.ready.set()

    @property
    def waiting(self) -> int:
        """Steps that wait for a pass."""
        return sum(len(stage.scheduler) for stage in self.stages)

    def lose(self, error: Exception) -> DeviceLost | None:
        """What is to be said of the device for want of which something failed, if that is why."""
        return next((stage.lost for stage in self.stages if stage.lose(error)), None)

    async def run(self, stage: Stage) -> None:
        """Turn after turn on its compute thread: a pass of the decode steps that are ready, then prefill until more
        of them come; what only keeps standbys warm while there is neither. Raises DeviceLost."""
        while True:
            await stage.ready.wait()
            stage.ready.clear()
            while await self._turn(stage):
                pass

    async def _turn(self, stage: Stage) -> bool:
        """Whether there was anything to do."""
        stage.hurry()
        self._take(stage, Kind.DECODE)
        decoding = len(stage.here[Kind.DECODE])  # what comes meanwhile has the next turn
        for _ in range(decoding):
            await self._advance(stage, Kind.DECODE, math.inf)
        self._take(stage, Kind.PREFILL)
        if stage.here[Kind.PREFILL]:
            # Without a share of its own, prefill would never end while many sessions decode.
            await self._advance(stage, Kind.PREFILL, PREFILL_SHARE * stage.decode_pass_s if decoding else 0.0)
            return True
        if decoding:
            return True
        self._take(stage, Kind.STANDBY)
        if not stage.here[Kind.STANDBY]:
            return False
        await self._advance(stage, Kind.STANDBY, 0.0)
        return True

    def _take(self, stage: Stage, kind: Kind) -> None:
        """Works that wait at the stage become batches; of prefill one set after the other."""
        scheduler, counts, here = stage.scheduler, self._table.counts, stage.here[kind]
        if not stage.may_begin(kind) or (here and any(batch.at == 0 for batch in here)):
            return
        if kind is Kind.DECODE:
            works = scheduler.next_decode(self._decode_share()) if scheduler.decode_waits else []
            passes = counts.decode
        elif kind is Kind.PREFILL:
            works, passes = scheduler.next_prefill(), counts.prefill
        else:
            works, passes = scheduler.next_background(), counts.standby
        if works := [work for work in works if self._make_room(work)]:
            here += [Batch(some, passes) for some in (by_exit(works) if stage.later else (works,))]

    async def _advance(self, stage: Stage, kind: Kind, least_s: float) -> None:
        """The first batch of a kind, which goes on when it is through these blocks."""
        here = stage.here[kind]
        batch, before_s = here[0], here[0].seconds
        if not await stage.lane.run(stage.advance, batch, least_s):
            return
        if kind is Kind.DECODE:
            stage.decode_pass_s += SMOOTHING * (batch.seconds - before_s - stage.decode_pass_s)
        here.popleft()
        self._wake_before(stage)
        if batch.go_on(time.monotonic()):
            after = stage.later[0]
            after.here[kind].append(batch)
            after.ready.set()
        else:
            self._finish(batch)
        if stage.lost is not None:  # their clients know it by now, all others will when the links end
            raise stage.lost

    def _wake_before(self, stage: Stage) -> None:
        """There is less here now, and that may be what they wait for."""
        for other in self.stages:
            if stage in other.later:
                other.ready.set()

    def _decode_share(self) -> int:
        """How many decode steps one pass takes. In a chain of h hops only one of h groups of sessions can be here at
        a time: taken all in one pass they would stay one lump, and each hop would idle while another computes. So would
        each device of a hop that has several."""
        now, me, share, several = time.monotonic(), self._table.me, 0.0, len(self.stages) > 1
        for session in self._table.sessions.values():
            if session.route and now - session.heard_at < ACTIVE_S:
                here, more = sum(hop.peer_id == me for hop in session.route), 0
                if several:
                    mine = [hop for hop in session.route if hop.peer_id == me]
                    more = sum(self._devices(hop.entry, hop.exit) - 1 for hop in mine)
                share += here / (len(session.route) + more)
        return max(1, math.ceil(share))

    def _devices(self, entry: int, exit: int) -> int:
        """That have some of these blocks."""
        return sum(stage.blocks.span.start < exit and entry < stage.blocks.span.end for stage in self.stages)

    def _make_room(self, work: Work) -> bool:
        """Claim memory for the positions to come, taking it from idle sessions if need be."""
        cache = cache_of(work)
        if cache.claim(work.end):
            return True
        if not work.background:
            self._reclaim(lambda: cache.can_hold(work.end))
        if cache.claim(work.end):
            return True
        self._table.failed(work, Problem("busy", "no room in the cache"), time.monotonic())
        self._act()
        return False

    def _finish(self, batch: Batch) -> None:
        self.passes += 1
        self._learn(batch)
        batch.count()
        now = time.monotonic()
        for entry in batch.done:
            work = entry.work
            if entry.problem is None:
                timing = HopTiming(int(1e6 * batch.queued_s(work)), int(1e6 * batch.seconds))
                self._table.computed(work, timing, now)
            else:
                log.warning("session %s: %s", work.seat.session.id.hex()[:8], entry.problem.message)
                cache_of(work).truncate(work.start)  # nothing of it stays, on none of the devices
                self._table.failed(work, entry.problem, now)
            self._act()

    def _learn(self, batch: Batch) -> None:
        works = [entry.work for entry in batch.done]
        for work in works:
            if not work.background:
                self.load.waited(batch.queued_s(work))
        if not batch.seconds:
            return
        tokens = sum(work.end - work.start for work in works)
        blocks = max(work.seat.exit - work.seat.entry for work in works)
        if tokens == 1:
            self.load.decoded(batch.seconds / blocks)
        elif len(works) == 1 and tokens >= 16:
            self.load.prefilled(batch.seconds / blocks / tokens)
