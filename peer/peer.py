"""A peer from start to goodbye: what a process has once, however many models it serves.

Identity, compute threads, p2pd, links, memory for sessions and the page for Prometheus; and for each model a node
(`node.py`). Everything it starts, it ends. Models are loaded one after the other, and served when all are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from peer.cache import CacheBudget
from peer.capacity import LEAST_CACHE_BYTES, Memory, free_memory
from peer.config import PeerConfig
from peer.cuda import check_device
from peer.devices import make_current
from peer.node import Node
from peer.scrape import MetricsServer
from peer.spread import AnyBlocks, SpreadBudget
from peer.switchboard import Switchboard
from routing.errors import BadInput, SwarmError
from routing.reach import Notice
from routing.types import Span
from swarm import native
from swarm.addresses import local_addresses
from swarm.changes import serve_changes
from swarm.compute import ComputeThread
from swarm.discovery import Sequences
from swarm.hive import Daemon, Hive
from swarm.identity import Identity
from swarm.p2pd import refuse_taken_port
from swarm.paths import earlier_peers, free_peer_key, held
from swarm.progress import Progress, silent
from swarm.records import RecordPolicy
from swarm.tasks import Meanwhile, until_one_ends
from swarm.transport import Endpoint

if TYPE_CHECKING:
    from peer.metrics import Metrics


class Peer:
    """`async with Peer([config]) as peer:` serves until it is left."""

    def __init__(
        self,
        configs: Sequence[PeerConfig],
        progress: Progress = silent,
        tell: Callable[[Notice], None] | None = None,
        moved: Callable[[str, Span], None] | None = None,
        grown: Callable[[str, Span], None] | None = None,
    ):
        """`configs`: one for each model; in all but `model`, `join` and `blocks` they agree. `tell` is called with what
        the owner should know of this peer's reachability, `moved` with a model of which it serves other blocks now,
        `grown` once the blocks of a model are all loaded, of which some were served before."""
        self.config = configs[0]
        self.progress = progress
        self._tell, self._moved, self._grown = tell or _nobody, moved or _nobody, grown or _nobody
        self._told: Notice | None = None
        self.nodes = [Node(config, self) for config in configs]
        self.switchboard = Switchboard()
        self.addresses: tuple[str, ...] = ()
        self.identity: Identity
        self.sequences: Sequences
        self.threads: list[ComputeThread] = []  # of each device
        self.endpoint: Endpoint
        self.metrics: Metrics | None = None
        self.metrics_url: str | None = None
        self._key_path: Path
        self._daemon: Meanwhile[Daemon]
        self._budgets: list[CacheBudget] = []  # of each device
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Peer:
        config = self.config
        if config.direct and config.port:
            refuse_taken_port(config.host, config.port)  # now, not when all weights are loaded
        for device in config.devices:
            check_device(config.quantize, device)
        async with AsyncExitStack() as stack:
            await self._open_metrics(stack)
            self._take_identity(stack)
            self._daemon = await stack.enter_async_context(Meanwhile(self._start_daemon(), Daemon.close))
            native.load()
            await self._start_threads(stack)
            await self._load(stack)
            await self._open_links(stack)
            for node in self.nodes:
                await node.serve(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Keep the records alive until cancelled. Raises SwarmError if a service fails."""
        await until_one_ends(node.run() for node in self.nodes)

    @property
    def sessions(self) -> int:
        """Sessions of clients that are used now."""
        return sum(node.sessions for node in self.nodes)

    async def hand_over(self) -> None:
        """Before it is left: no new sessions, and time for the clients to move those that are here. `run` goes on
        meanwhile."""
        if self.sessions:
            await asyncio.gather(*(node.hand_over() for node in self.nodes))

    # -- start -----------------------------------------------------------------------------------------------

    async def _open_metrics(self, stack: AsyncExitStack) -> None:
        """The page is there from the start: a port that is taken is told now, and it outlives what it shows."""
        if self.config.metrics_port is None:
            return
        from peer.metrics import CONTENT_TYPE, Metrics  # whoever wants no metrics need not wait for their library

        self.metrics = Metrics()
        server = MetricsServer(self.metrics.page, CONTENT_TYPE)
        stack.push_async_callback(server.close)
        self.metrics_url = await server.listen(self.config.metrics_host, self.config.metrics_port)

    def _take_identity(self, stack: AsyncExitStack) -> None:
        wanted = self.config.identity_path
        path = stack.enter_context(held(wanted) if wanted else free_peer_key())
        if path is None:
            raise BadInput(f"another process uses the identity {wanted}")
        self._key_path, self.identity = path, Identity.load_or_create(path)
        self.sequences = Sequences.beside(path)

    async def _start_threads(self, stack: AsyncExitStack) -> None:
        """One for each device; those of the CPU share the cores."""
        config, cores = self.config, self._threads()
        if (parts := config.devices.count("cpu")) > 1:
            cores = max(1, (cores or torch.get_num_threads()) // parts)
        for device in config.devices:
            thread = await stack.enter_async_context(ComputeThread(threads=cores, nice=config.nice))
            await thread.run(make_current, device)
            self.threads.append(thread)

    def _threads(self) -> int | None:
        """Unless the owner says how many: all cores for the first peer on a machine, half of them for the second, a
        third for the third. Nobody gives any back, so n peers have at most 1 + ln n threads a core, not n."""
        config = self.config
        if config.threads is not None or config.identity_path is not None:
            return config.threads
        return max(1, torch.get_num_threads() // (1 + earlier_peers(self._key_path)))

    async def _start_daemon(self) -> Daemon:
        config = self.config
        return await Daemon.start(
            identity=self.identity,
            host=config.host,
            port=config.dht_port,
            startup_timeout_s=config.startup_timeout_s,
            program=config.daemon,
        )

    async def hive(self, bootstrap: Sequence[str], swarm_id: bytes) -> Hive:
        """A node of that swarm. Raises what `Daemon.start` and `Hive.join` raise."""
        daemon = await self._daemon.shared()
        hive = await Hive.join(daemon, bootstrap=bootstrap, record_policy=RecordPolicy(swarm_id))
        try:
            await serve_changes(hive)  # it stores others' records from now on
        except BaseException:
            await hive.close()
            raise
        return hive

    async def _open_links(self, stack: AsyncExitStack) -> None:
        config, daemon = self.config, await self._daemon.shared()
        self.endpoint = Endpoint(
            identity=self.identity,
            role="peer",
            handler=self.switchboard,
            heartbeat=config.heartbeat,
            streams=daemon,
            direct=config.direct,
            active=lambda: self.switchboard.computed_sessions,
        )
        await stack.enter_async_context(self.endpoint)
        if config.direct:
            listening = await self.endpoint.listen(config.host, config.port)
            self.addresses = config.announce or local_addresses(listening)
        if self.metrics is not None:
            self.metrics.watch_process(self.endpoint, daemon)

    async def _load(self, stack: AsyncExitStack) -> None:
        loaded = []
        for node in self.nodes:
            with self._naming(node):
                loaded.append(await node.load(stack))
        for node, blocks in zip(self.nodes, loaded, strict=True):
            with self._naming(node):
                await node.make_ready(blocks, stack)

    @contextmanager
    def _naming(self, node: Node) -> Iterator[None]:
        """Of several models, which one cannot be served."""
        try:
            yield
        except SwarmError as error:
            if len(self.nodes) > 1:
                error.args = (f"{node.config.model}: {error}",)
            raise

    # -- memory ----------------------------------------------------------------------------------------------

    def memory(self, node: Node, taken: Sequence[int] = (), freed: Sequence[int] = ()) -> Memory:
        """For the blocks of `node` and their sessions. Models that are loaded keep what they have, and as much again
        for their sessions; those to come get equal parts. Both in bytes on each device: `taken`, of the owner's limit,
        by the node itself; `freed`, of what it uses now, and will not then."""
        config, others = self.config, [other for other in self.nodes if other is not node]
        held, none = self._weights(others), [0] * len(config.devices)
        promised, limit = held if config.cache_bytes is None else none, config.max_memory_bytes
        by_device = tuple(
            max(0, free + more - kept)
            for free, more, kept in zip(self._free(), freed or none, promised, strict=True)
        )
        return Memory(
            free_bytes=sum(by_device),
            by_device=by_device if len(by_device) > 1 else (),
            limit_bytes=None if limit is None else max(0, limit - sum(held) - sum(promised) - sum(taken)),
            cache_bytes=config.cache_bytes,
            models=1 + sum(not other.weights_bytes for other in others),
        )

    def cache(self, node: Node, blocks: AnyBlocks) -> CacheBudget | SpreadBudget:
        """For the sessions of all models, once all are loaded. One that serves alone gets a new budget for new blocks:
        the sessions of the old ones still have the other. Of what the owner allows, each device has a part by the
        weights that are on it."""
        config, budgets = self.config, self._budgets
        if not budgets or len(self.nodes) == 1:
            budgets = self._budgets = [CacheBudget(0) for _ in config.devices]
        others = self._weights([other for other in self.nodes if other is not node])
        weights = [own + more for own, more in zip(node.weights_with(blocks), others, strict=True)]
        for budget, free, loaded in zip(budgets, self._free(), weights, strict=True):
            limit, wish = (
                None if nbytes is None else nbytes * loaded // sum(weights)
                for nbytes in (config.max_memory_bytes, config.cache_bytes)
            )
            if wish is not None:
                wish = max(LEAST_CACHE_BYTES, wish)
            memory = Memory(free_bytes=free + budget.used_bytes, limit_bytes=limit, cache_bytes=wish)
            budget.limit_bytes = memory.for_cache(loaded) if loaded else 0
        own = [budgets[place] for place in blocks.places]
        return SpreadBudget(own) if len(budgets) > 1 else own[0]

    def _weights(self, nodes: Sequence[Node]) -> list[int]:
        """Bytes on each device."""
        return [sum(node.weights[place] for node in nodes) for place in range(len(self.config.devices))]

    def _free(self) -> list[int]:
        """Bytes on each device that no block still to be loaded needs. All but CUDA's have parts of one memory."""
        shared = sum(torch.device(device).type != "cuda" for device in self.config.devices)
        free = [
            free_memory(device) // (1 if torch.device(device).type == "cuda" else shared)
            for device in self.config.devices
        ]
        free[0] -= sum(node.pending_bytes for node in self.nodes)  # with several devices there are none
        return free

    # -- what its owner is told ------------------------------------------------------------------------------

    def tell(self, notice: Notice) -> None:
        """Each swarm's peers are asked; what was said last is not said again."""
        if notice != self._told:
            self._told = notice
            self._tell(notice)

    def moved(self, model: str, span: Span) -> None:
        self._moved(model, span)

    def grown(self, model: str, span: Span) -> None:
        self._grown(model, span)


def _nobody(*_: object) -> None:
    pass
