"""A whole swarm in one process: real services, endpoints, sockets, TLS and model; no p2pd.

Only the directory is replaced (by a dictionary) and, where a test asks for it, the carrier of streams (by socket
pairs). Each peer has a thread with its own event loop, as a process would: it can be frozen as by SIGSTOP (its
sockets stay open and nothing is read or answered) and killed as by SIGKILL (its sockets break, nothing is said).
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvloop

from peer.blocks import Blocks
from peer.cache import CacheBudget
from peer.capacity import Speed
from peer.service import Service
from peer.sessions import SessionLimits
from routing.cost import Costs
from routing.errors import TimedOut, Unreachable
from routing.types import PeerId, PeerRecord, PeerState, Span
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.client import ClientConfig, SwarmClient
from swarm.codec import lossless_codec
from swarm.compute import ComputeThread
from swarm.families import Family, family_of
from swarm.frames import Frame, FrameType
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.link import Link
from swarm.model import SwarmModel
from swarm.progress import silent
from swarm.session import SessionConfig, StepTrace
from swarm.transport import Endpoint, Heartbeat, StreamCarrier

T = TypeVar("T")

CODE = JoinCode(bootstrap=(f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",), fingerprint=bytes(32)).encode()
SPEED = Speed(decode_s=1e-4, prefill_s=1e-5)
PLENTY = 1 << 30
FAST = Heartbeat(ping_after_s=0.25, ping_every_s=0.125, dead_after_s=0.625)
"""A quarter of the real times: what must be noticed within 4 s must be noticed within 1 s of this."""


class Host:
    """A thread with an event loop: what a process is to its operating system."""

    def __init__(self, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._gate: threading.Event | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """From another thread: wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        """From another event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def call(self, function: Callable[[], T]) -> T:
        async def once() -> T:
            return function()

        return self.run(once())

    def freeze(self) -> None:
        """Returns when nothing runs there any more. The kernel still takes connections and bytes."""
        gate, stopped = threading.Event(), threading.Event()

        def stop() -> None:
            stopped.set()
            gate.wait(60)

        self._gate = gate
        self.loop.call_soon_threadsafe(stop)
        assert stopped.wait(10)

    def thaw(self) -> None:
        if self._gate is not None:
            self._gate.set()
            self._gate = None

    def stop(self) -> None:
        self.thaw()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.loop.close()


@dataclass(frozen=True, slots=True)
class Seen:
    """A frame that came to a peer."""

    type: FrameType
    start: int
    end: int
    sender: PeerId
    role: str


class Tap:
    """A peer's handler that writes down what comes, and may keep frames from it."""

    def __init__(self, service: Service):
        self.service = service
        self.seen: list[Seen] = []
        self.lost: list[tuple[PeerId, str]] = []
        self.drop: Callable[[Link, Frame], bool] = lambda link, frame: False

    def link_opened(self, link: Link) -> None:
        self.service.link_opened(link)

    def frame_received(self, link: Link, frame: Frame) -> None:
        self.seen.append(Seen(frame.type, frame.start, frame.end, link.remote, link.role))
        if not self.drop(link, frame):
            self.service.frame_received(link, frame)

    def link_lost(self, link: Link, reason: str) -> None:
        self.lost.append((link.remote, reason))
        self.service.link_lost(link, reason)


class _Deaf:
    """Whom the sockets of a killed peer talk to."""

    def data_received(self, data: bytes) -> None:
        pass

    def writable(self) -> None:
        pass

    def channel_lost(self, reason: str) -> None:
        pass


class MemoryDirectory:
    """What clients read instead of the DHT. `down`: it cannot be read."""

    def __init__(self) -> None:
        self.records: dict[PeerId, PeerRecord] = {}
        self.down = False
        self.reads = 0

    async def refresh(self) -> list[PeerRecord]:
        self.reads += 1
        if self.down:
            raise TimedOut("the directory is down")
        return list(self.records.values())


class MemoryCarrier:
    """Streams over socket pairs between the event loops of this process."""

    def __init__(self, swarm: InProcessSwarm, peer_id: PeerId, net: dict[PeerId, MemoryCarrier]):
        self.peer_id, self._swarm, self._net, self._loop = peer_id, swarm, net, asyncio.get_running_loop()
        self._handlers: dict[str, Callable[..., Awaitable[None]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        net[peer_id] = self

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._net.get(peer_id)
        if target is None or protocol not in target._handlers:
            raise Unreachable(f"no stream to {peer_id}")
        here, there = socket.socketpair()
        target._loop.call_soon_threadsafe(target._accept, self.peer_id, protocol, there)
        self._swarm.streams_opened += 1
        return await asyncio.open_connection(sock=here)

    async def serve(self, protocol: str, handler: Callable[..., Awaitable[None]]) -> None:
        self._handlers[protocol] = handler

    def _accept(self, remote: PeerId, protocol: str, sock: socket.socket) -> None:
        async def handle() -> None:
            await self._handlers[protocol](remote, *await asyncio.open_connection(sock=sock))

        task = self._loop.create_task(handle())
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        del self._net[self.peer_id]
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


class InProcessPeer:
    """One peer. What is read of `service` from a test's thread is a snapshot of a running peer."""

    service: Service
    endpoint: Endpoint
    tap: Tap
    address: str

    def __init__(self, swarm: InProcessSwarm, span: Span, identity: Identity, cache_bytes: int, limits: SessionLimits):
        self.swarm, self.span, self.identity, self.peer_id = swarm, span, identity, identity.peer_id
        self.host = Host(f"peer {span}")
        self.alive = True
        self._cache_bytes, self._limits = cache_bytes, limits
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await self.host.arun(self._open())

    async def _open(self) -> None:
        swarm, stack = self.swarm, self._stack
        thread = await stack.enter_async_context(ComputeThread(threads=1))
        blocks = await thread.run(Blocks.load, swarm.checkpoint, swarm.family, self.span, swarm.dtype, "cpu")
        self.service = Service(
            me=self.peer_id,
            blocks=blocks,
            budget=CacheBudget(self._cache_bytes),
            thread=thread,
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
            )
        )
        self.address = await self.endpoint.listen("127.0.0.1") if swarm.direct else ""
        self.service.start(self.endpoint)

    def kill(self) -> None:
        """As by SIGKILL: its sockets break, it says nothing, and nothing of it answers any more."""
        if self.alive:
            self.alive = False
            self.host.thaw()
            self.host.run(self._die())
            self.host.stop()

    async def _die(self) -> None:
        for channel in list(self.endpoint._channels):
            channel.sink = _Deaf()
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
    ):
        self.folder, self.spans, self.dtype, self.direct = folder, spans, dtype, direct
        self.heartbeat = heartbeat or Heartbeat()
        self.checkpoint: Checkpoint = open_checkpoint(str(folder))
        self.family: Family = family_of(self.checkpoint.config)
        self.directory = MemoryDirectory()
        self.peers: list[InProcessPeer] = []
        self.net: dict[PeerId, MemoryCarrier] | None = {} if streams or not direct else None
        self.streams_opened = 0
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
        cache_bytes: int = PLENTY,
        limits: SessionLimits | None = None,
        announce: bool = True,
    ) -> InProcessPeer:
        peer = InProcessPeer(
            self, Span.parse(span), identity or Identity.generate(), cache_bytes, limits or SessionLimits()
        )
        self.peers.append(peer)
        await peer.open()
        if announce:
            self.tell(peer)
        return peer

    async def restart(self, peer: InProcessPeer) -> InProcessPeer:
        """Killed, and started anew under the same identity: an empty table, another port."""
        await asyncio.to_thread(peer.kill)
        return await self.add(str(peer.span), identity=peer.identity)

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
        return None if self.net is None else MemoryCarrier(self, peer_id, self.net)

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
        wire: str | None = None,
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
        codec = lossless_codec(getattr(torch, wire) if wire else self.dtype)
        return InProcessModel(self, config, SessionConfig(codec=codec, **session), learns)

    async def all_closed(self, timeout_s: float = 5.0) -> None:
        """Waits until no living peer holds a session or memory of one."""
        deadline = time.monotonic() + timeout_s
        while held := [str(peer.span) for peer in self.living if peer.sessions or peer.service.budget.used_bytes]:
            assert time.monotonic() < deadline, f"sessions or their memory are left on {held}"
            await asyncio.sleep(0.005)


class InProcessClient(SwarmClient):
    """A client whose directory is a dictionary."""

    def __init__(self, swarm: InProcessSwarm, learns: bool, *args: Any):
        super().__init__(*args)
        self._swarm, self._learns = swarm, learns

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
        super().__init__(str(swarm.folder), CODE, client, session, silent)
        self._swarm, self._learns = swarm, learns

    def _make_client(self, checkpoint: Checkpoint, family: Family) -> SwarmClient:
        self.client = InProcessClient(
            self._swarm, self._learns, checkpoint, family, self._join, self._client_config
        )
        return self.client


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Waits for what another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)
    return value
