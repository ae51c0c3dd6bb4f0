"""A peer at work: frames from links go to the session table, its works to the compute threads, its answers back.

Owns the links' side of every session here. The rule is in `sessions.py` and `seats.py`, the passes are in
`pipeline.py`, the choice of the next one in `scheduler.py`, computing in `executor.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch

from peer.cache import CacheBudget, SeatCache
from peer.capacity import Speed
from peer.effects import Prepare, Reach, Run, Sender, SessionLimits, ToLink, ToPeer
from peer.pipeline import Load, Pipeline
from peer.seats import SeatStore
from peer.sessions import SessionTable
from peer.spread import AnyBlocks, SpreadBudget, SpreadCache, names, position_bytes, seat_on
from peer.stage import Stage
from routing.errors import BadInput, SwarmError, TimedOut, Unreachable
from routing.types import PeerId
from swarm import native
from swarm.codec import encode_rows, loses, row_bytes
from swarm.compute import ComputeThread
from swarm.frames import Frame, FrameType
from swarm.link import Link
from swarm.tasks import Tasks
from swarm.transport import Endpoint

log = logging.getLogger(__name__)

TICK_S = 0.25
DIAL_S = 5.0
HAND_OVER_S = 20.0
QUIET_S = 2.0
LOOK_S = 0.05
MOST_PREPARING = 16  # connections that nobody waits for, being made at a time
MOST_QUEUED = 256  # frames for a peer that is being dialled
MEASURED_WEIGHTS = 56  # of a small model's eight blocks
TUNE_LATER_S = 1.0  # between two measurements while there is other work


class Service:
    def __init__(
        self,
        *,
        me: PeerId,
        blocks: AnyBlocks,
        budget: CacheBudget | SpreadBudget,
        threads: Sequence[ComputeThread],
        speed: Speed,
        limits: SessionLimits | None = None,
    ):
        """`threads`: of each device that has some of the blocks, in their order."""
        self.me, self.blocks, self.budget = me, blocks, budget
        self._endpoint: Endpoint | None = None
        self._tasks = Tasks()
        self._ready = asyncio.Event()
        self._queued: dict[PeerId, deque[Frame]] = {}  # for peers without a link yet
        self._dialling: set[PeerId] = set()
        self._preparing: set[PeerId] = set()
        self._links: set[Link] = set()
        self._acting = False
        self.fellows = [self]  # all services of this peer, with the same links: of other models, or the one before
        hidden = blocks.shape.hidden
        self.table = SessionTable(
            me=me,
            span=blocks.span,
            make_store=self._make_store,
            row_bytes=lambda codec: row_bytes(codec, hidden),
            admit=self._admit,
            way_to=self._way_to,
            limits=limits or SessionLimits(),
        )
        stages = [
            Stage(part, thread, speed.decode_s * len(part.span), name)
            for part, thread, name in zip(blocks.parts, threads, names(blocks), strict=True)
        ]
        load = Load(speed.decode_s, speed.prefill_s)
        self.pipeline = Pipeline(stages, self.table, load, self._reclaim, self.act)

    def start(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._tasks.spawn(self._tick())
        for stage in self.stages:
            self._tasks.spawn(self.pipeline.run(stage))
            self._tasks.spawn(self._tune(stage))

    def grow(self, blocks: AnyBlocks) -> None:
        """Serve more blocks of one device behind those that are served: sessions and passes under way go on with what
        they have."""
        (stage,), (part,) = self.stages, blocks.parts
        stage.grow(part)
        self.blocks, self.table.span = blocks, blocks.span

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
    def stages(self) -> tuple[Stage, ...]:
        """One for each device that has some of the blocks."""
        return self.pipeline.stages

    @property
    def load(self) -> Load:
        return self.pipeline.load

    @property
    def links(self) -> Collection[Link]:
        """All that are open."""
        return self._links

    @property
    def cache_positions(self) -> int:
        """Of a session that uses all blocks: as many as the device can hold that holds fewest."""
        return self._positions([budget.limit_bytes for budget in self.budget.parts])

    @property
    def free_cache_positions(self) -> int:
        """The same of what sessions may still take: what closed ones left goes first."""
        free = {budget: budget.free_bytes for budget in self.budget.parts}
        for service in self._sharers:
            for store in service.table.prefixes.stores():
                assert isinstance(store, SeatCache | SpreadCache)
                for part in store.parts:
                    if part.budget in free:
                        free[part.budget] += part.nbytes
        return self._positions(list(free.values()))

    def _positions(self, nbytes: Sequence[int]) -> int:
        """Whose keys and values fit in so many bytes of each device."""
        span = self.blocks.span
        costs = position_bytes(self.blocks, span.start, span.end)
        return min(some // cost for some, cost in zip(nbytes, costs, strict=True))

    @property
    def computed_sessions(self) -> int:
        """That are used now, without those that this peer only stands by for."""
        return self.table.needed(time.monotonic(), QUIET_S, standby=False)

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
            lost = self.pipeline.lose(error)
            if lost is None:
                raise
            self._tasks.spawn(_raise(lost))

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
                            self.pipeline.add(work)
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

    def _make_store(self, entry: int, exit: int) -> SeatStore:
        return seat_on(self.blocks, self.budget, entry, exit)

    def _admit(self, spans: Sequence[tuple[int, int]], positions: int) -> bool:
        costs = [position_bytes(self.blocks, entry, exit) for entry, exit in spans]
        wanted = [positions * sum(of_device) for of_device in zip(*costs, strict=True)]
        return self._reclaim(
            lambda: all(budget.free_bytes >= some for budget, some in zip(self.budget.parts, wanted, strict=False))
        )

    @property
    def _sharers(self) -> list[Service]:
        """Those whose sessions live of the same memory, this one first."""
        mine = set(self.budget.parts)
        others = [other for other in self.fellows if other is not self and mine & set(other.budget.parts)]
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

    async def _tune(self, stage: Stage) -> None:
        """Meanwhile: get the native kernels if they are not there yet, and find out what they are good for here."""
        linears = stage.blocks.linears()
        if not linears or not await native.prepare():
            return
        for step in stage.blocks.few_rows.measuring(linears[:MEASURED_WEIGHTS]):
            if stage.busy:
                await asyncio.sleep(TUNE_LATER_S)
            await stage.lane.run(step)


async def _raise(error: SwarmError) -> None:
    raise error
