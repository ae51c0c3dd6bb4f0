"""One life of p2pd: hivemind's P2P and DHTNode on our own event loop, and nothing of hivemind beyond here.

Owns how p2pd is started and ended, what is refused for our DHT, and each call to the DHT and to the streams. The
only module that imports hivemind: its exceptions become ours here, each call has a deadline, and no call outlives
its p2pd. Does not know when to start p2pd again, nor what the records mean (a policy says which may be stored).

Nothing here speaks to a host outside the swarm: p2pd is started without bootstrap peers of its own (ours are
dialled one by one), without NAT mapping, AutoNAT, AutoRelay, relay discovery or relay service.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import MAX_DHT_TIME_DISCREPANCY_SECONDS, get_dht_time

from routing.errors import BadInput, DaemonFailed, PortInUse, ProtocolError, TimedOut, Unreachable
from routing.types import PeerId
from swarm.identity import Identity
from swarm.records import RecordPolicy
from swarm.scratch import Scratch

log = logging.getLogger(__name__)

StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Targets = dict[PeerId, list[Multiaddr]]

RPC_S = 3.0  # hivemind's own deadline of one call to one node
NOTICED_S = 1.0  # from the death of p2pd, as its socket shows it, until the system tells
MOST_SKEW_S: float = MAX_DHT_TIME_DISCREPANCY_SECONDS
dht_clock: Callable[[], float] = get_dht_time  # seconds since 1970

_REPLICAS = 5
_IDENTITY = "identity"
# p2pd in a process group of its own: Ctrl-C reaches the whole group of the terminal, and p2pd has to outlive us by
# the goodbye that goes through it. The process stays the same, only its program is replaced.
_GROUP = "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
_APART = (sys.executable, "-I", "-S", "-c", _GROUP)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is stored in the DHT: `value` for (`key`, `subkey`) until `expires_at`, in DHT time."""

    key: str
    subkey: str
    value: bytes
    expires_at: float


class Validator(RecordValidatorBase):
    """Our policy, asked by hivemind for everything that another node stores here or answers."""

    def __init__(self, policy: RecordPolicy, clock: Callable[[], float]):
        self._policy = policy
        self._clock = clock
        self._keys = {DHTID.generate(source=key).to_bytes(): key for key in policy}

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey = msgspec.msgpack.decode(record.subkey, type=str | None)
            value = msgspec.msgpack.decode(record.value, type=bytes)
            key = self._keys.get(record.key, "")
            self._policy.check(key, subkey, value, self._clock(), record.expiration_time)
        except (msgspec.MsgspecError, ProtocolError) as error:
            log.debug("refused a record: %s", error)
            return False
        return True

    def prune(self, key: bytes, entries: Any) -> bool:
        """Drop what the policy refuses from a dictionary. hivemind would refuse the whole dictionary for one
        stale entry, which would hide all other peers of that key."""
        with entries.freeze():
            refused = [
                subkey
                for subkey, (value, expires_at) in entries.items()
                if not self.validate(DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires_at))
            ]
            for subkey in refused:
                del entries[subkey]
        return True


class Life:
    """One life of p2pd. What waits for it ends at once when it dies: hivemind itself would wait for ever."""

    def __init__(self, p2p: P2P, folder: Scratch):
        self.p2p = p2p
        self._folder = folder  # of its control sockets
        Path(folder.name, _IDENTITY).unlink()  # it has been read
        self.node: DHTNode = None  # set by `Recipe.launch` before anybody else sees this
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
            raise Unreachable(f"{what}: {_reason(error)}") from error
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
        if self.node is not None:
            self.node.is_alive = False  # its handlers end with p2pd; asking it to remove them could hang
        self._watch.cancel()
        await _end(self.p2p)
        self._folder.cleanup()

    # Calls to p2pd and to the DHT, all to be made `within` a deadline, which translates their errors

    async def addresses(self) -> list[str]:
        """Multiaddrs under which others reach this node, with its peer id."""
        try:
            return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # hivemind's way to say that there are none
            return []

    async def neighbours(self) -> Targets:
        """Who is connected, and from where."""
        return {str(peer.peer_id): list(peer.addrs) for peer in await self.p2p.list_peers()}

    @property
    def knows_nobody(self) -> bool:
        """Whether the DHT's routing table is empty."""
        return not self.node.protocol.routing_table.uid_to_peer_id

    async def greet(self, peer_id: PeerId, addresses: Sequence[Multiaddr], clock: Callable[[], float]) -> float:
        """Connect to `peer_id`, ask for its time, and return the seconds that `clock` is ahead of it (negative:
        behind), less what the round trip hides. Raises Unreachable with the bare reason."""
        peer = PeerID.from_base58(peer_id)
        # An empty node info: a node that will be refused is not put into others' routing tables first.
        question = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
        try:
            await self.p2p._client.connect(peer, addresses)
            asked = clock()
            answer = await self.node.protocol.get_stub(peer).rpc_ping(question, timeout=RPC_S)
            answered = clock()
        except (P2PDaemonError, P2PHandlerError, TimeoutError, OSError, EOFError) as error:
            raise Unreachable(_reason(error) or "no answer") from error
        return max(asked - answer.dht_time, 0.0) + min(answered - answer.dht_time, 0.0)

    async def enter(self, peer_ids: Iterable[PeerId]) -> None:
        """Fill the routing table through `peer_ids`, which are connected."""
        protocol = self.node.protocol
        await asyncio.gather(*(protocol.call_ping(PeerID.from_base58(peer_id)) for peer_id in peer_ids))
        await self.node.find_nearest_nodes([self.node.node_id])

    def inherit(self, dead: Life) -> None:
        """Keep what others stored at `dead`, which is still valid."""
        self.node.protocol.storage = dead.node.protocol.storage

    async def store(self, entries: Sequence[Entry], *, elsewhere: bool) -> int:
        """Store `entries` in one batch, if `elsewhere` not at this node; returns how many were taken."""
        taken = await self.node.store_many(
            keys=[entry.key for entry in entries],
            values=[entry.value for entry in entries],
            expiration_time=[float(entry.expires_at) for entry in entries],
            subkeys=[entry.subkey for entry in entries],
            exclude_self=elsewhere,
        )
        return sum(bool(ok) for ok in taken.values())

    async def fetch(self, keys: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """All values of each key by subkey, from all nodes that hold it, in one batch."""
        # Any smaller time would end each search at the first node that knows anything.
        found = await self.node.get_many(keys, sufficient_expiration_time=math.inf)
        return {
            key: {
                subkey: item.value
                for subkey, item in entry.value.items()
                if isinstance(subkey, str) and isinstance(item.value, bytes)
            }
            if entry is not None and isinstance(entry.value, dict)
            else {}
            for key, entry in found.items()
        }

    async def holders(self, keys: Sequence[str], count: int) -> dict[str, list[PeerId]]:
        """The `count` other nodes nearest to each key, nearest first: those that store its values."""
        # Asked for a key, a node sends all values that it has; so we ask for the key beside it, which nobody stores.
        beside = {DHTID(DHTID.generate(source=key) ^ 1): key for key in keys}
        found = await self.node.find_nearest_nodes(list(beside), k_nearest=count, exclude_self=True)
        return {beside[near]: [str(peer_id) for peer_id in nodes.values()] for near, nodes in found.items()}

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
    daemon: str | None
    announce: tuple[str, ...]
    client: bool

    async def launch(self, validator: Validator) -> Life:
        """A p2pd and a DHT node on it, which knows nobody yet. Raises DaemonFailed, PortInUse, BadInput."""
        use_hivemind_log_handler("nowhere")  # its messages go where the program's own go
        version = refuse_taken_port(self.host, self.port)
        if self.daemon is not None and shutil.which(self.daemon) is None:
            raise DaemonFailed(f"p2pd did not start: {self.daemon} was not found, or cannot be run")
        p2p: list[P2P] = []  # filled before p2pd starts, so that it ends with us whatever happens
        try:
            folder = Scratch()
        except OSError as error:
            raise DaemonFailed(f"p2pd did not start: no folder can be made for its sockets: {error}") from error
        daemon = self.daemon

        class Daemon(P2P):
            _UNIX_SOCKET_PREFIX = f"/unix{folder.name}/"

            def __init__(self) -> None:
                super().__init__()
                p2p.append(self)

            @staticmethod
            def _make_process_args(executable: str, *args: Any, **flags: Any) -> list[str]:
                # hivemind takes p2pd from its package and knows no switch for these two: both are set here.
                flags.update(relayService=False, relayDiscovery=False)
                return [*_APART, *P2P._make_process_args(daemon or executable, *args, **flags)]

        life: Life | None = None
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
            life = Life(p2p[0], folder)
            async with life.within(self.startup_timeout_s, "start the DHT node"):
                life.node = await DHTNode.create(
                    p2p=life.p2p,
                    node_id=DHTID.generate(source=self.identity.peer_id),  # the same after a restart
                    client_mode=self.client,
                    record_validator=validator,
                    num_replicas=_REPLICAS,
                    wait_timeout=RPC_S,
                    cache_locally=False,  # who is there now is the question, not who was
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                )
            life.node.protocol._validate_dictionary = validator.prune
        except BaseException as error:
            if life is not None:
                await life.end()
            elif p2p:
                await _end(p2p[0])
            folder.cleanup()
            if isinstance(error, (P2PDaemonError, OSError, EOFError, TimedOut, Unreachable)):
                raise DaemonFailed(f"p2pd did not start: {_reason(error) or 'no answer'}") from error
            raise
        return life


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


def _reason(error: BaseException) -> str:
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
