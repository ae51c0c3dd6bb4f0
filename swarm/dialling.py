"""One dial: every way to a peer is tried, the first that leads to it is greeted, all others are dropped.

Owns the race between addresses and the stream fallback (after RFC 8305, happy eyeballs), and the hello on the
winner. Knows no other dial and no link: the endpoint says what becomes of the result.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from routing.errors import ProtocolError, SwarmError, Unreachable
from routing.types import PeerId
from swarm.channel import Channel, Spawn, StreamCarrier, StreamChannel, TlsChannel
from swarm.greeting import Inbound, Outbound
from swarm.handshake import Dialling, Verdict, check_certificate, stream_binding, tls_binding
from swarm.identity import Identity
from swarm.knock import connected, plainly
from swarm.link import Link

PROTOCOL = "swarm-frames-1"  # the name of the fallback's streams
_STAGGER_S = 0.2  # between two addresses, unless the first fails sooner
# The fallback joins the race then, unless an address is in the midst of its TLS handshake, or when all have failed.
_STREAM_AFTER_S = 1.5
_LATE_S = 0.3
_HELLOS = 3  # in one dial: another connection may have crossed this one, or just ended
_CROSSED_S = 0.05  # for a connection that crossed to arrive here, too


@dataclass(frozen=True, slots=True, kw_only=True)
class DialContext:
    """What a dial needs of its endpoint."""

    identity: Identity
    role: str
    instance: bytes
    tls: ssl.SSLContext
    streams: StreamCarrier | None
    direct: bool
    handshake_s: float
    spawn: Spawn
    track: Callable[[Channel], None]
    remember: Callable[[PeerId, bytes], bytes]  # a connection's nonce; returns the one known before
    welcomed: Callable[[Dial, Outbound], None]
    release: Callable[[Dial], None]  # a connection held back for this dial's sake may be decided
    failed: Callable[[Dial], None]


class Dial:
    """The way to one peer, sought for however many wait for it. `found` brings the link, or Unreachable."""

    def __init__(self, context: DialContext, peer_id: PeerId):
        self.peer_id = peer_id
        self.found: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.greeted = False  # a hello of ours is under way: the other side may have taken it
        self.held: Inbound | None = None
        self.errors: list[str] = []
        self._context = context
        self._addresses: list[str] = []
        self._deadline = 0.0  # of the most patient waiter
        self._open: set[Outbound] = set()
        self._shaking: set[str] = set()  # addresses that took our connection: slow ones are better than a stream
        self._task: asyncio.Task[None] | None = None

    def want(self, addresses: Iterable[str], deadline: float) -> None:
        """One more waits, and knows these addresses."""
        self._addresses.extend(address for address in addresses if address not in self._addresses)
        self._deadline = max(self._deadline, deadline)
        if self._task is None:
            self._task = self._context.spawn(self._run())

    def succeed(self, link: Link) -> None:
        if not self.found.done():
            self.found.set_result(link)
        self._end()

    def fail(self, why: str = "") -> None:
        if not self.found.done():
            reasons = "; ".join([*dict.fromkeys(self.errors), *filter(None, [why])]) or "no address is known"
            self.found.set_exception(unreachable(self.peer_id, reasons))
            self.found.exception()  # perhaps nobody is left to look at it
        self._end()

    def _end(self) -> None:
        self.greeted = False
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._abort_others()

    def _abort_others(self, winner: Outbound | None = None) -> None:
        for outbound in [other for other in self._open if other is not winner]:
            self._open.discard(outbound)
            if not outbound.taken:
                outbound.channel.abort()

    async def _run(self) -> None:
        try:
            for _ in range(_HELLOS):
                outbound = await self._race()
                if outbound is None:
                    break
                verdict = await self._greet(outbound)
                self.greeted = False
                self._abort_others()
                if verdict is Verdict.REFUSED:
                    break
                self._context.release(self)
                if self.found.done():
                    return
                if not self.waiters:
                    break
                await asyncio.sleep(_CROSSED_S)
            self._context.failed(self)
        finally:
            self._abort_others()

    async def _greet(self, outbound: Outbound) -> Verdict | None:
        """What became of our hello. If it is welcome, this task is cancelled before it comes here."""
        nonce = await outbound.ready()
        last = self._context.remember(self.peer_id, nonce)
        self.greeted = True
        outbound.channel.write([outbound.machine.hello(self._context.instance, last)])
        try:
            async with asyncio.timeout(self._context.handshake_s):
                answer = await outbound.answered()
        except TimeoutError:
            self.errors.append(f"no answer to the hello within {self._context.handshake_s:g} s")
        except SwarmError as error:
            self.errors.append(str(error))
        else:
            self.errors.append(answer.text or "another connection crossed this one")
            return answer.verdict
        return None

    async def _race(self) -> Outbound | None:
        """The first way over which the peer has shown who it is; None if there is none left to try."""
        clock = asyncio.get_running_loop().time
        streams, next_start = self._context.streams is not None, clock()
        stream_start, overslept = next_start + _STREAM_AFTER_S, False
        tried: set[str] = set()
        running: set[asyncio.Task[Outbound | str]] = set()
        try:
            while True:
                untried = [address for address in self._addresses if self._context.direct and address not in tried]
                if untried and (not running or clock() >= next_start):
                    tried.add(untried[0])
                    running.add(self._context.spawn(self._try_address(untried.pop(0))))
                    next_start = clock() + _STAGGER_S
                elif streams and not untried and (not running or (clock() >= stream_start and not self._shaking)):
                    streams = False
                    running.add(self._context.spawn(self._try_stream()))
                if not running:
                    return None
                due = next_start if untried else stream_start if streams and not self._shaking else None
                patience = None if due is None else max(0.0, due - clock())
                done, running = await asyncio.wait(running, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if due is not None and not overslept and clock() > due + _LATE_S:
                    # This very process was held up: an address may have answered, and nobody has looked yet.
                    overslept, stream_start = True, clock() + _STREAM_AFTER_S
                for task in done:
                    result = task.result()
                    if isinstance(result, Outbound):
                        self._abort_others(result)
                        return result
                    self.errors.append(result)
        finally:
            for task in running:
                task.cancel()

    async def _try_address(self, address: str) -> Outbound | str:
        """A connection whose certificate is the wanted peer's; or what went wrong."""
        made: list[Outbound] = []

        def on_made(channel: TlsChannel) -> None:
            certificate = channel.peer_certificate
            outbound = self._outbound(tls_binding(certificate))
            made.append(outbound)
            self._context.track(channel)
            try:
                check_certificate(certificate, self.peer_id)
            except ProtocolError as error:
                outbound.fail(channel, error)
            else:
                self._open.add(outbound)
                outbound.begin(channel)

        try:
            raw = await connected(address)
            self._shaking.add(address)
            await asyncio.get_running_loop().create_connection(
                lambda: TlsChannel(on_made),
                sock=raw,
                ssl=self._context.tls,
                server_hostname="",  # no name is sent: the certificate names none
                ssl_handshake_timeout=self._context.handshake_s,
                ssl_shutdown_timeout=1.0,
            )
            await made[0].ready()
        except (OSError, ValueError, SwarmError) as error:
            return f"{address}: {plainly(error)}"
        finally:
            self._shaking.discard(address)
        return made[0]

    async def _try_stream(self) -> Outbound | str:
        streams = self._context.streams
        assert streams is not None
        left = max(0.1, self._deadline - asyncio.get_running_loop().time())
        outbound = self._outbound(stream_binding(streams.peer_id, self.peer_id))
        try:
            reader, writer = await streams.open(self.peer_id, PROTOCOL, left)
            channel = StreamChannel(reader, writer, self._context.spawn)
            self._context.track(channel)
            self._open.add(outbound)
            outbound.begin(channel)
            await outbound.ready()
        except (OSError, SwarmError) as error:
            return f"stream: {str(error).removeprefix(f'stream {PROTOCOL!r} to {self.peer_id}: ')}"
        return outbound

    def _outbound(self, binding: bytes) -> Outbound:
        machine = Dialling(self._context.identity, self._context.role, self.peer_id, binding)
        return Outbound(machine, lambda outbound: self._context.welcomed(self, outbound))


def unreachable(peer_id: PeerId, why: str) -> Unreachable:
    error = Unreachable(f"{peer_id} cannot be reached: {why}")
    error.why = why
    return error
