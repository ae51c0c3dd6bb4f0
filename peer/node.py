"""A peer from start to goodbye: identity, model, span, blocks, links, record. Everything it starts, it ends.

Slow parts run side by side: p2pd starts while the model is opened, blocks load while the directory is read.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peer.announcer import Announcer
from peer.blocks import Blocks, estimated_block_bytes
from peer.borrowed import Borrowed
from peer.cache import CacheBudget
from peer.capacity import Memory, Speed, free_memory, measure
from peer.choosing import TURN_S, Turn
from peer.config import PeerConfig
from peer.cuda import check_device
from peer.measured import measured, setting_of
from peer.outside import Outside
from peer.quantizing import choose
from peer.rebalancing import Rebalancing, seen
from peer.scrape import MetricsServer
from peer.service import Load, Service
from peer.succession import Succession
from routing.errors import BadInput, ModelNotFound, NotEnoughMemory, StartError, SwarmError
from routing.placement import best_span
from routing.reach import Notice
from routing.rebalancing import rescue_comes, with_leases
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply
from swarm import manifest as manifests
from swarm import native
from swarm.about import ABOUT, About, public_name
from swarm.addresses import local_addresses
from swarm.changes import serve_changes
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import MANIFEST, fetch_manifest
from swarm.compute import ComputeThread
from swarm.discovery import Directory, Sequences
from swarm.families import Family, family_of, text_config
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.leases import Leases
from swarm.lending import lend
from swarm.p2pd import refuse_taken_port
from swarm.paths import earlier_peers, free_peer_key, held
from swarm.progress import Progress, silent
from swarm.quantized import NONE
from swarm.reach import Doorbell
from swarm.records import RecordPolicy
from swarm.tasks import until_one_ends
from swarm.transport import Endpoint

if TYPE_CHECKING:
    from peer.metrics import Metrics

log = logging.getLogger(__name__)

JOIN_S = 30.0
RESCUE_LOOKS, RESCUE_LOOK_S = 120, 1.0  # at who is about to serve its blocks, by a peer that leaves


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a peer tells its owner once it serves."""

    peer_id: str
    span: Span
    n_blocks: int
    join_code: str
    address: str
    weights_bytes: int
    dtype: str  # that its blocks compute in, and how their weights are quantized
    cache_positions: int
    speed: Speed  # of one block, when it began to serve
    metrics: str | None = None  # the address of the page for Prometheus


class Node:
    """`async with Node(config) as node:` serves until it is left."""

    def __init__(
        self,
        config: PeerConfig,
        progress: Progress = silent,
        tell: Callable[[Notice], None] | None = None,
        moved: Callable[[Span], None] | None = None,
    ):
        """`tell` is called with what the owner should know of this peer's reachability, `moved` when it serves other
        blocks than before."""
        self.config, self._progress, self._tell, self._moved = config, progress, tell or _nobody, moved or _nobody
        self._stack = AsyncExitStack()
        self._key_path: Path
        self._identity: Identity
        self._thread: ComputeThread
        self._checkpoint: Checkpoint
        self._borrowed: Borrowed | None = None  # where the model is not on this disk
        self._family: Family
        self._n_blocks = 0
        self._quantization = NONE
        self._manifest: manifests.Manifest
        self._fingerprint = b""
        self._hive: Hive
        self._directory: Directory
        self._leases: Leases
        self._span: Span
        self._capacity = 0  # blocks, if it may choose
        self._turn: Turn  # to choose, among newcomers
        self._succession: Succession
        self._announcer: Announcer
        self._outside: Outside
        self._metrics: Metrics | None = None
        self._metrics_url: str | None = None
        self._state = PeerState.JOINING
        self._leaving = False
        self._addresses: tuple[str, ...] = ()
        self.serving: Serving

    async def __aenter__(self) -> Node:
        if self.config.direct and self.config.port:
            refuse_taken_port(self.config.host, self.config.port)  # now, not when all weights are loaded
        check_device(self.config.quantize, self.config.device)
        async with AsyncExitStack() as stack:
            await self._open_metrics(stack)
            self._take_identity(stack)
            native.load()
            thread = ComputeThread(threads=self._threads(), nice=self.config.nice)
            self._thread = await stack.enter_async_context(thread)
            blocks = await self._join_and_load(stack)
            await self._serve(stack, blocks)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Keep the record alive until cancelled. Raises SwarmError if the service fails."""
        works = [self._announcer.run(), self._succession.watch(), self._outside.run()]
        if self._capacity and self.config.rebalance_s:
            rebalancing = self._rebalancing()
            self._hive.record_policy.on_news.append(rebalancing.heard)
            works.append(rebalancing.run(self.config.rebalance_s))
        await until_one_ends(works)

    @property
    def sessions(self) -> int:
        """Sessions of clients that are used now."""
        return self._succession.sessions

    async def hand_over(self) -> None:
        """Before it is left: no new sessions, and time for the clients to move those that are here; more of it while
        somebody is about to serve blocks that nobody else has. `run` goes on meanwhile."""
        self._leaving = True
        if not self.sessions:
            return
        self._state = PeerState.DRAINING
        self._announcer.renew_soon()
        await self._succession.hand_over()
        for _ in range(RESCUE_LOOKS):
            if not self.sessions or not await self._is_rescued():
                break
            await asyncio.sleep(RESCUE_LOOK_S)

    async def _is_rescued(self) -> bool:
        try:
            view, leases = await seen(self._directory, self._leases, self._n_blocks)
        except SwarmError as error:
            log.info("whether somebody comes for blocks %s cannot be found out: %s", self._span, error)
            return False
        return rescue_comes(view, self._identity.peer_id, leases, self._hive.dht_time())

    # -- start -----------------------------------------------------------------------------------------------

    async def _open_metrics(self, stack: AsyncExitStack) -> None:
        """The page is there from the start: a port that is taken is told now, and it outlives what it shows."""
        if self.config.metrics_port is None:
            return
        from peer.metrics import CONTENT_TYPE, Metrics  # whoever wants no metrics need not wait for their library

        self._metrics = Metrics()
        server = MetricsServer(self._metrics.page, CONTENT_TYPE)
        stack.push_async_callback(server.close)
        self._metrics_url = await server.listen(self.config.metrics_host, self.config.metrics_port)

    def _take_identity(self, stack: AsyncExitStack) -> None:
        wanted = self.config.identity_path
        path = stack.enter_context(held(wanted) if wanted else free_peer_key())
        if path is None:
            raise BadInput(f"another process uses the identity {wanted}")
        self._key_path, self._identity = path, Identity.load_or_create(path)

    def _threads(self) -> int | None:
        """Unless the owner says how many: all cores for the first peer on a machine, half of them for the second, a
        third for the third. Nobody gives any back, so n peers have at most 1 + ln n threads a core, not n."""
        config = self.config
        if config.threads is not None or config.identity_path is not None:
            return config.threads
        return max(1, torch.get_num_threads() // (1 + earlier_peers(self._key_path)))

    async def _join_and_load(self, stack: AsyncExitStack) -> Blocks:
        """Join or begin the swarm, and load the blocks; p2pd starts while the model is read."""
        join = JoinCode.parse(self.config.join) if self.config.join else None
        starting = Starting(self._start_hive(join.bootstrap, join.fingerprint)) if join else None
        async with AsyncExitStack() as failed:
            if starting:
                failed.push_async_callback(starting.undo)
            absent = await asyncio.to_thread(self._open_model, join is not None)
            if absent is None:
                await self._choose_quantization()
            if join is None or starting is None:
                return await self._found(stack)
            self._fingerprint = join.fingerprint
            self._hive = await starting.result()
            failed.pop_all()
        stack.push_async_callback(self._hive.close)
        self._manifest = await fetch_manifest(self._hive, join, JOIN_S)
        if absent is not None:
            self._borrowed = Borrowed(self._hive, join, self._manifest, absent)
            self._use(await self._borrowed.open_model(stack))
            await self._choose_quantization()
        self._open_directory()
        self._span = await self._choose()
        return await self._load_announced(stack)

    async def _load_announced(self, stack: AsyncExitStack) -> Blocks:
        """While the blocks load, others see that they are about to be served: who comes meanwhile takes other ones."""
        announcer = Announcer(self._directory, self.record, self.config.renew_s)
        stack.push_async_callback(announcer.leave)  # if it comes to nothing; goodbye is said once
        announcer.renew_soon()
        announcing = asyncio.create_task(self._tell_choice(announcer))
        try:
            await self._fetch(self._span)
            return await self._thread.run(self._load, self._span, self._check)
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    async def _tell_choice(self, announcer: Announcer) -> None:
        await self._turn.chosen(self._span)
        await announcer.run()

    async def _found(self, stack: AsyncExitStack) -> Blocks:
        """Begin a swarm: the whole checkpoint is here, and its manifest names the swarm."""
        self._manifest = await asyncio.to_thread(manifests.build, self._checkpoint, self._progress)
        self._fingerprint = manifests.fingerprint(self._manifest)
        self._span = await self._choose()
        starting = Starting(self._start_hive((), self._fingerprint))
        async with AsyncExitStack() as failed:
            failed.push_async_callback(starting.undo)
            blocks = await self._thread.run(self._load, self._span, None)
            self._hive = await starting.result()
            failed.pop_all()
        stack.push_async_callback(self._hive.close)
        self._open_directory()
        return blocks

    def _open_model(self, others_may_have_it: bool) -> ModelNotFound | None:
        """Why it is not here, where that need not be the end."""
        try:
            self._use(open_checkpoint(self.config.model, progress=self._progress))
        except ModelNotFound as error:
            if not others_may_have_it:
                raise
            return error
        return None

    async def _choose_quantization(self) -> None:
        self._quantization = await choose(self.config, self._checkpoint.config, self._family, self._thread)

    def _use(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._family = family_of(self._checkpoint.config)
        self._n_blocks = self._family.n_blocks(text_config(self._checkpoint.config))

    async def _start_hive(self, bootstrap: Sequence[str], fingerprint: bytes) -> Hive:
        config = self.config
        hive = await Hive.start(
            identity=self._identity,
            bootstrap=bootstrap,
            host=config.host,
            port=config.dht_port,
            record_policy=RecordPolicy(fingerprint),
            startup_timeout_s=config.startup_timeout_s,
            daemon=config.daemon,
        )
        try:
            await serve_changes(hive)  # it stores others' records from now on
        except BaseException:
            await hive.close()
            raise
        return hive

    def _open_directory(self) -> None:
        sequences = Sequences.beside(self._key_path)
        hive, identity, swarm_id = self._hive, self._identity, self._fingerprint
        self._directory = Directory(hive, identity, swarm_id, self._n_blocks, sequences=sequences)
        self._leases = Leases(hive, identity, swarm_id, sequences)
        self._turn = Turn(self._n_blocks, Leases(hive, identity, swarm_id, sequences, TURN_S), hive.dht_time)

    async def _choose(self) -> Span:
        """The span asked for, else what the swarm lacks most; a founder knows that nothing is covered yet."""
        wanted = self.config.blocks
        if wanted is not None:
            if wanted.end > self._n_blocks:
                raise BadInput(f"there are no blocks {wanted}: the model has {self._n_blocks}")
            self._memory().check(wanted, self._block_bytes())
            return wanted
        fit = self._memory().blocks_that_fit(self._block_bytes())
        self._capacity = min(self._n_blocks, fit, self.config.most_blocks or fit)
        view, now = View({}, self._n_blocks), 0.0
        if self.config.join and self._capacity < self._n_blocks:
            leases = await self._turn.come()
            records = await self._directory.refresh()  # not before: who had an earlier turn is in it
            view, now = with_leases(apply(view, RecordsSeen(records)), leases), self._hive.dht_time()
        return best_span(view, self._n_blocks, self._capacity, now)

    def _block_bytes(self) -> int:
        """Of the greatest of some blocks, in memory."""
        config, some = self._checkpoint.config, range(0, self._n_blocks, max(1, self._n_blocks // 4))
        dtype, quantization = self.config.torch_dtype, self._quantization
        return max(estimated_block_bytes(config, self._family, i, dtype, quantization) for i in some)

    def _memory(self, taken_bytes: int = 0, freed_bytes: int = 0) -> Memory:
        """`taken_bytes`: of the owner's limit. `freed_bytes`: of what is in use now, and will not be then."""
        config, limit = self.config, self.config.max_memory_bytes
        return Memory(
            free_bytes=free_memory(config.device) + freed_bytes,
            limit_bytes=None if limit is None else max(0, limit - taken_bytes),
            cache_bytes=config.cache_bytes,
        )

    async def _fetch(self, span: Span) -> None:
        """The weights of `span` from other peers, where the model is not on this disk."""
        if self._borrowed is not None:
            records = await self._directory.refresh()
            await self._borrowed.fetch(self._checkpoint, self._family, span, records, self._progress)

    def _check(self, names: Sequence[str]) -> None:
        """Tensors of a swarm that was joined must be those of its manifest; a founder's have just made it."""
        manifests.check(self._checkpoint, names, self._manifest)

    def _load(self, span: Span, check: Callable[[Sequence[str]], None] | None) -> Blocks:
        config = self.config
        return Blocks.load(
            self._checkpoint,
            self._family,
            span,
            config.torch_dtype,
            config.device,
            self._progress,
            quantization=self._quantization,
            check=check,
        )

    async def _serve(self, stack: AsyncExitStack, blocks: Blocks) -> None:
        config, hive, peer_id = self.config, self._hive, self._identity.peer_id
        speed = await self._thread.run(self._measured, blocks)
        self._succession = Succession(self._make_service(blocks, speed))
        stack.push_async_callback(self._succession.close)
        endpoint = self._endpoint = Endpoint(
            identity=self._identity,
            role="peer",
            handler=self._succession,
            heartbeat=config.heartbeat,
            streams=hive,
            direct=config.direct,
            active=lambda: self._succession.computed_sessions,
        )
        await stack.enter_async_context(endpoint)
        if config.direct:
            listening = await endpoint.listen(config.host, config.port)
            self._addresses = config.announce or local_addresses(listening)
        self._service.start(endpoint)
        manifest = manifests.to_bytes(self._manifest)
        await hive.serve_blob(MANIFEST, lambda: manifest)
        bootstrap = tuple(await hive.addresses())
        await lend(hive, self._checkpoint)
        about = self._about(bootstrap).to_bytes()
        await hive.serve_blob(ABOUT, lambda: about)
        await Doorbell(hive, self._directory, self._addresses).serve()
        self._outside = Outside(hive, self._directory, self._addresses, self._tell)
        self._announcer = Announcer(self._directory, self.record, config.renew_s)
        self._state = PeerState.SERVING
        await self._announcer.announce()
        stack.push_async_callback(self._announcer.leave)
        hive.on_restart.append(self._announce_again)
        if self._metrics is not None:
            self._metrics.watch_service(self._service, endpoint.traffic)
            self._metrics.watch_directory(self.record, self._announcer, hive)
        code = JoinCode(bootstrap=bootstrap, fingerprint=self._fingerprint)
        self.serving = Serving(
            peer_id=peer_id,
            span=self._span,
            n_blocks=self._n_blocks,
            join_code=code.encode(),
            address=", ".join(self._addresses) or "only through the swarm's own network",
            weights_bytes=blocks.nbytes,
            dtype=self._dtype,
            cache_positions=self._positions(self._service.budget.limit_bytes),
            speed=speed,
            metrics=self._metrics_url,
        )

    @property
    def _dtype(self) -> str:
        """As records state it."""
        return self.config.dtype if self._quantization == NONE else f"{self.config.dtype}/{self._quantization}"

    def _measured(self, blocks: Blocks) -> Speed:
        setting = setting_of(blocks, self._fingerprint, self._dtype)
        return measured(blocks, setting, self._checkpoint.cache_dir / "measured", measure)

    def _make_service(self, blocks: Blocks, speed: Speed) -> Service:
        budget = CacheBudget(self._memory().for_cache(blocks.nbytes))
        return Service(me=self._identity.peer_id, blocks=blocks, budget=budget, thread=self._thread, speed=speed)

    # -- other blocks ----------------------------------------------------------------------------------------

    def _rebalancing(self) -> Rebalancing:
        return Rebalancing(
            me=self._identity.peer_id,
            n_blocks=self._n_blocks,
            capacity=self._capacity,
            directory=self._directory,
            leases=self._leases,
            clock=self._hive.dht_time,
            load=self._load_beside,
            switch=self._switch,
            replace=self._replace,
        )

    async def _load_beside(self, span: Span) -> Blocks:
        """Off the compute thread, which goes on serving. Raises NotEnoughMemory if both spans do not fit."""
        if not self._fits(span, self._memory(self._service_bytes)):
            raise NotEnoughMemory(f"blocks {span} do not fit beside {self._span}")
        return await self._load_aside(span)

    async def _load_aside(self, span: Span) -> Blocks:
        await self._fetch(span)
        return await asyncio.to_thread(self._load, span, self._check)

    async def _switch(self, blocks: Blocks) -> None:
        """Serve other blocks, and hand over the sessions that need the old ones."""
        if self._state is not PeerState.SERVING:
            return
        self._succeed(blocks, self._service.load)
        self._moved(blocks.span)
        await self._succession.retire()

    async def _replace(self, span: Span, may: Callable[[], Awaitable[bool]]) -> bool:
        """Where both spans do not fit: hand the sessions over, give up the old blocks, then load; if that fails, the
        old ones again. Whether the new ones are served. Raises StartError if neither can be loaded."""
        load, former = self._service.load, self._span
        if self._state is not PeerState.SERVING or not self._fits(span, self._memory(freed_bytes=self._service_bytes)):
            return False
        self._tell_state(PeerState.DRAINING, former)
        if not await self._succession.vacate(may):
            if not self._leaving:
                self._tell_state(PeerState.SERVING, former)
            return False
        if self._metrics is not None:
            self._metrics.forget_service()
        gc.collect()  # services and their sessions know one another
        problems = []
        for wanted in (span, former):
            self._tell_state(PeerState.JOINING, wanted)
            try:
                self._succeed(await self._load_aside(wanted), load)
            except (SwarmError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's
                log.warning("blocks %s could not be loaded: %s", wanted, error)
                problems.append(str(error))
                continue
            self._tell_state(PeerState.SERVING, wanted)
            if wanted == span:
                self._moved(span)
            return wanted == span
        raise StartError(f"this peer has no blocks any more: {'; '.join(problems)}", advice="Start it again.")

    def _tell_state(self, state: PeerState, span: Span) -> None:
        self._state, self._span = state, span
        self._announcer.renew_soon()

    def _succeed(self, blocks: Blocks, load: Load) -> None:
        """`load`: of the service before. The machine is the same, and so is a block."""
        speed = Speed(decode={1: load.decode_s}, prefill={1: load.prefill_s})
        service = self._make_service(blocks, speed)
        self._span = blocks.span
        self._succession.succeed(service, self._endpoint)
        if self._metrics is not None:
            self._metrics.watch_service(service, self._endpoint.traffic)
        self._announcer.renew_soon()

    @property
    def _service(self) -> Service:
        return self._succession.current

    @property
    def _service_bytes(self) -> int:
        """Of its weights and its sessions."""
        return self._service.blocks.nbytes + self._service.budget.used_bytes

    def _fits(self, span: Span, memory: Memory) -> bool:
        try:
            return memory.blocks_that_fit(self._block_bytes()) >= len(span)
        except NotEnoughMemory:
            return False

    # -- what others see -------------------------------------------------------------------------------------

    async def _announce_again(self) -> None:
        self._announcer.renew_soon()

    def record(self) -> PeerRecord:
        """This peer as it is now. Until it serves there is no more to tell than who it is, and its blocks."""
        if self._state is PeerState.JOINING:
            return PeerRecord(peer_id=self._identity.peer_id, span=self._span, state=self._state)
        service = self._service
        return PeerRecord(
            peer_id=service.me,
            span=self._span,
            state=self._state,
            addresses=self._addresses,
            decode_s=service.load.decode_s,
            prefill_s=service.load.prefill_s,
            queue_s=service.load.queue_s,
            cache_free=self._positions(service.free_cache_bytes),
            cache_total=self._positions(service.budget.limit_bytes),
            place=place if (place := self._endpoint.coordinates.coordinate).known else None,
            dtype=self._dtype,
            region=self.config.region.lower(),
        )

    def _about(self, bootstrap: tuple[str, ...]) -> About:
        return About(
            model=public_name(self.config.model),
            family=self._family.name,
            n_blocks=self._n_blocks,
            dtype=self.config.dtype,
            bootstrap=bootstrap,
        )

    def _positions(self, nbytes: int) -> int:
        return nbytes // self._service.blocks.shape.position_bytes(len(self._span))


def _nobody(_: object) -> None:
    pass


class Starting:
    """A hive that starts meanwhile. Unless its result is taken, `undo` leaves nothing of it."""

    def __init__(self, work: Coroutine[Any, Any, Hive]):
        self._task = asyncio.create_task(work)

    async def result(self) -> Hive:
        return await self._task

    async def undo(self) -> None:
        self._task.cancel()
        for hive in await asyncio.gather(self._task, return_exceptions=True):
            if isinstance(hive, Hive):
                await hive.close()
