"""An ordered stream of bytes to another process: over TLS, or over a stream that hivemind carries.

Owns sockets' and streams' callbacks, back-pressure and closing, behind one small interface. Knows no frame
and no handshake; who is at the other end is for its sink to find out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, cast

from routing.errors import BadInput
from routing.types import PeerId

BUFFER_BYTES = 64 * 1024  # written, not yet on the wire, before `paused`: bulk waits where it can be overtaken
_READ_BYTES = 256 * 1024
_CLOSE_S = 1.0  # for the last bytes to leave
# An idle connection whose other end vanished without a word is gone after two minutes, without any frame.
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}

# tcpi_retransmits, tcpi_total_retrans, tcpi_rcv_ooopack in Linux's struct tcp_info (linux/tcp.h)
_UNANSWERED, _SENT_AGAIN, _OUT_OF_ORDER = 2, 100, 224
_RESET = struct.pack("ii", 1, 0)  # linger for no time: closing sends RST

Spawn = Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"]


def parse_address(address: str) -> tuple[str, int]:
    """`"127.0.0.1:4001"` or `"[::1]:4001"` to host and port. Raises BadInput."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        raise BadInput(f"{address!r} is not an address; write 192.0.2.1:4001 or [2001:db8::1]:4001")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class StreamCarrier(Protocol):
    """Streams to peers that cannot be dialled directly; `swarm/hive.py` makes them out of hivemind's."""

    peer_id: PeerId  # of this process, as the carrier authenticates it to others

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...

    async def serve(
        self,
        protocol: str,
        handler: Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None: ...


class Sink(Protocol):
    """Who takes what a channel reports. All calls come on the event loop, in order."""

    def data_received(self, data: bytes) -> None: ...

    def writable(self) -> None:
        """`paused` is over."""

    def channel_lost(self, reason: str) -> None:
        """The end, once, whoever ended it."""


class Channel(Protocol):
    sink: Sink
    paused: bool  # enough is buffered; write on after `sink.writable()`
    closed: asyncio.Future[None]  # done at the end

    @property
    def mishaps(self) -> int:
        """Packets so far that had to be sent again and arrived then, or came out of order; 0 where the system does not
        tell, and while one is sent again and again without an answer: that way may be dead."""

    def write(self, pieces: list[Any]) -> None: ...

    def close(self) -> None:
        """Send what is buffered, then end; forced after a second."""

    def abort(self) -> None:
        """End now."""


class TlsChannel(asyncio.Protocol):
    """One TLS connection. `on_made` chooses the sink as soon as TLS stands."""

    sink: Sink

    def __init__(self, on_made: Callable[[TlsChannel], None]):
        self.paused = False
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.TimerHandle | None = None
        self._forced: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            # Else the kernel takes megabytes of bulk, which a decode step could then not overtake.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, BUFFER_BYTES)
        self._on_made(self)

    @property
    def peer_certificate(self) -> bytes:
        """DER, of the listener; empty if there is none."""
        assert self._transport is not None
        return self._transport.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""

    @property
    def mishaps(self) -> int:
        raw = self._open_socket
        if raw is None or not hasattr(socket, "TCP_INFO") or sys.platform != "linux":
            return 0
        try:
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _OUT_OF_ORDER + 4)
        except (OSError, ValueError):
            return 0
        if info[_UNANSWERED]:
            return 0
        # An older kernel gives less.
        return sum(int.from_bytes(info[at : at + 4], sys.byteorder) for at in (_SENT_AGAIN, _OUT_OF_ORDER))

    def data_received(self, data: bytes) -> None:
        self.sink.data_received(data)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self.sink.writable()

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._deadline, self._forced):
            if timer is not None:
                timer.cancel()
        if not self.closed.done():
            self.closed.set_result(None)
            self.sink.channel_lost(f"broken: {error}" if error else "closed by the other side")

    def write(self, pieces: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def close(self) -> None:
        if self._transport is not None and not self.closed.done() and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(_CLOSE_S, self.abort)
            self._transport.close()

    def abort(self) -> None:
        # The other side is told at once. The end of a stream would wait behind bytes that nobody acknowledges, where
        # only the way back to us is dead.
        if (raw := self._open_socket) is not None:
            with contextlib.suppress(OSError, ValueError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self._transport is not None:
            self._transport.abort()
            if self._forced is None and not self.closed.done():
                # Seen twice under load: a transport that had broken by itself said no more of it.
                self._forced = asyncio.get_running_loop().call_later(_CLOSE_S, self.connection_lost, None)

    @property
    def _open_socket(self) -> Any:
        """None once it may be closed: its descriptor could be another socket's by then."""
        transport = self._transport
        return None if transport is None or transport.is_closing() else transport.get_extra_info("socket")


class StreamChannel:
    """A pair of asyncio streams as a channel. Set its sink at once; its two tasks are the spawner's."""

    sink: Sink
    mishaps = 0

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spawn: Spawn):
        self.paused = False
        self._reader, self._writer = reader, writer
        self._full = asyncio.Event()
        self._unflushed = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.TimerHandle | None = None
        self._tasks = [spawn(self._read()), spawn(self._drain())]

    async def _read(self) -> None:
        reason = "closed by the other side"
        try:
            while data := await self._reader.read(_READ_BYTES):
                self.sink.data_received(data)
        except OSError as error:
            reason = f"broken: {error}"
        finally:
            self._end(reason)

    async def _drain(self) -> None:
        while True:
            await self._full.wait()
            self._full.clear()
            self._unflushed = 0
            try:
                await self._writer.drain()
            except OSError as error:
                self._end(f"broken: {error}")
                return
            if not self._full.is_set():
                self.paused = False
                self.sink.writable()

    def write(self, pieces: list[Any]) -> None:
        if self.closed.done() or self._writer.is_closing():
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._writer.write(data)
        self._unflushed += len(data)
        if self._unflushed >= BUFFER_BYTES:
            self.paused = True
            self._full.set()

    def close(self) -> None:
        if not self.closed.done() and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(_CLOSE_S, self.abort)
            # A stream's close() sends what is buffered and then ends the reading task, too.
            self._writer.close()

    def abort(self) -> None:
        self._writer.transport.abort()
        self._end("closed")

    def _end(self, reason: str) -> None:
        if self.closed.done():
            return
        self.closed.set_result(None)
        if self._deadline is not None:
            self._deadline.cancel()
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(OSError):
            self._writer.close()
        self.sink.channel_lost(reason)
