"""p2pd over all its lives: streams to others and from them, and the nodes of the control plane that it carries.

Owns when p2pd is started again and what it then gets back, whom we remember for the way into the DHTs, and the streams
served here. One p2pd carries a node (`swarm/hive.py`) for each swarm that this process is in. Does not know hivemind
(`swarm/p2pd.py` does), nor what the streams carry.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from routing.errors import DaemonFailed, JoinError, SwarmError, TimedOut
from routing.retry import RetryPolicy
from routing.types import PeerId
from swarm.identity import Identity
from swarm.p2pd import RPC_S, Life, Recipe, StreamHandler, Targets, parse_peer_id

log = logging.getLogger(__name__)

_MOST_KNOWN = 64


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """How p2pd and its nodes are looked after. `restart` is used up by deaths that follow within `healthy_after_s`."""

    join_timeout_s: float = 20.0
    look_every_s: float = 5.0  # who is connected, and are we alone
    healthy_after_s: float = 60.0
    restart: RetryPolicy = field(
        default_factory=lambda: RetryPolicy(deadline_s=300.0, attempts=8, base_s=0.2, cap_s=30.0)
    )


class Member(Protocol):
    """A node of a swarm, that p2pd carries."""

    async def revive(self, life: Life, known: Targets) -> None:
        """Be what it was, on a new p2pd. Raises SwarmError."""

    async def look_around(self, life: Life, known: Targets) -> None:
        """Find the swarm again if it is alone. Raises JoinError, TimedOut, DaemonFailed."""


class Daemon:
    """A StreamCarrier. Start it with `Daemon.start`, end it with `close` or `async with`."""

    def __init__(self, recipe: Recipe, upkeep: Upkeep):
        self.peer_id: PeerId = recipe.identity.peer_id
        self.recipe, self.upkeep = recipe, upkeep
        self.on_restart: list[Callable[[], Awaitable[None]]] = []
        self.restarts = 0  # of p2pd
        self.members: list[Member] = []
        self._known: Targets = {}
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
        host: str = "127.0.0.1",
        port: int = 0,
        startup_timeout_s: float = 120.0,
        program: str | None = None,
        announce: Sequence[str] = (),
        client: bool = False,
        upkeep: Upkeep | None = None,
    ) -> Daemon:
        """Start p2pd, which knows nobody yet.

        `host` is the IP address to listen on; port 0 leaves the port to the system; others are told the multiaddrs
        `announce` instead, if given. `program` replaces hivemind's p2pd executable. A `client` asks, and stores nothing
        for others. Raises BadInput, PortInUse, DaemonFailed.
        """
        recipe = Recipe(
            identity=identity,
            host=host,
            port=port,
            startup_timeout_s=startup_timeout_s,
            program=program,
            announce=tuple(announce),
            client=client,
        )
        daemon = cls(recipe, upkeep or Upkeep())
        life = await recipe.launch()
        try:
            if port == 0 and not announce:
                # A restarted p2pd must be found at the same address.
                daemon.recipe = replace(recipe, port=await _port_of(life))
        except BaseException:
            await life.end()
            raise
        daemon._life = life
        daemon._up.set()
        daemon._supervisor = asyncio.create_task(daemon._supervise(life))
        return daemon

    async def __aenter__(self) -> Daemon:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the streams and p2pd. Calls that still wait raise DaemonFailed."""
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
    def pid(self) -> int | None:
        """The process id of p2pd, while it lives."""
        return None if self._life is None or self._life.lost.is_set() else self._life.pid

    @asynccontextmanager
    async def within(self, timeout_s: float, what: str) -> AsyncIterator[Life]:
        """The living p2pd, waiting for its restart if need be, and a deadline over all."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                life = await self.living(what)
        except TimeoutError:
            raise TimedOut(f"{what}: p2pd was not back within {timeout_s:.1f} s") from None
        async with life.within(max(0.0, end - clock()), what):
            yield life

    async def living(self, what: str) -> Life:
        """The living p2pd, waiting for its restart if need be. Raises DaemonFailed: `what` was not possible."""
        while not self._failure and (self._life is None or self._life.lost.is_set()):
            self._up.clear()
            await self._up.wait()
        if self._failure or self._life is None:
            raise DaemonFailed(f"{what}: {self._failure}")
        return self._life

    async def addresses(self, timeout_s: float = 10.0) -> list[str]:
        """Multiaddrs under which others reach this process, with its peer id; may be empty behind a relay."""
        async with self.within(timeout_s, "own addresses") as life:
            return await life.addresses()

    # Raw streams

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float, *, name: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to `peer_id`, authenticated and encrypted by libp2p. `name`: of the protocol, in errors.

        Raises BadInput, Unreachable, TimedOut, DaemonFailed.
        """
        target = parse_peer_id(peer_id)
        async with self.within(timeout_s, f"stream {name or protocol!r} to {peer_id}") as life:
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

        async with self.within(self.recipe.startup_timeout_s, f"serve {protocol!r}") as life:
            await life.serve(protocol, accept)
        self._handlers[protocol] = accept

    # The life of p2pd

    async def _supervise(self, life: Life) -> None:
        try:
            await self._keep_alive(life)
        finally:  # whatever ended it: nobody may wait for a restart that will not come
            self._failure = self._failure or "p2pd is no longer looked after"
            self._up.set()

    async def _keep_alive(self, life: Life) -> None:
        delays = self.upkeep.restart.delays(random.Random())
        while True:
            try:
                async with asyncio.timeout(self.upkeep.look_every_s):
                    await life.lost.wait()
            except TimeoutError:
                with suppress(JoinError, TimedOut, DaemonFailed):
                    await self._look_around(life)
                continue
            self._up.clear()
            if asyncio.get_running_loop().time() - life.began > self.upkeep.healthy_after_s:
                delays = self.upkeep.restart.delays(random.Random())
            log.warning("p2pd (process %s) died; starting it again", life.pid)
            await life.end()
            successor = await self._revive(delays)
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

    async def _revive(self, delays: Iterable[float]) -> Life | None:
        """A new p2pd with all that the dead one had, or None with `_failure` set."""
        reason = "it died too often"
        for delay in delays:
            await asyncio.sleep(delay)
            try:
                life = await self.recipe.launch()
            except SwarmError as error:
                reason = str(error)
                continue
            try:
                async with life.within(self.recipe.startup_timeout_s, "register the handlers"):
                    for protocol, handler in self._handlers.items():
                        await life.serve(protocol, handler)
                for member in self.members:
                    await member.revive(life, self._known)
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
        """Remember where others are, for the day when p2pd dies; find the swarms again where we are alone."""
        async with life.within(RPC_S, "list connections"):
            for peer_id, addresses in (await life.neighbours()).items():
                self._known.pop(peer_id, None)  # to the end: the newest are kept
                self._known[peer_id] = addresses
        for peer_id in list(self._known)[:-_MOST_KNOWN]:
            del self._known[peer_id]
        for member in self.members:
            await member.look_around(life, self._known)


async def _port_of(life: Life) -> int:
    async with life.within(RPC_S, "own addresses"):
        for address in await life.addresses():
            if port := re.match(r"/ip[46]/[^/]+/tcp/(\d+)/", address):
                return int(port[1])
    return 0
