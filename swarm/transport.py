"""All links of a process: listening, dialling, and which connection to a remote process stays.

Owns the listeners, admission and the heartbeat's clock. At most one link to each peer: a dial in progress is
joined, and one that crosses another is settled within the handshake, before any frame. Several processes may
share a client's id, so the links of clients are kept apart by connection. Knows no session.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from routing.coordinates import Vivaldi
from routing.errors import BadInput, PortInUse, ProtocolError, StartError, Unreachable
from routing.types import PeerId
from swarm.channel import Channel, StreamCarrier, StreamChannel, TlsChannel, format_address
from swarm.connection import Traffic
from swarm.dialling import PROTOCOL, Dial, DialContext, unreachable
from swarm.greeting import Inbound, Outbound
from swarm.handshake import (
    INSTANCE_BYTES,
    ROLES,
    Answering,
    Verdict,
    client_context,
    make_certificate,
    server_context,
    stream_binding,
    tls_binding,
)
from swarm.identity import Identity, public_key_of
from swarm.link import REPLACED, Heartbeat, Link, LinkHandler
from swarm.wire import Limits

__all__ = ["Admission", "Endpoint", "Heartbeat", "Limits", "Link", "LinkHandler", "StreamCarrier"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Whom a listener lets in, and for how long it waits."""

    handshake_s: float = 5.0  # for TLS, and again for the hello
    unauthenticated: int = 128  # connections without a valid hello, at once
    inbound: int = 4096  # links that others dialled, at once


class Endpoint:
    """All links of one process. An async context manager; `close()` ends everything that it started."""

    def __init__(
        self,
        *,
        identity: Identity,
        role: str,
        handler: LinkHandler,
        limits: Limits | None = None,
        heartbeat: Heartbeat | None = None,
        streams: StreamCarrier | None = None,
        direct: bool = True,
        admission: Admission | None = None,
        active: Callable[[], int] | None = None,
    ):
        """`active`: the number of sessions that are active here, as told to whoever pings."""
        if role not in ROLES:
            raise BadInput(f"{role!r} is not a role; there are {' and '.join(ROLES)}")
        self.peer_id = identity.peer_id
        self.traffic = Traffic()  # of all links, also of those that have ended
        self.coordinates = Vivaldi()  # where this process is, as its pings tell
        self._identity, self._role, self._handler = identity, role, handler
        self._limits, self._heartbeat = limits or Limits(), heartbeat or Heartbeat()
        self._admission = admission or Admission()
        self._streams, self._active = streams, active or _none
        self._instance = secrets.token_bytes(INSTANCE_BYTES)
        self._certificate = b""
        self._servers: list[asyncio.Server] = []
        self._peers: dict[PeerId, Link] = {}
        self._clients: set[Link] = set()
        self._inbound: set[Link] = set()  # links that others dialled
        self._last: dict[PeerId, bytes] = {}  # nonce of the newest connection that we know of
        self._dials: dict[PeerId, Dial] = {}
        self._pending: set[Inbound] = set()
        self._channels: set[Channel] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._serving = self._closing = False
        self._context = DialContext(
            identity=identity,
            role=role,
            instance=self._instance,
            tls=client_context(),
            streams=streams,
            direct=direct,
            handshake_s=self._admission.handshake_s,
            spawn=self._spawn,
            track=self._track,
            remember=self._remember,
            welcomed=self._welcomed,
            release=self._release,
            failed=self._give_up,
        )

    async def __aenter__(self) -> Endpoint:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Take streams from others, if there is a carrier and this is a peer."""
        if self._streams is not None and self._role == "peer" and not self._serving:
            self._serving = True
            await self._streams.serve(PROTOCOL, self._serve_stream)

    async def listen(self, host: str, port: int = 0) -> str:
        """Listen, too, on `host` and `port` (0: the system chooses). Returns the address, "host:port".

        Raises PortInUse, StartError or BadInput.
        """
        if self._role == "client":
            raise BadInput("a client dials; it never listens")
        await self.open()
        if not self._certificate:
            certificate, key = make_certificate(self._identity)
            try:
                self._server_tls = server_context(certificate, key)
            except OSError as error:
                raise StartError(
                    f"no temporary file can be written: {error}", advice="Make room in TMPDIR, or name another folder."
                ) from error
            self._certificate = certificate
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: TlsChannel(self._accept),
                host,
                port,
                ssl=self._server_tls,
                ssl_handshake_timeout=self._admission.handshake_s,
                ssl_shutdown_timeout=1.0,
                backlog=512,
            )
        except OSError as error:
            where = format_address(host, port)
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"{where} is in use by another program") from error
            raise StartError(f"cannot listen on {where}: {error}") from error
        self._servers.append(server)
        return format_address(*server.sockets[0].getsockname()[:2])

    @property
    def links(self) -> list[Link]:
        """All that there are now."""
        return [*self._peers.values(), *self._clients]

    def link(self, peer_id: PeerId) -> Link | None:
        """The link to a peer, if there is one now."""
        return self._peers.get(peer_id)

    async def connect(self, peer_id: PeerId, addresses: Sequence[str], timeout_s: float) -> Link:
        """The link to `peer_id`: the one there is, or a new one over `addresses`, else over a stream.

        A peer that dials us meanwhile serves as well. Raises Unreachable; BadInput for an id that is no
        peer's, or one's own.
        """
        if self._closing:
            raise BadInput("this endpoint is closed")
        if peer_id == self.peer_id:
            raise BadInput("a process cannot dial itself")
        try:
            public_key_of(peer_id)
        except ProtocolError as error:
            raise BadInput(str(error)) from error
        link = self._peers.get(peer_id)
        if link is not None:
            return link
        dial = self._dials.get(peer_id)
        if dial is None:
            dial = self._dials[peer_id] = Dial(self._context, peer_id)
        dial.want(addresses, asyncio.get_running_loop().time() + timeout_s)
        dial.waiters += 1
        try:
            async with asyncio.timeout(timeout_s):
                link = await asyncio.shield(dial.found)
        except TimeoutError:
            why = "; ".join([*dict.fromkeys(dial.errors), f"timed out, nothing came within {timeout_s:g} s"])
            failure = unreachable(peer_id, why)
            failure.silent = not dial.errors
            raise failure from None
        finally:
            dial.waiters -= 1
            # A hello under way is seen through: the other side may have taken it for good.
            if not dial.waiters and not dial.greeted:
                self._give_up(dial)
        if link.closed:
            raise Unreachable(f"{peer_id} was reached, but the connection ended at once")
        return link

    async def close(self) -> None:
        """End all links (their handler hears nothing), dials, listeners and tasks."""
        if self._closing:
            return
        self._closing = True
        for server in self._servers:
            server.close()
        for dial in list(self._dials.values()):
            self._give_up(dial)
        await asyncio.gather(*(link.close() for link in self.links))
        for channel in list(self._channels):
            channel.abort()
        await asyncio.gather(*(asyncio.shield(channel.closed) for channel in self._channels))
        if self._ticker is not None:
            self._ticker.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self._servers:
            await server.wait_closed()

    # --- dials ---

    def _remember(self, peer_id: PeerId, nonce: bytes) -> bytes:
        last = self._last.get(peer_id, b"")
        self._last[peer_id] = nonce
        return last

    def _welcomed(self, dial: Dial, outbound: Outbound) -> None:
        machine = outbound.machine
        if self._dials.get(dial.peer_id) is not dial or machine.nonce is None:
            outbound.channel.abort()
            return
        outbound.taken = True
        link = self._link(dial.peer_id, "peer", machine.nonce, machine.instance, outbound.channel)
        self._establish(link, machine.rest)

    def _give_up(self, dial: Dial) -> None:
        """End a dial, unless a connection that the peer dialled meanwhile serves."""
        dial.greeted = False
        self._release(dial)
        if self._dials.get(dial.peer_id) is dial:
            del self._dials[dial.peer_id]
            dial.fail("this endpoint was closed" if self._closing else "")

    def _release(self, dial: Dial) -> None:
        held, dial.held = dial.held, None
        if held is not None and not held.gone:
            self._decide(held)

    # --- being dialled ---

    def _accept(self, channel: TlsChannel) -> None:
        self._answer(channel, tls_binding(self._certificate))

    async def _serve_stream(self, remote: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._streams is not None
        if self._closing:
            writer.close()
            return
        binding = stream_binding(remote, self._streams.peer_id)
        channel = StreamChannel(reader, writer, self._spawn)
        self._answer(channel, binding)
        try:
            await asyncio.shield(channel.closed)
        finally:
            channel.abort()

    def _answer(self, channel: Channel, binding: bytes) -> None:
        self._track(channel)
        machine = Answering(self.peer_id, self._instance, binding)
        inbound = Inbound(machine, on_hello=self._decide, on_gone=self._pending.discard)
        if self._closing or len(self._pending) >= self._admission.unauthenticated:
            inbound.turn_away(channel)
        else:
            self._pending.add(inbound)
            inbound.begin(channel, self._admission.handshake_s)

    def _decide(self, inbound: Inbound) -> None:
        """Whether a connection with a valid hello stays. Our own dial may have to be decided first."""
        hello = inbound.hello
        if hello.peer_id == self.peer_id or self._closing:
            inbound.refuse(Verdict.REFUSED, "this process has that id itself, or is closing")
            return
        if len(self._inbound) >= self._admission.inbound:
            inbound.refuse(Verdict.REFUSED, "this peer holds as many connections as it can")
            return
        if hello.role == "peer":
            link, dial = self._peers.get(hello.peer_id), self._dials.get(hello.peer_id)
            if link is not None and link.instance == hello.instance and link.nonce != hello.last:
                # The same process sent this hello before it knew of the link that there is: that one stays.
                inbound.refuse(Verdict.CROSSED)
                return
            if dial is not None and dial.greeted and self.peer_id < hello.peer_id:
                # The connection that the smaller id dialled stays, if it comes about.
                if dial.held is not None:
                    dial.held.refuse(Verdict.CROSSED)
                inbound.hold()
                dial.held = inbound
                return
        inbound.welcome()
        link = self._link(hello.peer_id, hello.role, inbound.machine.nonce, hello.instance, inbound.channel)
        self._inbound.add(link)
        self._establish(link, b"")

    # --- links ---

    def _link(self, remote: PeerId, role: str, nonce: bytes, instance: bytes, channel: Channel) -> Link:
        return Link(
            remote=remote,
            role=role,
            nonce=nonce,
            instance=instance,
            channel=channel,
            limits=self._limits,
            traffic=self.traffic,
            heartbeat=self._heartbeat,
            handler=self._handler,
            forget=self._forget,
            watch=self._watch,
            active=self._active,
            coordinates=self.coordinates,
        )

    def _establish(self, link: Link, rest: bytes) -> None:
        if link.role == "peer":
            dial = self._dials.pop(link.remote, None)
            old = [self._peers[link.remote]] if link.remote in self._peers else []
        else:
            dial = None
            old = [other for other in self._clients if other.remote == link.remote and other.instance == link.instance]
        for other in old:
            other.lose(f"{REPLACED} by a new connection from the same id")
        if link.role == "peer":
            self._peers[link.remote] = link
            self._remember(link.remote, link.nonce)
        else:
            self._clients.add(link)
        if dial is not None:
            if dial.held is not None:
                dial.held.refuse(Verdict.CROSSED)
            dial.succeed(link)
        link.begin(rest)

    def _forget(self, link: Link) -> None:
        if self._peers.get(link.remote) is link:
            del self._peers[link.remote]
        self._clients.discard(link)
        self._inbound.discard(link)

    def _watch(self) -> None:
        if self._ticker is None:
            # Not the loop's clock: uvloop's stands still while a callback runs, and counts in milliseconds.
            due = time.monotonic() + self._heartbeat.tick_s
            self._ticker = asyncio.get_running_loop().call_later(self._heartbeat.tick_s, self._tick, due)

    def _tick(self, due: float) -> None:
        self._ticker = None
        now = time.monotonic()
        links = [link for link in self.links if link.watched]
        for link in links:
            link.look(now, due)
        if links and not self._closing:
            self._watch()

    # --- what is owned ---

    def _track(self, channel: Channel) -> None:
        self._channels.add(channel)
        channel.closed.add_done_callback(lambda _: self._channels.discard(channel))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that this endpoint owns: cancelled and awaited in `close()`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "a task of an endpoint failed", "exception": task.exception(), "task": task}
            task.get_loop().call_exception_handler(context)


def _none() -> int:
    return 0
