"""A peer from start to goodbye: identity, model, span, blocks, links, record. Everything it starts, it ends.

Slow parts run side by side: p2pd starts while the model is opened, blocks load while the directory is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from peer.announcer import Announcer
from peer.blocks import Blocks, estimated_block_bytes
from peer.cache import CacheBudget
from peer.capacity import blocks_that_fit, free_memory, measure
from peer.config import PeerConfig
from peer.service import Service
from routing.errors import BadInput
from routing.placement import least_covered_span
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordSeen, View, apply
from swarm import manifest as manifests
from swarm.addresses import local_addresses
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import MANIFEST, fetch_manifest
from swarm.compute import ComputeThread
from swarm.discovery import Directory, Sequences
from swarm.families import Family, family_of, text_config
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.paths import free_peer_key, held
from swarm.progress import Progress, silent
from swarm.records import RecordPolicy
from swarm.transport import Endpoint

log = logging.getLogger(__name__)

JOIN_S = 30.0
CACHE_SHARE = 0.5  # of the memory that is free once the blocks are loaded


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a peer tells its owner once it serves."""

    peer_id: str
    span: Span
    n_blocks: int
    join_code: str
    address: str
    weights_bytes: int
    cache_positions: int


class Node:
    """`async with Node(config) as node:` serves until it is left."""

    def __init__(self, config: PeerConfig, progress: Progress = silent):
        self.config, self._progress = config, progress
        self._stack = AsyncExitStack()
        self._service: Service
        self._announcer: Announcer
        self._span: Span
        self._state = PeerState.JOINING
        self._addresses: tuple[str, ...] = ()
        self.serving: Serving

    async def __aenter__(self) -> Node:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Keep the record alive until cancelled."""
        await self._announcer.run()

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self.config
        path = stack.enter_context(held(config.identity_path) if config.identity_path else free_peer_key())
        if path is None:
            raise BadInput(f"another process uses the identity {config.identity_path}")
        identity = await asyncio.to_thread(Identity.load_or_create, path)
        thread = await stack.enter_async_context(ComputeThread(threads=config.threads))
        join = JoinCode.parse(config.join) if config.join else None
        hive_task = asyncio.create_task(self._start_hive(identity, join)) if join else None
        try:
            checkpoint = await asyncio.to_thread(open_checkpoint, config.model, progress=self._progress)
            family = family_of(checkpoint.config)
            if join is None or hive_task is None:
                manifest = await asyncio.to_thread(manifests.build, checkpoint, self._progress)
                fingerprint = manifests.fingerprint(manifest)
                hive_task = asyncio.create_task(self._start_hive(identity, None, fingerprint))
            else:
                fingerprint = join.fingerprint
            if config.blocks is not None and join is None:
                # The span is known: load while p2pd starts.
                self._span = _checked(config.blocks, family.n_blocks(text_config(checkpoint.config)))
                blocks = await thread.run(self._load, checkpoint, family, self._span, None)
                hive = await hive_task
                stack.push_async_callback(hive.close)
            else:
                hive = await hive_task
                stack.push_async_callback(hive.close)
                if join is not None:
                    manifest = await fetch_manifest(hive, join, JOIN_S)
                directory = self._directory(hive, identity, fingerprint, checkpoint, family, path)
                self._span = await self._choose(directory, hive, checkpoint, family)
                blocks = await thread.run(self._load, checkpoint, family, self._span, manifest)
        except BaseException:
            if hive_task is not None and not hive_task.done():
                hive_task.cancel()
                await asyncio.gather(hive_task, return_exceptions=True)
            elif hive_task is not None and not hive_task.cancelled() and hive_task.exception() is None:
                await hive_task.result().close()
            raise
        await self._serve(stack, identity, thread, hive, checkpoint, family, blocks, manifest, path)

    async def _serve(self, stack, identity, thread, hive, checkpoint, family, blocks, manifest, path) -> None:
        config = self.config
        speed = await thread.run(measure, blocks)
        budget = CacheBudget(config.cache_bytes or int(CACHE_SHARE * free_memory()))
        self._service = Service(me=identity.peer_id, blocks=blocks, budget=budget, thread=thread, speed=speed)
        stack.push_async_callback(self._service.close)
        endpoint = await stack.enter_async_context(
            Endpoint(
                identity=identity,
                role="peer",
                handler=self._service,
                heartbeat=config.heartbeat,
                streams=hive,
                direct=config.direct,
            )
        )
        if config.direct:
            listening = await endpoint.listen(config.host, config.port)
            self._addresses = config.announce or local_addresses(listening)
        self._service.start(endpoint)
        await hive.serve_blob(MANIFEST, lambda: manifests.to_bytes(manifest))
        fingerprint = manifests.fingerprint(manifest)
        directory = self._directory(hive, identity, fingerprint, checkpoint, family, path)
        self._announcer = Announcer(directory, self.record, config.renew_s)
        self._state = PeerState.SERVING
        await self._announcer.announce()
        stack.push_async_callback(self._announcer.leave)
        hive.on_restart.append(self._announce_again)
        code = JoinCode(bootstrap=tuple(await hive.addresses()), fingerprint=fingerprint)
        self.serving = Serving(
            peer_id=identity.peer_id,
            span=self._span,
            n_blocks=family.n_blocks(text_config(checkpoint.config)),
            join_code=code.encode(),
            address=", ".join(self._addresses) or "only through the swarm's own network",
            weights_bytes=blocks.nbytes,
            cache_positions=self._positions(budget.limit_bytes),
        )

    async def _announce_again(self) -> None:
        self._announcer.renew_soon()

    def record(self) -> PeerRecord:
        """This peer as it is now."""
        service = self._service
        return PeerRecord(
            peer_id=service.me,
            span=self._span,
            state=self._state,
            addresses=self._addresses,
            decode_s=service.load.decode_s,
            prefill_s=service.load.prefill_s,
            queue_s=service.load.queue_s,
            cache_free=self._positions(service.budget.free_bytes),
            cache_total=self._positions(service.budget.limit_bytes),
        )

    def _positions(self, nbytes: int) -> int:
        return nbytes // self._service.blocks.shape.position_bytes(len(self._span))

    async def _start_hive(self, identity: Identity, join: JoinCode | None, fingerprint: bytes = b"") -> Hive:
        config = self.config
        return await Hive.start(
            identity=identity,
            bootstrap=join.bootstrap if join else (),
            host=config.host,
            port=config.dht_port,
            record_policy=RecordPolicy(join.fingerprint if join else fingerprint),
            startup_timeout_s=config.startup_timeout_s,
            daemon=config.daemon,
        )

    def _directory(self, hive, identity, fingerprint, checkpoint, family, path) -> Directory:
        n_blocks = family.n_blocks(text_config(checkpoint.config))
        return Directory(hive, identity, fingerprint, n_blocks, sequences=Sequences.beside(path))

    async def _choose(self, directory: Directory, hive: Hive, checkpoint: Checkpoint, family: Family) -> Span:
        n_blocks = family.n_blocks(text_config(checkpoint.config))
        if self.config.blocks is not None:
            return _checked(self.config.blocks, n_blocks)
        view = View({}, n_blocks)
        for record in await directory.refresh():
            view = apply(view, RecordSeen(record))
        block_bytes = max(
            estimated_block_bytes(checkpoint.config, family, index, self.config.torch_dtype)
            for index in range(0, n_blocks, max(1, n_blocks // 4))
        )
        capacity = min(n_blocks, blocks_that_fit(block_bytes, free_memory()))
        return least_covered_span(view, n_blocks, capacity, hive.dht_time())

    def _load(self, checkpoint: Checkpoint, family: Family, span: Span, manifest: manifests.Manifest | None) -> Blocks:
        """With the manifest of a swarm that was joined, each tensor is checked; a founder's has just been built."""
        check: Callable | None = None
        if manifest is not None:
            check = lambda names: manifests.check(checkpoint, names, manifest)  # noqa: E731
        config = self.config
        return Blocks.load(checkpoint, family, span, config.torch_dtype, config.device, self._progress, check=check)


def _checked(span: Span, n_blocks: int) -> Span:
    if span.end > n_blocks:
        raise BadInput(f"there are no blocks {span}: the model has {n_blocks}, so the last span is up to {n_blocks}")
    return span
