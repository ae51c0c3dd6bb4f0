"""A peer at work: frames from links go to the session table, its works to the compute thread, its answers back.

Owns the links' side of every session here and the loop of passes. The rule is in `sessions.py` and `seats.py`, the
choice of the next pass in `scheduler.py`, computing in `executor.py`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from peer import devices
from peer.batch import Batch
from peer.blocks import Blocks
from peer.cache import CacheBudget, SeatCache
from peer.capacity import Speed
from peer.effects import Prepare, Reach, Run, Sender, SessionLimits, ToLink, ToPeer
from peer.executor import Executor, PassItem
from peer.scheduler import Scheduler
from peer.seats import Work
from peer.sessions import SessionTable
from routing.errors import BadInput, DeviceLost, Overloaded, ProtocolError, SwarmError, TimedOut, Unreachable
from routing.types import PeerId
from swarm import native
from swarm.codec import decode_rows, encode_rows, loses, row_bytes
from swarm.compute import ComputeThread
from swarm.frames import Codec, Frame, FrameType, HopTiming, Problem
from swarm.link import Link
from swarm.tasks import Tasks
from swarm.transport import Endpoint

log = logging.getLogger(__name__)

TICK_S = 0.25
ACTIVE_S = 2.0  # a session that was heard of within this time will be heard of soon
DIAL_S = 5.0
HAND_OVER_S = 20.0
QUIET_S = 2.0
LOOK_S = 0.05
MOST_PREPARING = 16  # connections that nobody waits for, being made at a time
MOST_QUEUED = 256  # frames for a peer that is being dialled
SMOOTHING = 0.1  # of a new measurement
PREFILL_SHARE = 0.5  # of a decode pass's time: what prefill has between two of them at least
MEASURED_WEIGHTS = 56  # of a small model's eight blocks
TUNE_LATER_S = 1.0  # between two measurements while there is other work


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


class Service:
    def __init__(
        self,
        *,
        me: PeerId,
        blocks: Blocks,
        budget: CacheBudget,
        thread: ComputeThread,
        speed: Speed,
        limits: SessionLimits | None = None,
    ):
        self.me, self.blocks, self.budget = me, blocks, budget
        self.load = Load(speed.decode_s, speed.prefill_s)
        self._lane, self._executor = thread.lane(), Executor(blocks)
        self._scheduler = Scheduler()
        self._prefill: Batch | None = None  # under way
        self._background: Batch | None = None  # under way, too
        self._decode_pass_s = speed.decode_s * len(blocks.span)
        self._endpoint: Endpoint | None = None
        self._tasks = Tasks()
        self._ready = asyncio.Event()
        self._queued: dict[PeerId, deque[Frame]] = {}  # for peers without a link yet
        self._dialling: set[PeerId] = set()
        self._preparing: set[PeerId] = set()
        self._links: set[Link] = set()
        self._acting = False
        self._device_lost: DeviceLost | None = None
        self.passes = 0
        self.fellows = [self]  # all services of this peer, with the same links: of other models, or the one before
        hidden = blocks.shape.hidden
        self.table = SessionTable(
            me=me,
            span=blocks.span,
            make_store=lambda entry, exit: self.blocks.seat(entry, exit, budget),
            row_bytes=lambda codec: row_bytes(codec, hidden),
            admit=self._admit,
            way_to=self._way_to,
            limits=limits or SessionLimits(),
        )

    def start(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tasks.spawn(self._compute())
        self._tasks.spawn(self._tick())
        self._tasks.spawn(self._tune())

    def grow(self, blocks: Blocks) -> None:
        """Serve more blocks behind those that are served: sessions and passes under way go on with what they have."""
        assert blocks.span.start == self.blocks.span.start and blocks.span.end >= self.blocks.span.end
        self.blocks, self._executor, self.table.span = blocks, Executor(blocks), blocks.span

    async def close(self) -> None:
        await self._tasks.close()

    async def hand_over(self, most_s: float = HAND_OVER_S) -> bool:
        """Before the end: until the clients have moved their sessions elsewhere, or nothing is heard of those that they
        cannot move. Whether that was within `most_s`."""
        self.table.leave(time.monotonic())
        self.act()
        for _ in range(round(most_s / LOOK_S)):
            if not self.sessions:
                break
            await asyncio.sleep(LOOK_S)
        return not self.sessions

    def stay(self) -> None:
        """After all."""
        self.table.stay()

    @property
    def sessions(self) -> int:
        """That are used now."""
        return self.table.needed(time.monotonic(), QUIET_S)

    @property
    def waiting(self) -> int:
        """Steps that wait for a pass."""
        return len(self._scheduler)

    @property
    def links(self) -> Collection[Link]:
        """All that are open."""
        return self._links

    @property
    def free_cache_bytes(self) -> int:
        """What sessions may still take: what closed ones left goes first."""
        kept = (store for service in self._sharers for store in service.table.prefixes.stores())
        return self.budget.free_bytes + sum(store.nbytes for store in kept if isinstance(store, SeatCache))

    @property
    def computed_sessions(self) -> int:
        """That are used now, without those that this peer only stands by for."""
        return self.table.needed(time.monotonic(), QUIET_S, standby=False)

    @property
    def _busy(self) -> bool:
        return self._prefill is not None or self._background is not None or len(self._scheduler) > 0

    async def watch(self) -> None:
        """Ends only with an error: a peer that cannot compute any more must not seem to serve. Raises SwarmError."""
        error = await self._tasks.failure()
        if isinstance(error, SwarmError):
            raise error
        raise SwarmError(
            f"this peer cannot go on ({type(error).__name__}: {error})",
            advice="Start it again; --verbose shows where it happened.",
        ) from error

    # -- LinkHandler -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> None:
        self._links.add(link)
        if link.role == "peer":
            for frame in self._queued.pop(link.remote, ()):
                self._send(link, frame)
        link.watched = link.role == "peer" and self._needs(link.remote)

    def frame_received(self, link: Link, frame: Frame) -> None:
        try:
            self.table.receive(frame, Sender(link.remote, link.role, link), time.monotonic())
            self.act()
        except RuntimeError as error:  # torch's: what is answered from a journal lies on the device
            if not self._lose_device(error):
                raise
            self._tasks.spawn(self._give_up())

    def link_lost(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        now = time.monotonic()
        if link.role == "peer":
            self.table.link_lost(link.remote, reason, now)
        else:
            self.table.client_lost(link, now)
        self.act()

    # -- effects ---------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Carry out what the table decided. Frames to ourselves may bring new effects: until none is left."""
        if self._acting:
            return
        self._acting = True
        try:
            while effects := self.table.take_effects():
                for effect in effects:
                    match effect:
                        case ToPeer(peer_id, frame):
                            self._to_peer(peer_id, frame)
                        case ToLink(link, frame):
                            assert isinstance(link, Link)
                            self._send(link, frame)
                        case Run(work):
                            self._scheduler.add(work)
                            self._ready.set()
                        case Reach(peer_id, addresses):
                            self._reach(peer_id, addresses)
                        case Prepare(peer_id, addresses):
                            self._prepare(peer_id, addresses)
        finally:
            self._acting = False

    def _to_peer(self, peer_id: PeerId, frame: Frame) -> None:
        if peer_id == self.me:  # two hops of one route in a row: handed over without the wire
            if isinstance(frame.rows, torch.Tensor) and loses(frame.codec, frame.rows.dtype):
                frame.rows = encode_rows(frame.rows, frame.codec)  # the next hop may be another peer after a loss
            self.table.receive(frame, Sender(self.me, "peer", self.me), time.monotonic())
            return
        link = self._link(peer_id)
        if link is not None:
            self._send(link, frame)
            return
        queue = self._queued.setdefault(peer_id, deque())
        queue.append(frame)
        if len(queue) > MOST_QUEUED:
            self._lost(peer_id, "too many frames wait for the connection")
        elif frame.type not in (FrameType.GAP, FrameType.ACK) and peer_id not in self._dialling:
            # What goes back waits for the hop before to dial; what goes on had a link, and it broke.
            self._lost(peer_id, "no connection")

    def _send(self, link: Link, frame: Frame) -> None:
        try:
            if isinstance(frame.rows, torch.Tensor):
                frame.rows = encode_rows(frame.rows, frame.codec)
            link.send(frame)
        except BadInput as error:
            log.error("a %s frame could not be sent: %s", frame.type.name, error)

    def _link(self, peer_id: PeerId) -> Link | None:
        link = self._endpoint.link(peer_id) if self._endpoint else None
        return None if link is None or link.closed else link

    def _reach(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        if link := self._link(peer_id):
            link.watched = True
        elif peer_id not in self._dialling:
            self._dialling.add(peer_id)
            self._tasks.spawn(self._dial(peer_id, addresses))

    def _prepare(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        if self._link(peer_id) is not None or peer_id in self._dialling | self._preparing:
            return
        if len(self._preparing) < MOST_PREPARING:
            self._preparing.add(peer_id)
            self._tasks.spawn(self._connect_early(peer_id, addresses))

    async def _connect_early(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        """Nothing depends on it: if it fails, it is tried again when it is needed."""
        assert self._endpoint is not None
        try:
            await self._endpoint.connect(peer_id, addresses, DIAL_S)
        except (Unreachable, TimedOut, BadInput) as error:
            log.debug("%s cannot be reached early: %s", peer_id, error)
        finally:
            self._preparing.discard(peer_id)

    async def _dial(self, peer_id: PeerId, addresses: tuple[str, ...]) -> None:
        assert self._endpoint is not None
        try:
            link = await self._endpoint.connect(peer_id, addresses, DIAL_S)
            link.watched = True
        except (Unreachable, TimedOut, BadInput) as error:  # BadInput: no peer's id, or this peer is closing
            self._dialling.discard(peer_id)
            self._lost(peer_id, f"cannot be reached: {error}")
        finally:
            self._dialling.discard(peer_id)

    def _lost(self, peer_id: PeerId, reason: str) -> None:
        self._queued.pop(peer_id, None)
        self.table.link_lost(peer_id, reason, time.monotonic())
        self.act()

    def _needs(self, peer_id: PeerId) -> bool:
        """Whether a session here stands next to that peer."""
        return any(service.stands_next_to(peer_id) for service in self.fellows)

    def stands_next_to(self, peer_id: PeerId) -> bool:
        return any(peer_id == hop.peer_id for session in self.table.sessions.values() for hop in session.places)

    def _way_to(self, peer_id: PeerId) -> tuple[int, int]:
        """Round trip in microseconds, and bytes a second; 0 where not known."""
        link = self._link(peer_id)
        return (int(1e6 * (link.rtt_s or 0)), int(link.bytes_per_s)) if link is not None else (0, 0)

    def _admit(self, layers: int, positions: int) -> bool:
        wanted = layers and positions * self.blocks.shape.position_bytes(layers)
        return self._reclaim(lambda: self.budget.free_bytes >= wanted)

    @property
    def _sharers(self) -> list[Service]:
        """Those whose sessions live of the same memory, this one first."""
        others = [service for service in self.fellows if service is not self and service.budget is self.budget]
        return [self, *others]

    def _reclaim(self, enough: Callable[[], bool]) -> bool:
        """Evict until `enough`: here, then where another model's sessions hold what they do not need now."""
        for service in self._sharers:
            if service.table.reclaim(enough):
                break
        for service in self._sharers[1:]:
            service.act()
        return enough()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.table.tick(time.monotonic())
            self._unwatch()
            self.act()

    def _unwatch(self) -> None:
        """No heartbeats where no session is open."""
        for link in self._links:
            if link.watched and not self._needs(link.remote):
                link.watched = False

    async def _tune(self) -> None:
        """Meanwhile: get the native kernels if they are not there yet, and find out what they are good for here."""
        linears = self.blocks.linears()
        if not linears or not await native.prepare():
            return
        for step in self.blocks.few_rows.measuring(linears[:MEASURED_WEIGHTS]):
            if self._busy:
                await asyncio.sleep(TUNE_LATER_S)
            await self._lane.run(step)

    # -- passes ----------------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        """Turn after turn on the compute thread: a pass of the decode steps that are ready, then prefill until more
        of them come; what only keeps standbys warm while there is neither."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            while await self._turn():
                pass

    async def _turn(self) -> bool:
        """Whether there was anything to do."""
        counts = self.table.counts
        self._hurry()
        steps = self._with_room(self._scheduler.next_decode(self._decode_share()))
        if steps:
            batch = Batch(steps, counts.decode)
            await self._lane.run(self._advance, batch, math.inf)
            self._decode_pass_s += SMOOTHING * (batch.seconds - self._decode_pass_s)
            self._finish(batch)
        if self._prefill is None:
            chunks = self._with_room(self._scheduler.next_prefill())
            self._prefill = Batch(chunks, counts.prefill) if chunks else None
        if self._prefill is not None:
            # Without a share of its own, prefill would never end while many sessions decode.
            least_s = PREFILL_SHARE * self._decode_pass_s if steps else 0.0
            if await self._lane.run(self._advance, self._prefill, least_s):
                batch, self._prefill = self._prefill, None
                self._finish(batch)
            return True
        if steps:
            return True
        if self._background is None:
            works = self._with_room(self._scheduler.next_background())
            self._background = Batch(works, counts.standby) if works else None
        if self._background is None:
            return False
        if await self._lane.run(self._advance, self._background, 0.0):
            batch, self._background = self._background, None
            self._finish(batch)
        return True

    def _hurry(self) -> None:
        """A standby that is called into the route must not wait behind others."""
        self._scheduler.hurry()
        if self._background is not None and self._prefill is None and not self._background.waits:
            self._prefill, self._background = self._background, None

    def _decode_share(self) -> int:
        """How many decode steps one pass takes. In a chain of h hops only one of h groups of sessions can be here at
        a time: taken all in one pass they would stay one lump, and each hop would idle while another computes."""
        now, share = time.monotonic(), 0.0
        for session in self.table.sessions.values():
            if session.route and now - session.heard_at < ACTIVE_S:
                here = sum(hop.peer_id == self.me for hop in session.route)
                share += here / len(session.route)
        return max(1, math.ceil(share))

    def _with_room(self, works: list[Work]) -> list[Work]:
        return [work for work in works if self._make_room(work)]

    def _make_room(self, work: Work) -> bool:
        """Claim memory for the positions to come, taking it from idle sessions if need be."""
        seat = work.seat.store
        assert isinstance(seat, SeatCache)
        if self.budget.claim(seat, work.end):
            return True
        if not work.background:
            self._reclaim(lambda: self.budget.can_hold(seat, work.end))
        if self.budget.claim(seat, work.end):
            return True
        self.table.failed(work, Problem("busy", "no room in the cache"), time.monotonic())
        self.act()
        return False

    def _advance(self, batch: Batch, least_s: float) -> bool:
        """On the compute thread. Left after any block when another service is due, or decode steps wait here and it had
        at least so many seconds; never if these are infinite. Whether the end was reached."""

        def enough(seconds: float) -> bool:
            mine = self._others_wait(batch) and seconds >= least_s
            return mine or (self._lane.gives_way and math.isfinite(least_s))

        try:
            if batch.packed is None:
                batch.begun = time.monotonic()
                batch.items = self._good_input(batch)
                if not batch.items:
                    return True
                batch.packed = self._executor.begin(batch.items)
            if not batch.packed.advance(enough):
                return False
        except (BadInput, Overloaded, RuntimeError, MemoryError) as error:  # RuntimeError: whatever torch cannot do
            log.exception("a pass failed")
            self._lose_device(error)
            for entry in batch.done:
                entry.problem = entry.problem or Problem("failed", f"the pass failed: {error}")
            return True
        result = batch.packed.result
        assert result is not None
        batch.seconds = result.seconds
        for entry, item, finite in zip(batch.running, batch.items, result.finite, strict=True):
            if not finite:
                entry.work.seat.store.truncate(entry.work.start)
                entry.problem = self._not_finite(entry.work, item.hidden)
        return True

    def _lose_device(self, error: Exception) -> bool:
        """Whether it is for want of the device that something failed: then nothing will succeed any more."""
        problem = devices.failure(error, self.blocks.shape.device)
        if isinstance(problem, DeviceLost):
            self._device_lost = problem
        return self._device_lost is not None

    async def _give_up(self) -> None:
        assert self._device_lost is not None
        raise self._device_lost

    def _others_wait(self, batch: Batch) -> bool:
        return self._scheduler.foreground_waits if batch.waits else self._scheduler.decode_waits

    def _not_finite(self, work: Work, hidden: torch.Tensor) -> Problem:
        """Whose fault. What comes in so goes out so: asked before each pass, it would cost all that are well."""
        if torch.isfinite(hidden).all():
            return Problem("nonfinite-output", "the output has values that are not finite")
        edge = (self.table.upstream_of(work), self.me)
        return Problem("nonfinite-input", "the input has values that are not finite", edge)

    def _good_input(self, batch: Batch) -> list[PassItem]:
        """A work whose rows cannot be read is left out; all others run."""
        items = []
        for entry in batch.done:
            try:
                rows = self._rows(entry.work)
            except ProtocolError as error:
                entry.problem = Problem("bad-rows", str(error), (self.table.upstream_of(entry.work), self.me))
            else:
                assert isinstance(entry.work.seat.store, SeatCache)
                long = self.blocks.rotary.is_long(entry.work.seat.session.context)
                items.append(PassItem(entry.work.seat.store, rows, long))
                batch.running.append(entry)
        return items

    def _rows(self, work: Work) -> torch.Tensor:
        first, *more = [self._rows_of(frame) for frame in (work.frame, *work.more)]
        rows = torch.cat([first[work.skip :], *more]) if more else first[work.skip :]
        return rows.to(self.blocks.shape.dtype)

    def _rows_of(self, frame: Frame) -> torch.Tensor:
        rows = frame.rows
        if not isinstance(rows, torch.Tensor):
            rows = decode_rows(rows, Codec(frame.codec), self.blocks.shape.hidden)
        if rows.shape[0] != frame.end - frame.start:
            raise ProtocolError(f"{rows.shape[0]} rows for {frame.end - frame.start} positions")
        return rows

    def _finish(self, batch: Batch) -> None:
        self.passes += 1
        self._learn(batch)
        batch.count()
        now = time.monotonic()
        for entry in batch.done:
            work = entry.work
            if entry.problem is None:
                queue_us = int(1e6 * max(0.0, batch.begun - work.arrived))
                self.table.computed(work, HopTiming(queue_us, int(1e6 * batch.seconds)), now)
            else:
                log.warning("session %s: %s", work.seat.session.id.hex()[:8], entry.problem.message)
                self.table.failed(work, entry.problem, now)
            self.act()
        if self._device_lost is not None:  # their clients know it by now, all others will when the links end
            raise self._device_lost

    def _learn(self, batch: Batch) -> None:
        works = [entry.work for entry in batch.done]
        for work in works:
            if not work.background:
                self.load.waited(max(0.0, batch.begun - work.arrived))
        if not batch.seconds:
            return
        tokens = sum(work.end - work.start for work in works)
        blocks = max(work.seat.exit - work.seat.entry for work in works)
        if tokens == 1:
            self.load.decoded(batch.seconds / blocks)
        elif len(works) == 1 and tokens >= 16:
            self.load.prefilled(batch.seconds / blocks / tokens)
