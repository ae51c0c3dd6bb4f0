"""A node of the control plane: in the DHT and reachable by streams, over all lives of its p2pd.

Owns when p2pd is started again and what it then gets back, the way into the DHT, whom we remember for it, and the
streams and blobs served here. Does not know hivemind (`swarm/p2pd.py` does), what the records mean (a policy says
which may be stored), nor what the streams carry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from routing.errors import ClockSkew, DaemonFailed, JoinError, ProtocolError, SwarmError, TimedOut, Unreachable
from routing.retry import RetryPolicy
from routing.types import PeerId
from swarm.identity import Identity
from swarm.p2pd import (
    MOST_SKEW_S,
    RPC_S,
    Entry,
    Life,
    Recipe,
    StreamHandler,
    Targets,
    Validator,
    dht_clock,
    parse_bootstrap,
    parse_peer_id,
)
from swarm.records import RecordPolicy

log = logging.getLogger(__name__)

_STRAGGLERS_S = 1.0  # after the first bootstrap peer has answered
_MOST_KNOWN = 64
_BLOB = "swarm.blob.1/"
_BLOB_S = 60.0
_BLOB_PAUSES_S = (0.1, 0.5)  # before the second and third try of a stream that broke off
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How a node looks after itself. `restart` is used up by deaths that follow within `healthy_after_s`."""

    join_timeout_s: float = 20.0
    look_every_s: float = 5.0  # who is connected, and are we alone
    healthy_after_s: float = 60.0
    restart: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(deadline_s=300.0, attempts=8, base_s=0.2, cap_s=30.0)
    )


class Hive:
    """A node of the control plane. Start it with `Hive.start`, end it with `close` or `async with`."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        bootstrap: Targets,
        record_policy: RecordPolicy,
        upkeep: Upkeep,
        clock: Callable[[], float],
    ):
        self.peer_id: PeerId = recipe.identity.peer_id
        self.record_policy = record_policy
        self.on_restart: list[Callable[[], Awaitable[None]]] = []
        self.restarts = 0  # of p2pd
        self._recipe = recipe
        self._bootstrap = bootstrap
        self._known: Targets = {}
        self._upkeep = upkeep
        self._clock = clock
        self._validator = Validator(record_policy, clock)
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: set[asyncio.Task[Any]] = set()
        self._life: Life | None = None
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
        clock: Callable[[], float] = dht_clock,
    ) -> Hive:
        """Start p2pd and join the DHT through `bootstrap` (multiaddrs ending in /p2p/PEER_ID, not one's own).

        `host` is the IP address to listen on; port 0 leaves the port to the system; others are told the
        multiaddrs `announce` instead, if given. `daemon` replaces hivemind's p2pd executable. A `client`
        asks, and stores nothing for others. Raises BadInput, PortInUse, DaemonFailed, Unreachable (naming the
        addresses that did not answer), ClockSkew.
        """
        recipe = Recipe(
            identity=identity,
            host=host,
            port=port,
            startup_timeout_s=startup_timeout_s,
            daemon=daemon,
            announce=tuple(announce),
            client=client,
        )
        targets = parse_bootstrap(bootstrap)
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
        return None if self._life is None or self._life.lost.is_set() else self._life.pid

    def dht_time(self) -> float:
        """The clock of expiries, seconds."""
        return self._clock()

    async def addresses(self, timeout_s: float = 10.0) -> list[str]:
        """Multiaddrs under which others reach this node, with its peer id; may be empty behind a relay."""
        async with self._within(timeout_s, "own addresses") as life:
            return await life.addresses()

    # The DHT

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        """Store all `entries` in one batch; returns how many were taken. Raises TimedOut, DaemonFailed."""
        if not entries:
            return 0
        async with self._within(timeout_s, "store in the DHT") as life:
            return await life.store(entries, elsewhere=self._recipe.client)

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        """All values of each key by subkey, from all nodes that hold it, in one batch.

        Other nodes' answers have passed the policy; whoever uses a value still checks it. Raises TimedOut,
        DaemonFailed.
        """
        async with self._within(timeout_s, "read from the DHT") as life:
            return await life.fetch(keys)

    async def holders(self, keys: Sequence[str], count: int, timeout_s: float) -> dict[str, list[PeerId]]:
        """The `count` other nodes that most surely store each key, nearest first. Raises TimedOut, DaemonFailed."""
        async with self._within(timeout_s, "find the nodes that hold records") as life:
            return await life.holders(keys, count)

    # Raw streams

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to `peer_id`, authenticated and encrypted by libp2p.

        Raises BadInput, Unreachable, TimedOut, DaemonFailed.
        """
        what = f"stream {protocol!r} to {peer_id}"
        target = parse_peer_id(peer_id)
        async with self._within(timeout_s, what) as life:
            return await life.open(target, protocol)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Give each incoming stream of `protocol` to `handler`, with the id of whoever opened it.

        The stream is closed when the handler returns. Kept over restarts of p2pd. Raises TimedOut,
        DaemonFailed.
        """

        async def accept(peer_id: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._streams.add(task)
            try:
                await handler(peer_id, reader, writer)
            except (OSError, EOFError, SwarmError) as error:
                log.debug("stream %s from %s ended: %r", protocol, peer_id, error)
            except asyncio.CancelledError:
                if not self._failure:  # else `close` ends it, and nobody waits for this task's result
                    raise
            finally:
                self._streams.discard(task)
                writer.close()

        async with self._within(self._recipe.startup_timeout_s, f"serve {protocol!r}") as life:
            await life.serve(protocol, accept)
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
                for pause_s in _BLOB_PAUSES_S:
                    with suppress(ConnectionError, EOFError):
                        return await self._fetch_once(peer_id, name, timeout_s, max_bytes)
                    # Two peers that dial each other at once end one of two connections, with its streams.
                    await asyncio.sleep(pause_s)
                return await self._fetch_once(peer_id, name, timeout_s, max_bytes)
        except TimeoutError:
            raise TimedOut(f"{what}: not complete within {timeout_s:.1f} s") from None
        except (ConnectionError, EOFError) as error:
            raise Unreachable(f"{what}: the stream broke off") from error

    async def _fetch_once(self, peer_id: PeerId, name: str, timeout_s: float, max_bytes: int) -> bytes:
        reader, writer = await self.open(peer_id, _BLOB + name, timeout_s)
        try:
            size = int.from_bytes(await reader.readexactly(8), "little")
            if size > max_bytes:
                raise ProtocolError(f"{name!r} from {peer_id} has {size} bytes; at most {max_bytes} are taken")
            return await reader.readexactly(size)
        finally:
            writer.close()

    # The life of p2pd

    @asynccontextmanager
    async def _within(self, timeout_s: float, what: str) -> AsyncIterator[Life]:
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

    async def _join(self, life: Life, targets: Targets, timeout_s: float) -> None:
        """Greet all `targets` at once and fill the routing table through those that answer."""
        skews: dict[PeerId, float] = {}
        reasons: dict[PeerId, str] = {}

        async def greet(peer_id: PeerId, deadline: asyncio.Timeout) -> None:
            try:
                skews[peer_id] = await life.greet(peer_id, targets[peer_id], self._clock)
            except Unreachable as error:
                reasons[peer_id] = str(error)
                return
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
        if abs(skew) > MOST_SKEW_S:
            word = "ahead of" if skew > 0 else "behind"
            raise ClockSkew(
                f"this machine's clock is {abs(skew):.1f} s {word} the swarm's; "
                f"at most {MOST_SKEW_S} s are allowed"
            )
        with suppress(TimedOut):
            async with life.within(RPC_S, "join the DHT"):
                await life.enter(skews)

    async def _supervise(self, life: Life) -> None:
        try:
            await self._keep_alive(life)
        finally:  # whatever ended it: nobody may wait for a restart that will not come
            self._failure = self._failure or "p2pd is no longer looked after"
            self._up.set()

    async def _keep_alive(self, life: Life) -> None:
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
            log.warning("p2pd (process %s) died; starting it again", life.pid)
            await life.end()
            successor = await self._revive(life, delays)
            if successor is None:
                return
            self._life = life = successor
            self.restarts += 1
            self._up.set()
            for callback in list(self.on_restart):
                try:
                    await callback()
                except SwarmError as error:
                    log.warning("after the restart of p2pd: %s", error)

    async def _revive(self, dead: Life, delays: Iterable[float]) -> Life | None:
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
                life.inherit(dead)
                async with life.within(self._recipe.startup_timeout_s, "register the handlers"):
                    for protocol, handler in self._handlers.items():
                        await life.serve(protocol, handler)
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

    async def _look_around(self, life: Life) -> None:
        """Remember where others are, for the day when p2pd dies; find the swarm again if we are alone."""
        async with life.within(RPC_S, "list connections"):
            for peer_id, addresses in (await life.neighbours()).items():
                self._known.pop(peer_id, None)  # to the end: the newest are kept
                self._known[peer_id] = addresses
        for peer_id in list(self._known)[:-_MOST_KNOWN]:
            del self._known[peer_id]
        targets = self._known | self._bootstrap
        if targets and life.knows_nobody:
            await self._join(life, targets, self._upkeep.join_timeout_s)

    async def _port_of(self, life: Life) -> int:
        async with life.within(RPC_S, "own addresses"):
            for address in await life.addresses():
                if port := re.match(r"/ip[46]/[^/]+/tcp/(\d+)/", address):
                    return int(port[1])
        return 0
