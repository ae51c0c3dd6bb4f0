"""A whole swarm in one process: real services, endpoints, sockets, TLS and model; no p2pd.

Only the directory is replaced (by a dictionary) and, where a test asks for it, the carrier of streams (by socket
pairs). Each peer has a thread with its own event loop, as a process would: it can be frozen as by SIGSTOP (its
sockets stay open and nothing is read or answered) and killed as by SIGKILL (its sockets break, nothing is said).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peer.blocks import Loading
from peer.cache import CacheBudget
from peer.capacity import Speed
from peer.effects import SessionLimits
from peer.service import Service
from peer.spread import AnyBlocks, SpreadBudget, SpreadLoading
from peer.succession import Succession
from peer.switchboard import Switchboard
from routing.cost import Costs
from routing.planner import Plan, Split
from routing.request import Request
from routing.types import PeerId, PeerRecord, PeerState, Span
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import ClientConfig, SwarmClient
from swarm.compute import ComputeThread
from swarm.families import Family, family_of
from swarm.frames import FrameType
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.model import SwarmModel
from swarm.progress import silent
from swarm.quantized import NONE
from swarm.session import SessionConfig, StepTrace
from swarm.transport import Endpoint, Heartbeat, StreamCarrier
from tests.whole.stand_ins import Deaf, Host, MemoryCarrier, MemoryDirectory, MemoryNet, Tap

BOOTSTRAP = (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",)
SPEED = Speed(decode={1: 1e-4}, prefill={64: 64e-5})
PLENTY = 1 << 30
FAST = Heartbeat(ping_after_s=0.25, ping_every_s=0.125, dead_after_s=0.625)
"""A quarter of the real times: what must be noticed within 4 s must be noticed within 1 s of this."""


class InProcessPeer:
    """One peer. What is read of `service` from a test's thread is a snapshot of a running peer."""

    service: Service
    endpoint: Endpoint
    tap: Tap
    address: str

    def __init__(
        self, swarm: InProcessSwarm, parts: Sequence[Span], identity: Identity, quantization: str, cache_bytes: int,
        limits: SessionLimits,
    ):  # fmt: skip
        self.parts, span = parts, Span(parts[0].start, parts[-1].end)
        self.swarm, self.span, self.identity, self.peer_id = swarm, span, identity, identity.peer_id
        self.host = Host(f"peer {span}")
        self.alive = True
        self._quantization, self._cache_bytes, self._limits = quantization, cache_bytes, limits
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self.host.arun(self._open())

    async def _open(self) -> None:
        swarm, stack = self.swarm, self._stack
        threads = [await stack.enter_async_context(ComputeThread(threads=1)) for _ in self.parts]
        blocks = await threads[0].run(self._load)
        budgets = [CacheBudget(self._cache_bytes) for _ in self.parts]
        self.service = Service(
            me=self.peer_id,
            blocks=blocks,
            budget=SpreadBudget(budgets) if len(budgets) > 1 else budgets[0],
            threads=threads,
            speed=SPEED,
            limits=self._limits,
        )
        stack.push_async_callback(self.service.close)
        self.tap = Tap(self.service)
        carrier = swarm.carrier(self.peer_id)
        if carrier is not None:
            stack.push_async_callback(carrier.close)
        self.endpoint = await stack.enter_async_context(
            Endpoint(
                identity=self.identity,
                role="peer",
                handler=self.tap,
                heartbeat=swarm.heartbeat,
                streams=carrier,
                direct=swarm.direct,
                active=lambda: self.service.computed_sessions,
            )
        )
        self.address = await self.endpoint.listen("127.0.0.1") if swarm.direct else ""
        self.service.start(self.endpoint)

    def _load(self) -> AnyBlocks:
        swarm, devices = self.swarm, ["cpu"] * len(self.parts)

        def on(part: Span, device: str) -> Loading:
            return Loading(swarm.checkpoint, swarm.family, part, swarm.dtype, device, quantization=self._quantization)

        if len(devices) == 1:
            return on(self.span, "cpu").load_all()
        return SpreadLoading(on, self.span, devices, [len(part) for part in self.parts]).load_all()

    async def serve_too(self, swarm: InProcessSwarm, span: str) -> Service:
        """Another model besides, before there are links."""
        service = await self.host.arun(self._serve_too(swarm, Span.parse(span)))
        swarm.tell(self, span=Span.parse(span))
        return service

    async def _serve_too(self, swarm: InProcessSwarm, span: Span) -> Service:
        thread = self.service.stages[0].lane.thread
        blocks = await thread.run(Loading(swarm.checkpoint, swarm.family, span, swarm.dtype).load_all)
        service = Service(me=self.peer_id, blocks=blocks, budget=self.service.budget, threads=[thread], speed=SPEED)
        self._stack.push_async_callback(service.close)
        switchboard = Switchboard()
        switchboard.add(self.swarm.join_code.fingerprint, Succession(self.service))
        switchboard.add(swarm.join_code.fingerprint, Succession(service))
        self.tap.service = switchboard
        service.start(self.endpoint)
        return service

    def kill(self) -> None:
        """As by SIGKILL: its sockets break, it says nothing, and nothing of it answers any more."""
        if self.alive:
            self.alive = False
            self.host.thaw()
            self.host.run(self._die())
            self.host.stop()

    async def _die(self) -> None:
        for channel in list(self.endpoint._channels):
            channel.sink = Deaf()
            channel.abort()
        await self._stack.aclose()

    async def leave(self) -> None:
        """In good order."""
        self.alive = False
        self.swarm.tell(self, state=PeerState.LEAVING)
        await self.host.arun(self._stack.aclose())
        await asyncio.to_thread(self.host.stop)

    def freeze(self) -> None:
        self.host.freeze()

    def thaw(self) -> None:
        self.host.thaw()

    @property
    def sessions(self) -> int:
        return len(self.service.table.sessions)

    def positions(self, kind: FrameType, role: str | None = None) -> int:
        """Positions of all frames of a kind that came."""
        return sum(s.end - s.start for s in self.tap.seen if s.type is kind and role in (None, s.role))


class InProcessSwarm:
    """Peers for the given spans of the model in `folder`. An async context manager."""

    def __init__(
        self,
        folder: Path,
        spans: Sequence[str] = (),
        *,
        dtype: torch.dtype = torch.float32,
        direct: bool = True,
        streams: bool = False,
        heartbeat: Heartbeat | None = None,
        fingerprint: bytes = bytes(32),
    ):
        self.folder, self.spans, self.dtype, self.direct = folder, spans, dtype, direct
        self.join_code = JoinCode(bootstrap=BOOTSTRAP, fingerprint=fingerprint)
        self.heartbeat = heartbeat or Heartbeat()
        self.checkpoint: Checkpoint = open_checkpoint(str(folder))
        self.family: Family = family_of(self.checkpoint.config)
        self.directory = MemoryDirectory()
        self.peers: list[InProcessPeer] = []
        self.net = MemoryNet() if streams or not direct else None
        self._keys = tempfile.TemporaryDirectory(prefix="swarm-")
        self._sequence = 0

    async def __aenter__(self) -> InProcessSwarm:
        await asyncio.gather(*(self.add(span) for span in self.spans))
        return self

    async def __aexit__(self, *_: object) -> None:
        for peer in self.peers:
            await asyncio.to_thread(peer.kill)
        self._keys.cleanup()

    async def add(
        self,
        span: str,
        *,
        identity: Identity | None = None,
        quantization: str = NONE,
        cache_bytes: int = PLENTY,
        limits: SessionLimits | None = None,
        announce: bool = True,
    ) -> InProcessPeer:
        """`cache_bytes`: on each device. `span`: as "0:2+2:3" it lies on two."""
        identity, limits = identity or Identity.generate(), limits or SessionLimits()
        parts = [Span.parse(part) for part in span.split("+")]
        peer = InProcessPeer(self, parts, identity, quantization, cache_bytes, limits)
        self.peers.append(peer)
        await peer.open()
        if announce:
            self.tell(peer)
        return peer

    async def restart(self, peer: InProcessPeer) -> InProcessPeer:
        """Killed, and started anew under the same identity: an empty table, another port."""
        await asyncio.to_thread(peer.kill)
        return await self.add("+".join(map(str, peer.parts)), identity=peer.identity)

    def tell(self, peer: InProcessPeer, **changes: Any) -> None:
        """Its record, newer than the last one, in the directory."""
        self._sequence += 1
        record = PeerRecord(
            peer_id=peer.peer_id,
            span=peer.span,
            addresses=(peer.address,) if peer.address else (),
            sequence=self._sequence,
            expires_at=time.time() + 60,
            decode_s=SPEED.decode_s,
            prefill_s=SPEED.prefill_s,
        )
        self.directory.records[peer.peer_id] = replace(record, **changes)

    def carrier(self, peer_id: PeerId) -> MemoryCarrier | None:
        """Call it on the loop of the process that it is for."""
        return None if self.net is None else MemoryCarrier(peer_id, self.net)

    def by_id(self, peer_id: PeerId) -> InProcessPeer:
        """The newest of that identity."""
        return next(peer for peer in reversed(self.peers) if peer.peer_id == peer_id)

    def by_span(self, span: str) -> InProcessPeer:
        return next(peer for peer in reversed(self.peers) if str(peer.span) == span)

    @property
    def living(self) -> list[InProcessPeer]:
        return [peer for peer in self.peers if peer.alive]

    def model(
        self,
        *,
        client: str = "client",
        heartbeat: Heartbeat | None = None,
        refresh_s: float = 3600.0,
        learns: bool = False,
        **session: Any,
    ) -> InProcessModel:
        """A model whose client identity is named `client`. `session`: of SessionConfig. Unless it `learns`, all peers
        and links count as equally fast, so that the same swarm gives the same route."""
        config = ClientConfig(
            dtype=self.dtype,
            threads=1,
            direct=self.direct,
            identity_path=Path(self._keys.name) / f"{client}.key",
            refresh_s=refresh_s,
            heartbeat=heartbeat or self.heartbeat,
        )
        return InProcessModel(self, config, SessionConfig(**session), learns)

    async def all_closed(self, timeout_s: float = 5.0) -> None:
        """Waits until no living peer holds a session, or memory but for what a client's next session may use."""
        deadline = time.monotonic() + timeout_s
        while held := [str(peer.span) for peer in self.living if peer.sessions or peer.service.budget.used_bytes]:
            assert time.monotonic() < deadline, f"sessions or their memory are left on {held}"
            await asyncio.sleep(0.005)
            for peer in self.living:
                while peer.service.table.prefixes.drop_oldest():
                    pass


class InProcessClient(SwarmClient):
    """A client whose directory is a dictionary."""

    def __init__(self, swarm: InProcessSwarm, learns: bool, *args: Any):
        super().__init__(*args)
        self._swarm, self._learns = swarm, learns

    def plan(self, request: Request, *, spread: Any = None, **options: Any) -> Plan:
        return super().plan(request, spread=spread if self._learns else None, **options)

    def plan_split(self, *args: Any, spread: Any = None, **options: Any) -> Plan | Split:
        return super().plan_split(*args, spread=spread if self._learns else None, **options)

    def learn(self, trace: StepTrace) -> None:
        super().learn(trace)
        self._forget_costs()

    async def probe(self) -> None:
        await super().probe()
        self._forget_costs()

    def _forget_costs(self) -> None:
        if not self._learns:
            self.costs = Costs()

    async def _join_swarm(self, stack: AsyncExitStack, identity: Identity) -> StreamCarrier | None:
        self._directory = self._swarm.directory  # type: ignore[assignment]
        self._dht_time = time.time
        carrier = self._swarm.carrier(Identity.generate().peer_id)
        if carrier is not None:
            stack.push_async_callback(carrier.close)
        return carrier


class InProcessModel(SwarmModel):
    client: InProcessClient

    def __init__(self, swarm: InProcessSwarm, client: ClientConfig, session: SessionConfig, learns: bool):
        super().__init__(str(swarm.folder), swarm.join_code.encode(), client, session, silent)
        self._swarm, self._learns = swarm, learns

    def _make_client(self, checkpoint: Checkpoint, family: Family) -> SwarmClient:
        self.client = InProcessClient(
            self._swarm, self._learns, checkpoint, family, self._join, self._client_config
        )
        return self.client
