"""A node of the control plane: in the DHT of one swarm, and reachable by streams that bear the swarm's name.

Owns the way into the DHT, and the blobs served here. Several nodes, one for each swarm, may share a p2pd, which
`swarm/daemon.py` keeps alive. Does not know hivemind (`swarm/dht.py` does), what the records mean (a policy says which
may be stored), nor what the streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from routing.errors import ClockSkew, DaemonFailed, JoinError, TimedOut, Unreachable
from routing.types import PeerId
from swarm.daemon import Daemon, Upkeep
from swarm.dht import Dht, Entry, Validator
from swarm.identity import Identity
from swarm.one_shot import read_answer
from swarm.p2pd import MOST_SKEW_S, RPC_S, Life, StreamHandler, Targets, dht_clock, parse_bootstrap
from swarm.records import RecordPolicy

__all__ = ["Daemon", "Entry", "Hive", "Upkeep"]

_STRAGGLERS_S = 1.0  # after the first bootstrap peer has answered
_BLOB = "swarm.blob.1/"
_BLOB_S = 60.0
_BLOB_PAUSES_S = (0.1, 0.5)  # before the second and third try of a stream that broke off
_CHUNK_BYTES = 256 * 1024


class Hive:
    """A node of one swarm. Make it with `Hive.start` or, on a p2pd that there is, `Hive.join`; end it with `close` or
    `async with`."""

    def __init__(
        self,
        daemon: Daemon,
        *,
        bootstrap: Targets,
        record_policy: RecordPolicy,
        clock: Callable[[], float],
        owns_daemon: bool,
    ):
        self.daemon, self.peer_id, self.record_policy = daemon, daemon.peer_id, record_policy
        self._bootstrap, self._clock, self._owns_daemon = bootstrap, clock, owns_daemon
        self._validator = Validator(record_policy, clock)
        self._dht: Dht

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
        program: str | None = None,
        announce: Sequence[str] = (),
        client: bool = False,
        upkeep: Upkeep | None = None,
        clock: Callable[[], float] = dht_clock,
    ) -> Hive:
        """With a p2pd of its own, which ends with it. Raises what `Daemon.start` and `join` raise."""
        targets = _targets(bootstrap, identity.peer_id)
        daemon = await Daemon.start(
            identity=identity,
            host=host,
            port=port,
            startup_timeout_s=startup_timeout_s,
            program=program,
            announce=announce,
            client=client,
            upkeep=upkeep,
        )
        hive = cls(daemon, bootstrap=targets, record_policy=record_policy, clock=clock, owns_daemon=True)
        await hive._enter()
        return hive

    @classmethod
    async def join(
        cls,
        daemon: Daemon,
        *,
        bootstrap: Sequence[str] = (),
        record_policy: RecordPolicy,
        clock: Callable[[], float] = dht_clock,
    ) -> Hive:
        """Join the DHT of a swarm through `bootstrap` (multiaddrs ending in /p2p/PEER_ID; one's own are left out), or
        begin one. Raises BadInput, DaemonFailed, Unreachable (naming the addresses that did not answer), ClockSkew."""
        targets = _targets(bootstrap, daemon.peer_id)
        hive = cls(daemon, bootstrap=targets, record_policy=record_policy, clock=clock, owns_daemon=False)
        await hive._enter()
        return hive

    async def __aenter__(self) -> Hive:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the node, and p2pd if it is its own."""
        if self in self.daemon.members:
            self.daemon.members.remove(self)
            self._dht.end()
        if self._owns_daemon:
            await self.daemon.close()

    def dht_time(self) -> float:
        """The clock of expiries, seconds."""
        return self._clock()

    async def addresses(self, timeout_s: float = 10.0) -> list[str]:
        """Multiaddrs under which others reach this node, with its peer id; may be empty behind a relay."""
        return await self.daemon.addresses(timeout_s)

    # The DHT

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        """Store all `entries` in one batch; returns how many were taken. Raises TimedOut, DaemonFailed."""
        if not entries:
            return 0
        async with self.daemon.within(timeout_s, "store in the DHT"):
            return await self._dht.store(entries, elsewhere=self.daemon.recipe.client)

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        """All values of each key by subkey, from all nodes that hold it, in one batch.

        Other nodes' answers have passed the policy; whoever uses a value still checks it. Raises TimedOut,
        DaemonFailed.
        """
        async with self.daemon.within(timeout_s, "read from the DHT"):
            return await self._dht.fetch(keys)

    async def holders(self, keys: Sequence[str], count: int, timeout_s: float) -> dict[str, list[PeerId]]:
        """The `count` other nodes that most surely store each key, nearest first. Raises TimedOut, DaemonFailed."""
        async with self.daemon.within(timeout_s, "find the nodes that hold records"):
            return await self._dht.holders(keys, count)

    # Streams of this swarm

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to `peer_id` as a node of this swarm. Raises BadInput, Unreachable, TimedOut, DaemonFailed."""
        return await self.daemon.open(peer_id, self._named(protocol), timeout_s, name=protocol)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Give each incoming stream of `protocol`, of this swarm, to `handler`; see `Daemon.serve`."""
        await self.daemon.serve(self._named(protocol), handler)

    def _named(self, protocol: str) -> str:
        return f"{self.record_policy.swarm_id.hex()}/{protocol}"

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
            return await read_answer(reader, 8, max_bytes, f"{name!r} from {peer_id}")
        finally:
            writer.close()

    # The way into the DHT

    async def _enter(self) -> None:
        daemon = self.daemon
        try:
            life = await daemon.living("join the swarm")
            self._dht = await self._begin(life)
            if self._bootstrap:
                await self._join(life, self._bootstrap, daemon.upkeep.join_timeout_s)
            if life.lost.is_set():
                raise DaemonFailed("p2pd ended while the swarm was joined")
        except BaseException:
            await self.close()
            raise
        daemon.members.append(self)  # from now on it is there again after a restart

    async def _begin(self, life: Life) -> Dht:
        recipe = self.daemon.recipe
        try:
            async with life.within(recipe.startup_timeout_s, "start the DHT node"):
                return await Dht.begin(life, self._validator, client=recipe.client)
        except (TimedOut, Unreachable) as error:
            raise DaemonFailed(f"p2pd did not start: {error}") from error

    async def revive(self, life: Life, known: Targets) -> None:
        """On a new p2pd, with what others stored here. Raises DaemonFailed."""
        dead, self._dht = self._dht, await self._begin(life)
        self._dht.inherit(dead)
        dead.end()
        with suppress(JoinError, TimedOut):  # nobody there: `look_around` tries again
            if targets := known | self._bootstrap:
                await self._join(life, targets, self.daemon.upkeep.join_timeout_s)

    async def look_around(self, life: Life, known: Targets) -> None:
        """Find the swarm again if we are alone. Raises JoinError, TimedOut, DaemonFailed."""
        if self._dht.knows_nobody and (targets := known | self._bootstrap):
            await self._join(life, targets, self.daemon.upkeep.join_timeout_s)

    async def _join(self, life: Life, targets: Targets, timeout_s: float) -> None:
        """Greet all `targets` at once and fill the routing table through those that answer."""
        skews: dict[PeerId, float] = {}
        reasons: dict[PeerId, str] = {}

        async def greet(peer_id: PeerId, deadline: asyncio.Timeout) -> None:
            try:
                skews[peer_id] = await self._dht.greet(peer_id, targets[peer_id], self._clock)
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
                await self._dht.enter(skews)


def _targets(bootstrap: Sequence[str], own: PeerId) -> Targets:
    targets = parse_bootstrap(bootstrap)
    targets.pop(own, None)
    return targets
