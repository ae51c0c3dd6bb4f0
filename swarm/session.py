"""One sequence's life in the swarm: tokens in, hidden states of the last block out, whatever happens on the way.

Owns the healing of a session: which peers and links it avoids, the search for a new route, and how long its caller
allows that to take. The rule itself is in `driver.py`; sockets and the view of the swarm belong to `client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from routing.cost import CLIENT
from routing.errors import BadInput, NoRoute, Overloaded, ProtocolError, SessionError, SwarmError, TimedOut
from routing.planner import Plan, Request
from routing.retry import RetryPolicy
from routing.types import Hop, PeerId, Route
from swarm.codec import decode_rows, row_bytes
from swarm.driver import LEAST_CHUNK, Driver, DriverConfig, NeedRoute, Output, Send, Stopped
from swarm.frames import Codec, Frame, HopTiming
from swarm.names import NameChain
from swarm.saved import SavedGeneration, SavedSession

if TYPE_CHECKING:
    from swarm.client import SwarmClient

PROBE_S = 0.3  # an accused end of a broken edge has this long to answer us
LOOK_EVERY_S = 0.2  # at the directory, while no route is found
RESUMED_EPOCHS = 1 << 16  # above whatever the process before opened after it was saved last
SPARES = 2  # of each hop, to be connected with
WARM_TOKENS = 64  # a replay pays off only over tokens to come: this many are expected


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTrace:
    """What one hop took of a step, in seconds. `network_s` is the way to it; the last hop's has the way back too."""

    hop: Hop
    queue_s: float
    compute_s: float
    network_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step as the client saw it: when it was sent (monotonic clock), how long it took, and where the time went."""

    at_s: float
    total_s: float
    tokens: int
    epoch: int
    hops: tuple[HopTrace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change of route."""

    at_s: float
    position: int  # tokens held when it happened
    reason: str
    seconds: float  # until the new route was opened
    before: Route | None
    after: Route


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    codec: Codec = Codec.FP32
    chunk: int | None = None  # positions of a prefill frame; None: as `prefill_chunk` says
    wait_s: float = 0.0  # how long to wait for blocks that nobody serves
    recovery_s: float = 60.0  # how long a step may be held up by losses, however many routes are tried
    connect_s: float = 5.0  # a dial
    deadline_s: float | None = 60.0  # a step without any sign of progress
    share_prefixes: bool = True  # with other sessions of this client, also later ones: peers keep what was closed


class Session:
    """An open sequence. Not safe for two steps at once; closing it frees what its peers hold."""

    def __init__(self, client: SwarmClient, config: SessionConfig, saved: SavedSession | None = None):
        """`saved`: as another process left it, and with the tokens that it held."""
        self.client, self.config = client, config
        # A session belongs to the client that opened it, and so do the names of what its peers hold.
        ours = saved is not None and saved.client_id == client.peer_id
        self.id = saved.session if saved is not None and ours else secrets.token_bytes(16)
        self._scope = saved.scope if saved is not None and ours else client.scope
        head = client.head
        self.driver = Driver(
            session_id=self.id,
            nonce=secrets.token_bytes(8),
            names=self._chain(long=False),
            embed=self._embed,
            read=self._read,
            config=DriverConfig(
                chunk=config.chunk,
                deadline_s=config.deadline_s,
                codec=config.codec,
                row_bytes=row_bytes(config.codec, head.hidden_size),
                numeric_class=int(config.codec),
            ),
        )
        self._warm_peers: frozenset[PeerId] = frozenset()  # that may hold what was computed before
        if saved is not None:
            self._resume(saved, ours)
        self.traces: list[StepTrace] = []
        self.recoveries: list[Recovery] = []
        self.plan: Plan | None = None
        self._avoid_peers: set[PeerId] = set()  # lost by this session; used again only where nobody else is left
        self._avoid_edges: set[tuple[PeerId, PeerId]] = set()
        self._excluded: frozenset[PeerId] = frozenset()
        self._output: asyncio.Future[torch.Tensor] | None = None
        self._sent_at = 0.0
        self._sent_tokens = 0
        self._healing: asyncio.Task[None] | None = None
        self._lost_again = False
        self._trouble_since: float | None = None  # the first loss since the last output
        self._pauses: Iterator[float] = iter(())
        self._patience: asyncio.Timeout | None = None  # of the search for a route under way
        self._full = False  # a peer that could help was full
        self._closed = False

    def _resume(self, saved: SavedSession, ours: bool) -> None:
        self._keep_to_one_regime(len(saved.tokens), 0.0)
        driver = self.driver
        driver.tokens.extend(saved.tokens)
        driver.names.extend(saved.tokens)
        driver.done_to = len(saved.tokens)
        if ours:
            driver.epoch = saved.epoch + RESUMED_EPOCHS
            self._warm_peers = frozenset(saved.peers)

    def saved(self, position: int | None = None, generation: SavedGeneration | None = None) -> SavedSession:
        """What another process needs, with the first `position` tokens (None: all whose step has ended)."""
        driver = self.driver
        certain = driver.done_to if driver.awaiting else len(driver.tokens)
        return SavedSession(
            fingerprint=self.client.join.fingerprint,
            client_id=self.client.peer_id,
            session=self.id,
            epoch=max(0, driver.epoch),
            scope=self._scope,
            peers=sorted(driver.route.peers if driver.route is not None else self._warm_peers),
            tokens=driver.tokens[: certain if position is None else position],
            generation=generation,
        )

    def _chain(self, long: bool) -> NameChain:
        """What must not be shared has another root: other codecs, what was computed before a peer was found wrong, a
        session that wants to be alone, longrope's other regime."""
        alone = b"" if self.config.share_prefixes else self.id
        parts = self.config.codec.name.encode(), b"%d" % self._scope, alone, b"long" if long else b""
        return NameChain(self.client.name_secret, b"/".join(parts))

    def _keep_to_one_regime(self, positions: int, now: float) -> None:
        """With longrope, a sequence that outgrows the short regime is computed anew in the long one, as the library's
        `generate` does; one that was taken back far enough, in the short one."""
        short, driver = self.client.short_context, self.driver
        if short is None or (driver.context > short) == (positions > short):
            return
        driver.rename(self._chain(long=positions > short), positions)
        if driver.route is not None and not driver.healing:
            driver.open(driver.route, {peer_id: self.client.addresses(peer_id) for peer_id in driver.route.peers}, now)

    # -- what a generation needs -----------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Tokens held."""
        return len(self.driver.tokens)

    @property
    def token_ids(self) -> Sequence[int]:
        return self.driver.tokens

    @property
    def route(self) -> Route | None:
        return self.driver.route

    async def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; returns the last block's output [1, hidden] at the last one.

        Raises NoRoute, Superseded, TimedOut, Overloaded; the session may be used again after NoRoute and TimedOut.
        If the caller is cancelled the tokens stay appended: roll back if they are not wanted.
        """
        if self._closed:
            raise BadInput("the session is closed")
        if self.driver.stopped is not None:
            raise self.driver.stopped
        if self._output is not None:
            raise BadInput("a session takes one step at a time", advice="Open one session a sequence.")
        vocab = self.client.head.embedding.shape[0]
        if wrong := [token for token in token_ids if not 0 <= token < vocab]:
            raise BadInput(f"token id {wrong[0]} is not in the model's vocabulary of {vocab}")
        if self.driver.awaiting:
            self.driver.rollback(self.driver.done_to)  # a step that was cancelled; its tokens come with this one
        now = time.monotonic()
        self._output = asyncio.get_running_loop().create_future()
        self._sent_at, self._sent_tokens = now, len(token_ids)
        # If a route is being sought already, it is from now on for this step.
        self._trouble_since, self._full = None if self._healing is None else now, False
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + self._limit_s)
        self._keep_to_one_regime(self.position + len(token_ids), now)
        self.driver.step(token_ids, now)
        self.act()
        if self._healing is None and (self.driver.route is None or self.driver.healing):
            self._heal("first route" if self.driver.route is None else "the route was lost while idle")
        try:
            return await self._output
        finally:
            self._output = None

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on; peers learn of it with the next step."""
        self.driver.rollback(position)

    async def exclude(self, peer_id: PeerId, *, keep_to: int = 0) -> None:
        """This peer was found to compute wrongly from `keep_to` on: never use it again in this session, and let
        nothing of it survive downstream. The caller rolls back the tokens that it no longer trusts. If nobody else
        serves its blocks, the next step says so."""
        self._excluded |= {peer_id}
        self.client.health.failed(peer_id, time.monotonic(), weight=4.0)
        self.client.scope += 1
        self.driver.distrust(peer_id, keep_to)
        self.act()
        if self._healing is not None:
            await asyncio.shield(self._healing)

    async def close(self) -> None:
        """Frees the session on every peer that it ever used."""
        if self._closed:
            return
        self._closed = True
        if self._healing is not None:
            self._healing.cancel()
            with contextlib.suppress(asyncio.CancelledError, SwarmError):
                await self._healing
        self.driver.close(keep=self.config.share_prefixes)
        self.act()
        self._fail(SessionError("the session is closed"))
        self.client.forget(self)

    # -- what the links bring --------------------------------------------------------------------------------

    def frame_received(self, frame: Frame, sender: PeerId) -> None:
        self.driver.receive(frame, sender, time.monotonic())
        self.act()

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        if self.driver.route is not None and peer_id in self.driver.route.peers:
            self._avoid_peers.add(peer_id)
        self.driver.link_lost(peer_id, reason)
        self.act()

    def tick(self, now: float) -> None:
        self.driver.tick(now)
        self.act()

    def act(self) -> None:
        """Carry out what the driver decided."""
        for effect in self.driver.take_effects():
            match effect:
                case Send(peer_id, frame):
                    link = self.client.link(peer_id)
                    if self._closed:
                        self.client.say_goodbye(peer_id, frame)
                    elif link is not None:
                        link.send(frame)
                    else:
                        self.driver.link_lost(peer_id, "no connection")
                case Output():
                    self._done(effect)
                case NeedRoute():
                    self._lost(effect)
                case Stopped(error):
                    self._fail(error)
        if self.driver.effects:
            self.act()

    def _done(self, output: Output) -> None:
        now = time.monotonic()
        self._trouble_since, self._full = None, False
        hidden = output.rows[0] if len(output.rows) == 1 else torch.cat(output.rows)
        if self.driver.route is not None:
            trace = _trace(self.driver.route, output.timings, self._sent_at, now, self._sent_tokens, self.driver.epoch)
            self.traces.append(trace)
            self.client.learn(trace)
        if self._output is not None and not self._output.done():
            self._output.set_result(hidden[-1:])

    def _fail(self, error: BaseException) -> None:
        if self._output is not None and not self._output.done():
            self._output.set_exception(error)

    # -- healing ---------------------------------------------------------------------------------------------

    def _lost(self, need: NeedRoute) -> None:
        now = time.monotonic()
        self._avoid_peers |= need.peers
        self._avoid_edges |= need.edges
        for peer_id in need.peers:
            self.client.health.failed(peer_id, now)
        for peer_id, wait_s in need.busy.items():
            self.client.busy_until[peer_id] = now + wait_s
            self._full = True
        self._heal(need.reason)

    def _heal(self, reason: str) -> None:
        if self._closed:
            return
        if self._healing is not None and not self._healing.done():
            self._lost_again = True
            return
        now = time.monotonic()
        if self._trouble_since is None:
            policy = RetryPolicy(deadline_s=self._limit_s, attempts=100, base_s=0.02, cap_s=2.0)
            self._trouble_since, self._pauses = now, policy.delays(random.Random(self.id))
        self._healing = self.client.spawn(self._find_route(reason, now))

    async def _find_route(self, reason: str, since: float) -> None:
        assert self._trouble_since is not None
        try:
            async with asyncio.timeout(self._trouble_since + self._limit_s - since) as self._patience:
                await asyncio.sleep(next(self._pauses, self._limit_s))
                await self._settle_edges()
                plan = await self._connected_plan(since)
            self._healing = self._patience = None
            self._take(plan, reason, since)
        except TimeoutError:
            self._fail(self._gave_up(reason))
        except SwarmError as error:
            self._fail(error)
        finally:
            if self._healing is asyncio.current_task():
                self._healing = self._patience = None

    def _take(self, plan: Plan, reason: str, since: float) -> None:
        self.plan, before, now = plan, self.driver.route, time.monotonic()
        ready = self._ready(plan.route)
        known = plan.route.peers.union(*ready)
        addresses = {peer_id: self.client.addresses(peer_id) for peer_id in known}
        warm = self.client.warm_positions(self, plan.route) if self.config.share_prefixes and before is None else 0
        self.driver.open(plan.route, addresses, now, warm, ready)
        self.client.watch(plan.route.peers)
        self.recoveries.append(
            Recovery(at_s=since, position=self.position, reason=reason, seconds=now - since, before=before,
                     after=plan.route)
        )  # fmt: skip
        self.act()

    def _ready(self, route: Route) -> list[list[PeerId]]:
        """For each hop, who may take the place of the hop before or after it: connections that are there already spare
        a failover their handshakes."""
        avoided = self._avoid_peers | self._excluded | route.peers
        spares = [self.client.spares(hop, avoided)[:SPARES] for hop in route]
        return [
            [peer_id for other in (index - 1, index + 1) if 0 <= other < len(spares) for peer_id in spares[other]]
            for index in range(len(spares))
        ]

    @property
    def _limit_s(self) -> float:
        return max(self.config.recovery_s, self.config.wait_s)

    @property
    def _patience_s(self) -> float:
        """For blocks that nobody serves. That our own network is gone says nothing about them."""
        return self._limit_s if self.client.offline else self.config.wait_s

    def _gave_up(self, reason: str) -> SessionError:
        if self._full:
            return Overloaded(f"the peers that could help have been full for {self._limit_s:g} s")
        return TimedOut(f"no working route within {self._limit_s:g} s ({reason})")

    async def _connected_plan(self, since: float) -> Plan:
        """The cheapest route all of whose peers answer and are not full. One that does not is left out, and so on,
        until every choice is used up; then, for as long as the caller waits, the swarm is looked at again."""
        looked_at, failed = -math.inf, frozenset[PeerId]()
        while True:
            self._lost_again = False
            now = time.monotonic()
            busy = {peer: until - now for peer, until in self.client.busy_until.items() if until > now}
            try:
                plan = self._plan(self._excluded | failed | busy.keys())
            except NoRoute as error:
                if busy:
                    self._full = True
                    await asyncio.sleep(min(busy.values()))  # full, but alive: worth waiting for
                elif looked_at >= (asked := max(since, self._sent_at)) and now - asked >= self._patience_s:
                    raise _nobody_left(error, failed) from error
                else:
                    await self.client.look_again(pause_s=0.0 if looked_at < asked else LOOK_EVERY_S)
                    looked_at, failed = now, frozenset()
                continue
            lost = await self.client.connect(plan.route.peers, self.config.connect_s)
            failed |= lost
            self._avoid_peers |= lost
            if not lost and not self._lost_again:
                return plan

    def _plan(self, without: frozenset[PeerId]) -> Plan:
        """Rather by a peer that failed once and is connected again than by one that is gone: dialling that one costs
        time, and most often brings nothing else. Raises NoRoute."""
        gone = frozenset(peer_id for peer_id in self._avoid_peers if self.client.link(peer_id) is None)
        try:
            return self.client.plan(self._request(), without=without | gone)
        except NoRoute:
            if gone <= without:
                raise
            return self.client.plan(self._request(), without=without)

    def _request(self) -> Request:
        now = time.monotonic()
        client = self.client
        penalties = client.health.penalties(now)
        held = self.driver.route.peers if self.driver.route is not None else self._warm_peers
        held = held if self.position else frozenset()
        for record in client.records() if held else ():
            if record.peer_id not in held:
                token_s = client.costs.block_s(record, LEAST_CHUNK) / LEAST_CHUNK
                replay_s = self.position * len(record.span) * token_s
                penalties[record.peer_id] = penalties.get(record.peer_id, 0.0) + replay_s / WARM_TOKENS
        return Request(
            n_blocks=client.n_blocks,
            tokens=1,
            avoid_peers=frozenset(self._avoid_peers) | client.health.banned_peers(now),
            avoid_edges=frozenset(self._avoid_edges),
            penalties=penalties,
        )

    async def _settle_edges(self) -> None:
        """A peer's word that an edge broke bans nobody: ask both ends ourselves, and avoid the one that is silent."""
        ends = {end for edge in self._avoid_edges for end in edge} - self._avoid_peers - {CLIENT}
        silent = await self.client.silent_of(ends, PROBE_S)
        self._avoid_peers |= silent

    # -- rows ------------------------------------------------------------------------------------------------

    def _embed(self, start: int, end: int) -> memoryview:
        return self.client.embed(self.driver.tokens[start:end], start, self.config.codec)

    def _read(self, frame: Frame) -> torch.Tensor | None:
        rows = decode_rows(frame.rows, Codec(frame.codec), self.client.head.hidden_size)
        if len(rows) != frame.end - max(frame.start, frame.note.want):
            raise ProtocolError(f"{len(rows)} rows in a RESULT of {frame.end - frame.start} positions")
        return rows if bool(torch.isfinite(rows).all()) else None


def _trace(
    route: Route, timings: tuple[HopTiming, ...], sent: float, now: float, tokens: int, epoch: int
) -> StepTrace:
    """The way to the first hop and back from the last is what remains of the whole."""
    hops = []
    between = [timing.rtt_next_us / 2e6 for timing in timings]
    busy = sum((timing.queue_us + timing.compute_us) / 1e6 for timing in timings)
    rest = max(0.0, now - sent - busy - sum(between[:-1]))
    for index, (hop, timing) in enumerate(zip(route, timings, strict=False)):
        network = rest / 2 if index == 0 else between[index - 1]
        if index == len(route) - 1:
            network += rest / 2
        hops.append(
            HopTrace(hop=hop, queue_s=timing.queue_us / 1e6, compute_s=timing.compute_us / 1e6, network_s=network)
        )
    return StepTrace(at_s=sent, total_s=now - sent, tokens=tokens, epoch=epoch, hops=tuple(hops))


def _nobody_left(error: NoRoute, failed: frozenset[PeerId]) -> NoRoute:
    """Records of peers that do not answer are no help: say so."""
    if not failed:
        return error
    return NoRoute(f"{error}: the peers that did cannot be reached", blocks=error.blocks)
