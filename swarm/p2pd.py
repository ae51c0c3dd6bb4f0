"""One life of p2pd: hivemind's P2P on our own event loop.

Owns how p2pd is started and ended, and each call to it. hivemind is imported here and in `dht.py` alone: its exceptions
become ours here, each call has a deadline, and no call outlives its p2pd. Does not know when to start p2pd again.

Nothing here speaks to a host outside the swarm: p2pd is started without bootstrap peers of its own (ours are
dialled one by one), without NAT mapping, AutoNAT, AutoRelay, relay discovery or relay service.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from routing.errors import BadInput, DaemonFailed, PortInUse, TimedOut, Unreachable
from routing.types import PeerId
from swarm.identity import Identity
from swarm.scratch import Scratch

log = logging.getLogger(__name__)

StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Targets = dict[PeerId, list[Multiaddr]]

RPC_S = 3.0  # hivemind's own deadline of one call to one node
NOTICED_S = 1.0  # from the death of p2pd, as its socket shows it, until the system tells
MOST_SKEW_S: float = MAX_DHT_TIME_DISCREPANCY_SECONDS
dht_clock: Callable[[], float] = get_dht_time  # seconds since 1970

_IDENTITY = "identity"
# p2pd in a process group of its own: Ctrl-C reaches the whole group of the terminal, and p2pd has to outlive us by
# the goodbye that goes through it. The process stays the same, only its program is replaced.
_GROUP = "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
_APART = (sys.executable, "-I", "-S", "-c", _GROUP)


class Life:
    """One life of p2pd. What waits for it ends at once when it dies: hivemind itself would wait for ever."""

    def __init__(self, p2p: P2P, folder: Scratch):
        self.p2p = p2p
        self._folder = folder  # of its control sockets
        Path(folder.name, _IDENTITY).unlink()  # it has been read
        self.lost = asyncio.Event()
        self.began = asyncio.get_running_loop().time()
        self._deadlines: set[asyncio.Timeout] = set()
        self._watch = asyncio.create_task(self._watch_child())

    async def _watch_child(self) -> None:
        await self.p2p._child.wait()  # private, and the only way to know
        self._lose()

    def _lose(self) -> None:
        self.lost.set()
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now)

    @asynccontextmanager
    async def within(self, timeout_s: float, what: str) -> AsyncIterator[asyncio.Timeout]:
        """A deadline for calls to hivemind, whose errors become ours: TimedOut, DaemonFailed, Unreachable."""
        if self.lost.is_set():
            raise DaemonFailed(f"{what}: p2pd has ended")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    yield deadline
                finally:
                    self._deadlines.discard(deadline)
        except TimeoutError:
            if self.lost.is_set():
                raise DaemonFailed(f"{what}: p2pd has ended") from None
            raise TimedOut(f"{what}: no answer within {timeout_s:.1f} s") from None
        except (P2PDaemonError, P2PHandlerError) as error:
            raise Unreachable(f"{what}: {reason_of(error)}") from error
        except (OSError, EOFError) as error:  # its control socket is gone
            # The next call would meet the same socket until its death is noticed; after that it waits for the restart.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lost.wait(), NOTICED_S)
            raise DaemonFailed(f"{what}: p2pd does not answer ({error})") from error

    @property
    def pid(self) -> int:
        """The process id of p2pd, also after its death."""
        return self.p2p._child.pid

    async def end(self) -> None:
        self._lose()
        self._watch.cancel()
        await _end(self.p2p)
        self._folder.cleanup()

    # Calls to p2pd, all to be made `within` a deadline, which translates their errors

    async def addresses(self) -> list[str]:
        """Multiaddrs under which others reach this node, with its peer id."""
        try:
            return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # hivemind's way to say that there are none
            return []

    async def neighbours(self) -> Targets:
        """Who is connected, and from where."""
        return {str(peer.peer_id): list(peer.addrs) for peer in await self.p2p.list_peers()}

    async def open(self, target: PeerID, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to `target`, authenticated and encrypted by libp2p."""
        _, reader, writer = await self.p2p.call_binary_stream_handler(target, protocol)
        return reader, writer

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Give each incoming stream of `protocol` to `handler`."""

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(str(info.peer_id), reader, writer)

        await self.p2p.add_binary_stream_handler(protocol, accept)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How p2pd is started, the first time and again."""

    identity: Identity
    host: str
    port: int
    startup_timeout_s: float
    program: str | None  # another p2pd executable
    announce: tuple[str, ...]
    client: bool

    async def launch(self) -> Life:
        """A p2pd that knows nobody yet. Raises DaemonFailed, PortInUse, BadInput."""
        use_hivemind_log_handler("nowhere")  # its messages go where the program's own go
        version = refuse_taken_port(self.host, self.port)
        if self.program is not None and shutil.which(self.program) is None:
            raise DaemonFailed(f"p2pd did not start: {self.program} was not found, or cannot be run")
        p2p: list[P2P] = []  # filled before p2pd starts, so that it ends with us whatever happens
        try:
            folder = Scratch()
        except OSError as error:
            raise DaemonFailed(f"p2pd did not start: no folder can be made for its sockets: {error}") from error
        program = self.program

        class Daemon(P2P):
            _UNIX_SOCKET_PREFIX = f"/unix{folder.name}/"

            def __init__(self) -> None:
                super().__init__()
                p2p.append(self)

            @staticmethod
            def _make_process_args(executable: str, *args: Any, **flags: Any) -> list[str]:
                # hivemind takes p2pd from its package and knows no switch for these two: both are set here.
                flags.update(relayService=False, relayDiscovery=False)
                return [*_APART, *P2P._make_process_args(program or executable, *args, **flags)]

        try:
            path = str(Path(folder.name, _IDENTITY))
            self.identity.save(path)
            async with asyncio.timeout(self.startup_timeout_s + RPC_S):
                await Daemon.create(
                    host_maddrs=[f"/ip{version}/{self.host}/tcp/{self.port}"],
                    announce_maddrs=self.announce or None,
                    identity_path=path,
                    check_if_identity_free=False,  # it would start a second p2pd
                    dht_mode="client" if self.client else "server",
                    startup_timeout=self.startup_timeout_s,
                    idle_timeout=self.startup_timeout_s,
                    auto_nat=False,
                    nat_port_map=False,
                    use_auto_relay=False,
                    use_ipfs=False,
                )
            if str(p2p[0].peer_id) != self.identity.peer_id:
                raise DaemonFailed(f"p2pd took the identity {p2p[0].peer_id}, not {self.identity.peer_id}")
            return Life(p2p[0], folder)
        except BaseException as error:
            if p2p:
                await _end(p2p[0])
            folder.cleanup()
            if isinstance(error, (P2PDaemonError, OSError, EOFError)):
                raise DaemonFailed(f"p2pd did not start: {reason_of(error) or 'no answer'}") from error
            raise


async def _end(p2p: P2P) -> None:
    """End p2pd, by force if it does not listen, and collect how hivemind's tasks on its socket ended."""
    if p2p._client is not None:
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        async with asyncio.timeout(RPC_S):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()


def reason_of(error: BaseException) -> str:
    """The last and most telling line of a message of p2pd."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip(" *").removeprefix("Connect failed. msg=") if lines else ""


def parse_peer_id(text: str) -> PeerID:
    """A peer id in base58. Raises BadInput."""
    try:
        return PeerID.from_base58(text)
    except ValueError:
        raise BadInput(f"{text[:64]!r} is not a peer id") from None


def parse_bootstrap(addresses: Iterable[str]) -> Targets:
    """Peer id -> where it listens. Raises BadInput."""
    targets: Targets = {}
    for address in addresses:
        place, _, peer_id = address.rpartition("/p2p/")
        try:
            if not place or not peer_id:
                raise ValueError("no peer id in it")
            PeerID.from_base58(peer_id)
            targets.setdefault(peer_id, []).append(Multiaddr(place))
        except ValueError as error:
            reason = f"{address!r} is not a multiaddr that ends in /p2p/PEER_ID: {error}"
            raise BadInput(reason) from None
    return targets


def refuse_taken_port(host: str, port: int) -> int:
    """4 or 6, the IP version of `host`. p2pd would share a taken port with its holder, in silence."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise BadInput(f"{host!r} is not an IP address to listen on") from None
    with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"port {port} on {host} is taken") from None
            raise BadInput(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return version
