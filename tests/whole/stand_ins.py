"""What stands in for the operating system and the network in a swarm within one process: hosts, directory, streams."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

from routing.errors import SwarmError, TimedOut, Unreachable
from routing.types import PeerId, PeerRecord
from swarm.frames import Frame, FrameType
from swarm.link import Link, LinkHandler

T = TypeVar("T")


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

    def __init__(self, service: LinkHandler):
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


class Deaf:
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


class MemoryNet:
    """Who can be reached by stream, and how many streams there have been."""

    def __init__(self) -> None:
        self.carriers: dict[PeerId, MemoryCarrier] = {}
        self.opened = 0


class MemoryCarrier:
    """Streams over socket pairs between the event loops of this process."""

    def __init__(self, peer_id: PeerId, net: MemoryNet):
        self.peer_id, self._net, self._loop = peer_id, net, asyncio.get_running_loop()
        self._handlers: dict[str, Callable[..., Awaitable[None]]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        net.carriers[peer_id] = self

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        target = self._net.carriers.get(peer_id)
        if target is None or protocol not in target._handlers:
            raise Unreachable(f"no stream to {peer_id}")
        here, there = socket.socketpair()
        target._loop.call_soon_threadsafe(target._accept, self.peer_id, protocol, there)
        self._net.opened += 1
        return await asyncio.open_connection(sock=here)

    async def serve(self, protocol: str, handler: Callable[..., Awaitable[None]]) -> None:
        self._handlers[protocol] = handler

    def _accept(self, remote: PeerId, protocol: str, sock: socket.socket) -> None:
        async def handle() -> None:
            reader, writer = await asyncio.open_connection(sock=sock)
            try:
                await self._handlers[protocol](remote, reader, writer)
            except (OSError, EOFError, SwarmError):
                pass  # as a node does: the stream is over, and nothing else
            finally:
                writer.close()

        task = self._loop.create_task(handle())
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        del self._net.carriers[self.peer_id]
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> Any:
    """Waits for what another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)
    return value
