"""A peer as a node of one swarm: model, span, blocks, sessions, record. What all its nodes share is in `peer.py`.

Slow parts run side by side: p2pd starts while the model is opened; blocks that the owner chose load meanwhile, too.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from peer import devices
from peer.announcer import Announcer
from peer.capacity import Memory, Speed, mean_speed
from peer.choosing import TURN_S, Turn
from peer.config import PeerConfig
from peer.loading import Check, Loader
from peer.outside import Outside
from peer.pipeline import Load
from peer.rebalancing import Rebalancing, seen
from peer.served_model import ServedModel
from peer.service import Service
from peer.spread import AnyBlocks, AnyLoading, names
from peer.succession import Succession
from peer.surroundings import Surroundings
from routing.errors import NotEnoughMemory, StartError, SwarmError
from routing.placement import best_span
from routing.rebalancing import rescue_comes, with_leases
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply
from swarm import manifest as manifests
from swarm.about import ABOUT, About, public_name
from swarm.client import MANIFEST
from swarm.discovery import Directory
from swarm.hive import Hive
from swarm.joincode import JoinCode
from swarm.leases import Leases
from swarm.lending import lend
from swarm.reach import Doorbell
from swarm.tasks import Meanwhile, until_one_ends

if TYPE_CHECKING:
    from peer.peer import Peer

log = logging.getLogger(__name__)

RESCUE_LOOKS, RESCUE_LOOK_S = 120, 1.0  # at who is about to serve its blocks, by a peer that leaves
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a peer tells its owner once it serves a model."""

    model: str
    peer_id: str
    span: Span
    loads: Span  # what it will serve: the same, unless some of it is still to be loaded
    n_blocks: int
    join_code: str
    address: str
    weights_bytes: int
    devices: tuple[str, ...]  # that have blocks; of several, with which
    dtype: str  # that its blocks compute in, and how their weights are quantized
    cache_positions: int
    speed: Speed  # of one block, when it began to serve
    metrics: str | None = None  # the address of the page for Prometheus


class Node:
    """`load`, `make_ready` and `serve`, in this order; what they start ends with the stack that they are given."""

    def __init__(self, config: PeerConfig, peer: Peer):
        self.config, self._peer = config, peer
        self.weights: tuple[int, ...] = (0,) * len(config.devices)  # in bytes on each, once they are loaded
        self._model = ServedModel(config, peer.progress)
        first_s = config.first_s if len(config.devices) == 1 else math.inf  # what lies on several does not grow
        self._loader = Loader(self._begin_loading, self._fetch, self._compute, first_s)
        self._hive: Hive
        self._directory: Directory
        self._leases: Leases
        self._span: Span  # served, or about to be
        self._capacity = 0  # blocks, if it may choose
        self._turn: Turn  # to choose, among newcomers
        self._speed: Speed  # when it began
        self._succession: Succession
        self._announcing: Meanwhile[None]  # that its blocks are about to be served
        self._announcer: Announcer
        self._outside: Outside
        self._surroundings: Surroundings
        self._state = PeerState.JOINING
        self._leaving = False
        self.serving: Serving

    async def run(self) -> None:
        """Keep the record alive until cancelled. Raises SwarmError if the service fails."""
        works = [self._announcer.run(), self._succession.watch(), self._outside.run(), self._surroundings.run()]
        await until_one_ends([*works, self._see_to_blocks()])

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights)

    def weights_with(self, blocks: AnyBlocks) -> tuple[int, ...]:
        """Bytes of `blocks` on each device, with those of the same span that are still to be loaded."""
        first, *others = blocks.bytes_by_device
        return (first + self.pending_bytes, *others)  # with several devices there are none

    @property
    def sessions(self) -> int:
        """Sessions of clients that are used now."""
        return self._succession.sessions

    async def hand_over(self) -> None:
        """No new sessions, and time for the clients to move those that are here; more of it while somebody is about to
        serve blocks that nobody else has."""
        self._leaving = True
        self._state = PeerState.DRAINING
        self._announcer.renew_soon()
        await self._succession.hand_over()
        for _ in range(RESCUE_LOOKS):
            if not self.sessions or not await self._is_rescued():
                break
            await asyncio.sleep(RESCUE_LOOK_S)

    async def _is_rescued(self) -> bool:
        try:
            view, leases = await seen(self._directory, self._leases, self._model.n_blocks)
        except SwarmError as error:
            log.info("whether somebody comes for blocks %s cannot be found out: %s", self._span, error)
            return False
        return rescue_comes(view, self._peer.identity.peer_id, leases, self._hive.dht_time())

    # -- start -----------------------------------------------------------------------------------------------

    async def load(self, stack: AsyncExitStack) -> AnyBlocks:
        """Join or begin the swarm, and load the blocks; p2pd starts while the model is read."""
        blocks = await self._join_and_load(stack)
        self.weights = self.weights_with(blocks)
        # Other models may load for longer than a record lives.
        announcer = Announcer(self._directory, self.record, self.config.renew_s)
        self._announcing = await stack.enter_async_context(Meanwhile(announcer.run()))
        return blocks

    async def _join_and_load(self, stack: AsyncExitStack) -> AnyBlocks:
        join = JoinCode.parse(self.config.join) if self.config.join else None
        if join is None:
            await self._model.open(self._peer.threads[0], others_may_have_it=False)
            return await self._found(stack)
        async with AsyncExitStack() as meanwhile:
            hive = self._peer.hive(join.bootstrap, join.fingerprint)
            starting = await meanwhile.enter_async_context(Meanwhile(hive, Hive.close))
            model, thread, ahead = self._model, self._peer.threads[0], None
            model.fingerprint = join.fingerprint
            here = await model.open(thread, others_may_have_it=True)
            if here and (wanted := self._wanted()) is not None:
                loading = self._loader.first(wanted, model.check)
                ahead = await meanwhile.enter_async_context(Meanwhile(loading))
            self._hive = await starting.result()
            stack.push_async_callback(self._hive.close)
            await model.join(self._hive, join, thread, stack)
            self._open_directory()
            self._span = await self._choose() if ahead is None or wanted is None else wanted
            return await self._load_announced(stack, ahead)

    async def _load_announced(self, stack: AsyncExitStack, ahead: Meanwhile[AnyBlocks] | None) -> AnyBlocks:
        """While the blocks load, others see that they are about to be served: who comes meanwhile takes other ones.
        Those that load `ahead` of the swarm's manifest are compared with it before anybody is served."""
        announcer = Announcer(self._directory, self.record, self.config.renew_s)
        stack.push_async_callback(announcer.leave)  # if it comes to nothing; goodbye is said once
        announcer.renew_soon()
        async with Meanwhile(self._tell_choice(announcer)):
            if ahead is None:
                return await self._loader.first(self._span, self._model.check)
            blocks = await ahead.result()
            await self._model.check_rest()
            return blocks

    async def _tell_choice(self, announcer: Announcer) -> None:
        await self._turn.chosen(self._span)
        await announcer.run()

    async def _found(self, stack: AsyncExitStack) -> AnyBlocks:
        """Begin a swarm."""
        self._span = await self._choose()  # before all of a model is read that does not fit
        await self._model.found()
        async with Meanwhile(self._peer.hive((), self._model.fingerprint), Hive.close) as starting:
            blocks = await self._loader.first(self._span, None)
            self._hive = await starting.result()
        stack.push_async_callback(self._hive.close)
        self._open_directory()
        return blocks

    def _open_directory(self) -> None:
        hive, identity, sequences = self._hive, self._peer.identity, self._peer.sequences
        swarm_id, n_blocks = self._model.fingerprint, self._model.n_blocks
        self._directory = Directory(hive, identity, swarm_id, n_blocks, sequences=sequences)
        self._leases = Leases(hive, identity, swarm_id, sequences)
        self._turn = Turn(n_blocks, Leases(hive, identity, swarm_id, sequences, TURN_S), hive.dht_time)

    async def _choose(self) -> Span:
        """The span asked for, else what the swarm lacks most; a founder knows that nothing is covered yet."""
        if (wanted := self._wanted()) is not None:
            return wanted
        n_blocks, fit = self._model.n_blocks, self._peer.memory(self).blocks_that_fit(self._model.block_bytes())
        self._capacity = min(n_blocks, fit, self.config.most_blocks or fit)
        view, now, decode_s = View({}, n_blocks), 0.0, 0.0
        if self.config.join and self._capacity < n_blocks:
            decode_s = await self._compute(self._model.kept_decode_s)
            leases = await self._turn.come()
            records = await self._directory.refresh()  # not before: who had an earlier turn is in it
            view, now = with_leases(apply(view, RecordsSeen(records)), leases), self._hive.dht_time()
        return best_span(view, n_blocks, self._capacity, now, decode_s=decode_s)

    def _wanted(self) -> Span | None:
        """The span asked for. Raises BadInput (no such blocks), NotEnoughMemory."""
        wanted = self._model.wanted()
        if wanted is not None:
            self._peer.memory(self).check(wanted, self._model.block_bytes())
        return wanted

    async def _fetch(self, span: Span) -> None:
        """The weights of `span` from other peers, where the model is not on this disk."""
        if self._model.is_borrowed:
            await self._model.fetch(span, await self._directory.refresh())

    def _begin_loading(self, span: Span, check: Check | None) -> AnyLoading:
        return self._model.begin_loading(span, check, self._peer.memory(self))

    async def _compute(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """On the first device's compute thread. Raises NotEnoughMemory or DeviceLost for what torch and the system say
        of it."""
        return await self._compute_on(0, partial(work, *args, **kwargs))

    async def _compute_on(self, place: int, work: Callable[[], R]) -> R:
        thread, device = self._peer.threads[place], self.config.devices[place]
        try:
            return await thread.run(work)
        except (RuntimeError, MemoryError, OSError) as error:
            named = await thread.run(devices.failure, error, device)
            if named is None:
                raise
            raise named from error

    async def make_ready(self, blocks: AnyBlocks, stack: AsyncExitStack) -> None:
        """For sessions on `blocks`, before the peer has links."""
        self._speed = await self._measured(blocks)
        self._succession = Succession(self._make_service(blocks, self._speed))
        stack.push_async_callback(self._succession.close)
        self._peer.switchboard.add(self._model.fingerprint, self._succession)

    async def serve(self, stack: AsyncExitStack) -> None:
        """Take sessions, and tell the swarm."""
        hive, peer, service = self._hive, self._peer, self._service
        service.start(peer.endpoint)
        assert self._model.manifest is not None
        manifest = manifests.to_bytes(self._model.manifest)
        await hive.serve_blob(MANIFEST, lambda: manifest)
        bootstrap = tuple(await hive.addresses())
        await lend(hive, self._model.checkpoint)
        about = self._about(bootstrap).to_bytes()
        await hive.serve_blob(ABOUT, lambda: about)
        await Doorbell(hive, self._directory, peer.addresses).serve()
        self._outside = Outside(hive, self._directory, peer.addresses, peer.tell)
        await self._announcing.end()
        self._announcer = Announcer(self._directory, self.record, self.config.renew_s)
        self._state = PeerState.SERVING
        await self._announcer.announce()
        stack.push_async_callback(self._announcer.leave)
        self._surroundings = Surroundings(
            peer.endpoint,
            self._directory,
            self._model.n_blocks,
            span=lambda: self._span,
            clock=hive.dht_time,
            tell=self._announcer.renew_soon,
        )
        hive.daemon.on_restart.append(self._announce_again)
        if peer.metrics is not None:
            served = self._succession
            peer.metrics.watch_service(self.name, self._model.fingerprint, lambda: next(iter(served.services), None))
            peer.metrics.watch_directory(self.name, self._model.fingerprint, self.record, self._announcer, hive)
        code = JoinCode(bootstrap=bootstrap, fingerprint=self._model.fingerprint)
        self.serving = Serving(
            model=self.config.model,
            peer_id=service.me,
            span=service.blocks.span,
            loads=self._span,
            n_blocks=self._model.n_blocks,
            join_code=code.encode(),
            address=", ".join(peer.addresses) or "only through the swarm's own network",
            weights_bytes=self.weights_bytes,
            devices=names(service.blocks),
            dtype=self._model.dtype,
            cache_positions=service.cache_positions,
            speed=self._speed,
            metrics=peer.metrics_url,
        )

    @property
    def name(self) -> str:
        """Of its model, in front of others."""
        return public_name(self.config.model)

    async def _measured(self, blocks: AnyBlocks) -> Speed:
        """Of a block, on each device by itself."""
        speeds = []
        for place, part in zip(blocks.places, blocks.parts, strict=True):
            speeds.append((len(part.span), await self._compute_on(place, partial(self._model.measured, part))))
        return mean_speed(speeds)

    def _make_service(self, blocks: AnyBlocks, speed: Speed) -> Service:
        peer = self._peer
        budget, threads = peer.cache(self, blocks), [peer.threads[place] for place in blocks.places]
        return Service(me=peer.identity.peer_id, blocks=blocks, budget=budget, threads=threads, speed=speed)

    # -- other blocks ----------------------------------------------------------------------------------------

    async def _see_to_blocks(self) -> None:
        """Load the ones that are missing; then look for ever whether others need this peer more, if it may choose."""
        if self._loader.pending_bytes:
            await self._loader.rest(self._grow)
            self._peer.grown(self.config.model, self._span)
        if not self._capacity or not self.config.rebalance_s:
            await asyncio.Event().wait()
        rebalancing = self._rebalancing()
        self._hive.record_policy.on_news.append(rebalancing.heard)
        await rebalancing.run(self.config.rebalance_s)

    def _grow(self, blocks: AnyBlocks) -> None:
        self._service.grow(blocks)
        self._announcer.renew_soon()

    @property
    def pending_bytes(self) -> int:
        """Memory that blocks still to be loaded will take."""
        return self._loader.pending_bytes

    def _rebalancing(self) -> Rebalancing:
        return Rebalancing(
            me=self._peer.identity.peer_id,
            n_blocks=self._model.n_blocks,
            capacity=self._capacity,
            directory=self._directory,
            leases=self._leases,
            clock=self._hive.dht_time,
            load=self._load_beside,
            switch=self._switch,
            replace=self._replace,
        )

    async def _load_beside(self, span: Span) -> AnyBlocks:
        """Off the compute thread, which goes on serving. Raises NotEnoughMemory if both spans do not fit."""
        if not self._fits(span, self._peer.memory(self, taken=self._service_bytes)):
            raise NotEnoughMemory(f"blocks {span} do not fit beside {self._span}")
        return await self._loader.beside(span, self._model.check)

    async def _switch(self, blocks: AnyBlocks) -> None:
        """Serve other blocks, and hand over the sessions that need the old ones."""
        if self._state is not PeerState.SERVING:
            return
        self._succeed(blocks, self._service.load)
        self._peer.moved(self.config.model, blocks.span)
        await self._succession.retire()

    async def _replace(self, span: Span, may: Callable[[], Awaitable[bool]]) -> bool:
        """Where both spans do not fit: hand the sessions over, give up the old blocks, then load; if that fails, the
        old ones again. Whether the new ones are served. Raises StartError if neither can be loaded."""
        load, former, memory = self._service.load, self._span, self._peer.memory(self, freed=self._service_bytes)
        if self._state is not PeerState.SERVING or not self._fits(span, memory):
            return False
        self._tell_state(PeerState.DRAINING, former)
        if not await self._succession.vacate(may):
            if not self._leaving:
                self._tell_state(PeerState.SERVING, former)
            return False
        gc.collect()  # services and their sessions know one another
        problems = []
        for wanted in (span, former):
            self._tell_state(PeerState.JOINING, wanted)
            try:
                self._succeed(await self._loader.beside(wanted, self._model.check), load)
            except (SwarmError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's
                log.warning("blocks %s could not be loaded: %s", wanted, error)
                problems.append(str(error))
                continue
            self._tell_state(PeerState.SERVING, wanted)
            if wanted == span:
                self._peer.moved(self.config.model, span)
            return wanted == span
        raise StartError(f"this peer has no blocks any more: {'; '.join(problems)}", advice="Start it again.")

    def _tell_state(self, state: PeerState, span: Span) -> None:
        self._state, self._span = state, span
        self._announcer.renew_soon()

    def _succeed(self, blocks: AnyBlocks, load: Load) -> None:
        """`load`: of the service before. The machine is the same, and so is a block."""
        speed = Speed(decode={1: load.decode_s}, prefill={1: load.prefill_s})
        service = self._make_service(blocks, speed)
        self._span, self.weights = blocks.span, blocks.bytes_by_device
        self._succession.succeed(service, self._peer.endpoint)
        self._announcer.renew_soon()

    @property
    def _service(self) -> Service:
        return self._succession.current

    @property
    def _service_bytes(self) -> list[int]:
        """On each device: of its weights, and of its sessions where they share no memory with those of other models."""
        blocks, held = self._service.blocks, list(self._service.blocks.bytes_by_device)
        if len(self._peer.nodes) == 1:
            for place, budget in zip(blocks.places, self._service.budget.parts, strict=True):
                held[place] += budget.used_bytes
        return held

    def _fits(self, span: Span, memory: Memory) -> bool:
        try:
            return memory.blocks_that_fit(self._model.block_bytes()) >= len(span)
        except NotEnoughMemory:
            return False

    # -- what others see -------------------------------------------------------------------------------------

    async def _announce_again(self) -> None:
        self._announcer.renew_soon()

    def record(self) -> PeerRecord:
        """This peer as it is now. Until it serves there is no more to tell than who it is, and its blocks."""
        if self._state is PeerState.JOINING or not self._succession.services:
            return PeerRecord(peer_id=self._peer.identity.peer_id, span=self._span, state=self._state)
        service = self._service
        return PeerRecord(
            peer_id=service.me,
            span=service.blocks.span,
            loads=self._span if self.pending_bytes else None,
            state=self._state,
            addresses=self._peer.addresses,
            decode_s=service.load.decode_s,
            prefill_s=service.load.prefill_s,
            queue_s=service.load.queue_s,
            cache_free=service.free_cache_positions,
            cache_total=service.cache_positions,
            place=place if (place := self._peer.endpoint.coordinates.coordinate).known else None,
            dtype=self._model.dtype,
            region=self.config.region.lower(),
            int8_value_s=self._speed.int8_value_s,
        )

    def _about(self, bootstrap: tuple[str, ...]) -> About:
        return About(
            model=self.name,
            family=self._model.family.name,
            n_blocks=self._model.n_blocks,
            dtype=self.config.dtype,
            bootstrap=bootstrap,
        )
