"""The control plane: hivemind's P2P and DHTNode on our own event loop, behind one adapter.

Owns the p2pd process, its restart, the way into the DHT, and raw streams to other nodes. The only module that
imports hivemind: its exceptions become ours here, each call has a deadline, and no call outlives its p2pd.
Does not know what the records mean (a policy says which may be stored) nor what the streams carry.

Nothing here speaks to a host outside the swarm: p2pd is started without bootstrap peers of its own (ours are
dialled one by one), without NAT mapping, AutoNAT, AutoRelay, relay discovery or relay service.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import random
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
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

from routing.errors import (
    BadInput,
    ClockSkew,
    DaemonFailed,
    JoinError,
    PortInUse,
    ProtocolError,
    SwarmError,
    TimedOut,
    Unreachable,
)
from routing.retry import RetryPolicy
from routing.types import PeerId
from swarm.identity import Identity
from swarm.records import RecordPolicy

log = logging.getLogger(__name__)

StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Targets = dict[PeerId, list[Multiaddr]]

_REPLICAS = 5
_RPC_S = 3.0  # hivemind's own deadline of one call to one node
_STRAGGLERS_S = 1.0  # after the first bootstrap peer has answered
_MOST_KNOWN = 64
_IDENTITY = "identity"
_BLOB = "swarm.blob.1/"
_BLOB_S = 60.0
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is stored in the DHT: `value` for (`key`, `subkey`) until `expires_at`, in DHT time."""

    key: str
    subkey: str
    value: bytes
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How a node looks after itself. `restart` is used up by deaths that follow within `healthy_after_s`."""

    join_timeout_s: float = 20.0
    look_every_s: float = 5.0  # who is connected, and are we alone
    healthy_after_s: float = 60.0
    restart: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(deadline_s=300.0, attempts=8, base_s=0.2, cap_s=30.0)
    )


class _Validator(RecordValidatorBase):
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


class _Life:
    """One life of p2pd. What waits for it ends at once when it dies: hivemind itself would wait for ever."""

    def __init__(self, p2p: P2P, folder: tempfile.TemporaryDirectory[str]):
        self.p2p = p2p
        self._folder = folder  # of its control sockets
        Path(folder.name, _IDENTITY).unlink()  # it has been read
        self.node: DHTNode = None  # set by `_Recipe.launch` before anybody else sees this
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
            raise DaemonFailed(f"{what}: p2pd does not answer ({error})") from error

    async def end(self) -> None:
        self._lose()
        if self.node is not None:
            self.node.is_alive = False  # its handlers end with p2pd; asking it to remove them could hang
        self._watch.cancel()
        await _end(self.p2p)
        self._folder.cleanup()


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """How p2pd is started, the first time and again."""

    identity: Identity
    host: str
    port: int
    startup_timeout_s: float
    daemon: str | None
    announce: tuple[str, ...]
    client: bool

    async def launch(self, validator: _Validator) -> _Life:
        """A p2pd and a DHT node on it, which knows nobody yet. Raises DaemonFailed, PortInUse, BadInput."""
        version = _refuse_taken_port(self.host, self.port)
        p2p: list[P2P] = []  # filled before p2pd starts, so that it ends with us whatever happens
        folder = tempfile.TemporaryDirectory(prefix="swarm-")
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
                return P2P._make_process_args(daemon or executable, *args, **flags)

        life: _Life | None = None
        try:
            path = str(Path(folder.name, _IDENTITY))
            self.identity.save(path)
            async with asyncio.timeout(self.startup_timeout_s + _RPC_S):
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
            life = _Life(p2p[0], folder)
            async with life.within(self.startup_timeout_s, "start the DHT node"):
                life.node = await DHTNode.create(
                    p2p=life.p2p,
                    node_id=DHTID.generate(source=self.identity.peer_id),  # the same after a restart
                    client_mode=self.client,
                    record_validator=validator,
                    num_replicas=_REPLICAS,
                    wait_timeout=_RPC_S,
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


class Hive:
    """A node of the control plane. Start it with `Hive.start`, end it with `close` or `async with`."""

    def __init__(
        self,
        recipe: _Recipe,
        *,
        bootstrap: Targets,
        record_policy: RecordPolicy,
        upkeep: Upkeep,
        clock: Callable[[], float],
    ):
        self.peer_id: PeerId = recipe.identity.peer_id
        self.record_policy = record_policy
        self.on_restart: list[Callable[[], Awaitable[None]]] = []
        self._recipe = recipe
        self._bootstrap = bootstrap
        self._known: Targets = {}
        self._upkeep = upkeep
        self._clock = clock
        self._validator = _Validator(record_policy, clock)
        self._handlers: dict[str, Callable[..., Awaitable[None]]] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._life: _Life | None = None
        self._up = asyncio.Event()  # set while p2pd lives, and for good once `_failure` says why it does not
        self._failure = ""
        self._supervisor: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        *,
        identity: Identity,
        bootstrap: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        record_policy: RecordPolicy,
        startup_timeout_s: float = 120.0,
        daemon: str | None = None,
        announce: Sequence[str] = (),
        client: bool = False,
        upkeep: Upkeep | None = None,
        clock: Callable[[], float] = get_dht_time,
    ) -> Hive:
        """Start p2pd and join the DHT through `bootstrap` (multiaddrs ending in /p2p/PEER_ID, not one's own).

        `host` is the IP address to listen on; port 0 leaves the port to the system; others are told the
        multiaddrs `announce` instead, if given. `daemon` replaces hivemind's p2pd executable. A `client`
        asks, and stores nothing for others. Raises BadInput, PortInUse, DaemonFailed, Unreachable (naming the
        addresses that did not answer), ClockSkew.
        """
        use_hivemind_log_handler("nowhere")  # its messages go where the program's own go
        recipe = _Recipe(
            identity=identity,
            host=host,
            port=port,
            startup_timeout_s=startup_timeout_s,
            daemon=daemon,
            announce=tuple(announce),
            client=client,
        )
        targets = _parse_bootstrap(bootstrap)
        targets.pop(identity.peer_id, None)
        upkeep = upkeep or Upkeep()
        hive = cls(recipe, bootstrap=targets, record_policy=record_policy, upkeep=upkeep, clock=clock)
        life = await recipe.launch(hive._validator)
        try:
            if port == 0 and not announce:
                # A restarted p2pd must be found at the same address.
                hive._recipe = replace(recipe, port=await hive._port_of(life))
            if targets:
                await hive._join(life, targets, upkeep.join_timeout_s)
        except BaseException:
            await life.end()
            raise
        hive._life = life
        hive._up.set()
        hive._supervisor = asyncio.create_task(hive._supervise(life))
        return hive

    async def __aenter__(self) -> Hive:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the node, its streams and its p2pd. Calls that still wait raise DaemonFailed."""
        self._failure = self._failure or "this node is closed"
        self._up.set()
        tasks = [self._supervisor, *self._streams] if self._supervisor is not None else []
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                log.error("a task of the node ended badly", exc_info=ended)
        if self._life is not None:
            await self._life.end()

    @property
    def daemon_pid(self) -> int | None:
        """The process id of p2pd, while it lives."""
        return None if self._life is None or self._life.lost.is_set() else self._life.p2p._child.pid

    def dht_time(self) -> float:
        """The clock of expiries, seconds."""
        return self._clock()

    async def addresses(self, timeout_s: float = 10.0) -> list[str]:
        """Multiaddrs under which others reach this node, with its peer id; may be empty behind a relay."""
        async with self._within(timeout_s, "own addresses") as life:
            return await _addresses(life)

    # The DHT

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        """Store all `entries` in one batch; returns how many were taken. Raises TimedOut, DaemonFailed."""
        if not entries:
            return 0
        async with self._within(timeout_s, "store in the DHT") as life:
            taken = await life.node.store_many(
                keys=[entry.key for entry in entries],
                values=[entry.value for entry in entries],
                expiration_time=[float(entry.expires_at) for entry in entries],
                subkeys=[entry.subkey for entry in entries],
                exclude_self=self._recipe.client,
            )
        return sum(bool(ok) for ok in taken.values())

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        """All values of each key by subkey, from all nodes that hold it, in one batch.

        Other nodes' answers have passed the policy; whoever uses a value still checks it. Raises TimedOut,
        DaemonFailed.
        """
        async with self._within(timeout_s, "read from the DHT") as life:
            # Any smaller time would end each search at the first node that knows anything.
            found = await life.node.get_many(keys, sufficient_expiration_time=math.inf)
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

    # Raw streams

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to `peer_id`, authenticated and encrypted by libp2p.

        Raises BadInput, Unreachable, TimedOut, DaemonFailed.
        """
        what = f"stream {protocol!r} to {peer_id}"
        try:
            target = PeerID.from_base58(peer_id)
        except ValueError:
            raise BadInput(f"{peer_id[:64]!r} is not a peer id") from None
        async with self._within(timeout_s, what) as life:
            _, reader, writer = await life.p2p.call_binary_stream_handler(target, protocol)
        return reader, writer

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Give each incoming stream of `protocol` to `handler`, with the id of whoever opened it.

        The stream is closed when the handler returns. Kept over restarts of p2pd. Raises TimedOut,
        DaemonFailed.
        """

        async def accept(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await handler(str(info.peer_id), reader, writer)
            except (OSError, EOFError, SwarmError) as error:
                log.debug("stream %s from %s ended: %r", protocol, info.peer_id, error)
            except asyncio.CancelledError:
                if not self._failure:  # else `close` ends it, and nobody waits for this task's result
                    raise
            finally:
                self._streams.discard(task)
                writer.close()

        async with self._within(self._recipe.startup_timeout_s, f"serve {protocol!r}") as life:
            await life.p2p.add_binary_stream_handler(protocol, accept)
        self._handlers[protocol] = accept

    async def serve_blob(self, name: str, get: Callable[[], bytes]) -> None:
        """Give the bytes of `get()` to whoever asks for `name`."""

        async def send(_: PeerId, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with asyncio.timeout(_BLOB_S):  # a reader that stalls must not hold the bytes for ever
                data = memoryview(get())
                writer.write(len(data).to_bytes(8, "little"))
                for at in range(0, len(data), _CHUNK_BYTES):
                    writer.write(data[at : at + _CHUNK_BYTES])
                    await writer.drain()

        await self.serve(_BLOB + name, send)

    async def fetch_blob(self, peer_id: PeerId, name: str, timeout_s: float, max_bytes: int) -> bytes:
        """The bytes that `peer_id` serves under `name`.

        Raises Unreachable (also if it serves no such thing, or breaks off), ProtocolError if there are more
        than `max_bytes`, TimedOut, DaemonFailed. What came is not checked here.
        """
        what = f"{name!r} from {peer_id}"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self.open(peer_id, _BLOB + name, timeout_s)
                try:
                    size = int.from_bytes(await reader.readexactly(8), "little")
                    if size > max_bytes:
                        raise ProtocolError(f"{what} has {size} bytes; at most {max_bytes} are taken")
                    return await reader.readexactly(size)
                finally:
                    writer.close()
        except TimeoutError:
            raise TimedOut(f"{what}: not complete within {timeout_s:.1f} s") from None
        except (ConnectionError, EOFError) as error:
            raise Unreachable(f"{what}: the stream broke off") from error

    # The life of p2pd

    @asynccontextmanager
    async def _within(self, timeout_s: float, what: str) -> AsyncIterator[_Life]:
        """The living p2pd, waiting for its restart if need be, and a deadline over all."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not self._failure and (self._life is None or self._life.lost.is_set()):
                    self._up.clear()
                    await self._up.wait()
        except TimeoutError:
            raise TimedOut(f"{what}: p2pd was not back within {timeout_s:.1f} s") from None
        if self._failure or self._life is None:
            raise DaemonFailed(f"{what}: {self._failure}")
        async with self._life.within(max(0.0, end - clock()), what):
            yield self._life

    async def _join(self, life: _Life, targets: Targets, timeout_s: float) -> None:
        """Greet all `targets` at once and fill the routing table through those that answer."""
        skews: dict[PeerId, float] = {}
        reasons: dict[PeerId, str] = {}

        async def greet(peer_id: PeerId, deadline: asyncio.Timeout) -> None:
            peer = PeerID.from_base58(peer_id)
            try:
                await life.p2p._client.connect(peer, targets[peer_id])
                skew = await self._measure_skew(life, peer)
            except (P2PDaemonError, P2PHandlerError, TimeoutError, OSError, EOFError) as error:
                reasons[peer_id] = _reason(error) or "no answer"
                return
            skews[peer_id] = skew
            soon = asyncio.get_running_loop().time() + _STRAGGLERS_S
            if not deadline.expired():
                deadline.reschedule(min(soon, deadline.when() or soon))

        with suppress(TimedOut):
            async with life.within(timeout_s, "join the swarm") as deadline, asyncio.TaskGroup() as group:
                for peer_id in targets:
                    group.create_task(greet(peer_id, deadline))
        if not skews:
            named = [
                f"{address}/p2p/{peer_id} ({reasons.get(peer_id, 'no answer')})"
                for peer_id, addresses in targets.items()
                for address in addresses
            ]
            raise Unreachable(f"no bootstrap address answered within {timeout_s:.0f} s: " + ", ".join(named))
        ordered = sorted(skews.values(), key=abs)
        skew = ordered[(len(ordered) - 1) // 2]  # the median: one node with a wrong clock stops nobody
        if abs(skew) > MAX_DHT_TIME_DISCREPANCY_SECONDS:
            word = "ahead of" if skew > 0 else "behind"
            raise ClockSkew(
                f"this machine's clock is {abs(skew):.1f} s {word} the swarm's; "
                f"at most {MAX_DHT_TIME_DISCREPANCY_SECONDS} s are allowed"
            )
        with suppress(TimedOut):
            async with life.within(_RPC_S, "join the DHT"):
                await asyncio.gather(
                    *(life.node.protocol.call_ping(PeerID.from_base58(peer_id)) for peer_id in skews)
                )
                await life.node.find_nearest_nodes([life.node.node_id])

    async def _measure_skew(self, life: _Life, peer: PeerID) -> float:
        """Seconds that our clock is ahead of `peer`'s (negative: behind), less what the round trip hides."""
        # An empty node info: a node that will be refused is not put into others' routing tables first.
        question = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
        asked = self._clock()
        answer = await life.node.protocol.get_stub(peer).rpc_ping(question, timeout=_RPC_S)
        answered = self._clock()
        return max(asked - answer.dht_time, 0.0) + min(answered - answer.dht_time, 0.0)

    async def _supervise(self, life: _Life) -> None:
        try:
            await self._keep_alive(life)
        finally:  # whatever ended it: nobody may wait for a restart that will not come
            self._failure = self._failure or "p2pd is no longer looked after"
            self._up.set()

    async def _keep_alive(self, life: _Life) -> None:
        delays = self._upkeep.restart.delays(random.Random())
        while True:
            try:
                async with asyncio.timeout(self._upkeep.look_every_s):
                    await life.lost.wait()
            except TimeoutError:
                with suppress(JoinError, TimedOut, DaemonFailed):
                    await self._look_around(life)
                continue
            self._up.clear()
            if asyncio.get_running_loop().time() - life.began > self._upkeep.healthy_after_s:
                delays = self._upkeep.restart.delays(random.Random())
            log.warning("p2pd (process %s) died; starting it again", life.p2p._child.pid)
            await life.end()
            successor = await self._revive(life, delays)
            if successor is None:
                return
            self._life = life = successor
            self._up.set()
            for callback in list(self.on_restart):
                try:
                    await callback()
                except SwarmError as error:
                    log.warning("after the restart of p2pd: %s", error)

    async def _revive(self, dead: _Life, delays: Iterable[float]) -> _Life | None:
        """A new p2pd with all that the dead one had, or None with `_failure` set."""
        reason = "it died too often"
        for delay in delays:
            await asyncio.sleep(delay)
            try:
                life = await self._recipe.launch(self._validator)
            except SwarmError as error:
                reason = str(error)
                continue
            try:
                # What others stored here is still valid.
                life.node.protocol.storage = dead.node.protocol.storage
                async with life.within(self._recipe.startup_timeout_s, "register the handlers"):
                    for protocol, handler in self._handlers.items():
                        await life.p2p.add_binary_stream_handler(protocol, handler)
                with suppress(JoinError, TimedOut):  # nobody there: `_look_around` tries again
                    if targets := self._known | self._bootstrap:
                        await self._join(life, targets, self._upkeep.join_timeout_s)
                return life
            except SwarmError as error:
                reason = str(error)
                await life.end()
            except asyncio.CancelledError:
                await life.end()
                raise
        self._failure = f"p2pd died and could not be started again: {reason}"
        log.error("%s", self._failure)
        return None

    async def _look_around(self, life: _Life) -> None:
        """Remember where others are, for the day when p2pd dies; find the swarm again if we are alone."""
        async with life.within(_RPC_S, "list connections"):
            for peer in await life.p2p.list_peers():
                peer_id = str(peer.peer_id)
                self._known.pop(peer_id, None)  # to the end: the newest are kept
                self._known[peer_id] = list(peer.addrs)
        for peer_id in list(self._known)[:-_MOST_KNOWN]:
            del self._known[peer_id]
        targets = self._known | self._bootstrap
        if targets and not life.node.protocol.routing_table.uid_to_peer_id:
            await self._join(life, targets, self._upkeep.join_timeout_s)

    async def _port_of(self, life: _Life) -> int:
        async with life.within(_RPC_S, "own addresses"):
            for address in await _addresses(life):
                if port := re.match(r"/ip[46]/[^/]+/tcp/(\d+)/", address):
                    return int(port[1])
        return 0


async def _addresses(life: _Life) -> list[str]:
    try:
        return [str(address) for address in await life.p2p.get_visible_maddrs(latest=True)]
    except ValueError:  # hivemind's way to say that there are none
        return []


async def _end(p2p: P2P) -> None:
    """End p2pd, by force if it does not listen, and collect how hivemind's tasks on its socket ended."""
    if p2p._client is not None:
        for task in (p2p._client.control._read_task, p2p._client.control._write_task):
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        async with asyncio.timeout(_RPC_S):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()
        await p2p._child.wait()


def _reason(error: BaseException) -> str:
    """The last and most telling line of a message of p2pd."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip(" *").removeprefix("Connect failed. msg=") if lines else ""


def _parse_bootstrap(addresses: Iterable[str]) -> Targets:
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


def _refuse_taken_port(host: str, port: int) -> int:
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
