"""What a client process holds of a swarm: its links, its view, its measurements, and the model's two ends.

Owns every connection of the client and the sessions that run over them. Opening measures the swarm; afterwards the
view is renewed in the background, never on the path of a token. One sequence's life is in `session.py`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from routing.candidates import Candidates
from routing.constraints import Constraints
from routing.cost import CLIENT, Costs, CostSettings
from routing.crowding import crowd_penalties
from routing.encoding import Wire
from routing.errors import BadInput, DaemonFailed, NoRoute, SwarmError, TimedOut, Unreachable, WrongModel
from routing.explain import Explanation, explain
from routing.health import Health
from routing.planner import Plan, Split, plan, route_cost, split_plan
from routing.probing import Probes
from routing.request import CHUNK, Request
from routing.types import Hop, PeerId, PeerRecord, PeerState, Route
from routing.view import Expired, RecordsSeen, View, apply, forgotten
from swarm import manifest as manifests
from swarm import native
from swarm.checkpoint import Checkpoint
from swarm.codec import encode_rows, encodings, int8_value_s, lossless_codec, name_of
from swarm.compute import ComputeThread
from swarm.discovery import Directory
from swarm.families import Family, text_config
from swarm.frames import Codec, Frame, HopTiming
from swarm.goodbyes import Goodbyes
from swarm.head import Head
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.link import Heartbeat, Link
from swarm.paths import client_key
from swarm.reaching import Reaching
from swarm.records import RecordPolicy
from swarm.saved import SavedSession
from swarm.scorer import BatchingScorer
from swarm.session import Session, SessionConfig, StepTrace
from swarm.tasks import Tasks
from swarm.transport import Endpoint, StreamCarrier
from swarm.trial import Trying
from swarm.warm import WarmPrefixes

T = TypeVar("T")
log = logging.getLogger(__name__)

MANIFEST = "manifest"
TICK_S = 0.25
HOP_S = 0.002  # one more hop on loopback costs about this; a route is not cut up for less
FIRST_PROBE_S = 1.0
REFRESH_JITTER = (0.8, 1.2)  # clients that started together do not read together


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """How a client joins. Times in seconds."""

    dtype: torch.dtype = torch.float32
    threads: int | None = None  # cores for the model's head; None: torch's own choice
    direct: bool = True  # False: only streams through the swarm's own network
    identity_path: Path | None = None  # None: the user's own, made at first use
    join_timeout_s: float = 30.0
    refresh_s: float = 5.0
    most_probes: int = 64
    heartbeat: Heartbeat = field(default_factory=Heartbeat)


class SwarmClient:
    """Everything but the text: open it, ask for sessions, close it."""

    def __init__(self, checkpoint: Checkpoint, family: Family, join: JoinCode, config: ClientConfig):
        self.checkpoint, self.family, self.join, self.config = checkpoint, family, join, config
        self.n_blocks = family.n_blocks(text_config(checkpoint.config))
        self.short_context = family.short_context(text_config(checkpoint.config))
        self.view = View({}, self.n_blocks)
        self.costs = Costs(CostSettings(hop_s=HOP_S))
        exact, hidden = lossless_codec(config.dtype), text_config(checkpoint.config).hidden_size
        self._codecs: dict[tuple[PeerId, PeerId], int] = {}  # chosen last, from one end to another
        self._row_s: dict[PeerId, float] = {}  # of writing and reading one row in 8 bits, where it was measured
        self.wire = Wire(
            encodings=encodings(exact, hidden), present=self._codecs, row_s=self._row_s, results=name_of(exact)
        )
        row_bytes = self.wire.encodings[0].row_bytes
        self._candidates = Candidates(self.n_blocks, self.costs, row_bytes=row_bytes, wire=self.wire)
        self._probes: Probes
        self.health = Health()
        self.reaching = Reaching(self)
        self.busy_until: dict[PeerId, float] = {}
        self.leaving: set[PeerId] = set()  # said so; one that comes back begins with new connections
        self.sessions: dict[bytes, Session] = {}
        self.scope = 0  # part of all names: what was computed before a peer was found wrong is not shared after
        self.warm = WarmPrefixes()
        self.trying = Trying(self)
        self.links_lost: list[tuple[float, PeerId, str]] = []
        self.head: Head
        self.scorer: BatchingScorer
        self.peer_id = PeerId("")  # of this client
        self.name_secret = b""
        self._endpoint: Endpoint
        self._directory: Directory
        self._goodbyes = Goodbyes()
        self._dht_time: Callable[[], float] = time.time
        self._tasks = Tasks()
        self._stack = AsyncExitStack()

    # -- life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Join the swarm, check that it serves this model, load the model's ends, measure the peers.

        Raises JoinError and its kin, ModelError, DaemonFailed; nothing stays behind then.
        """
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._tasks.close)
            await self._open(stack)
            self._stack = stack.pop_all()

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self.config
        identity = await asyncio.to_thread(Identity.load_or_create, config.identity_path or client_key())
        self.peer_id, self.name_secret = identity.peer_id, identity.secret(b"names")
        self._probes = Probes(self._candidates, self.costs, random.Random(self.peer_id))
        native.load()
        thread = await stack.enter_async_context(ComputeThread(threads=config.threads, name="head"))
        joining = asyncio.create_task(self._join_swarm(stack, identity))
        try:
            self.head = await thread.run(Head.load, self.checkpoint, self.family, config.dtype)
            streams = await joining
        finally:
            joining.cancel()
            await asyncio.wait([joining])
        self.scorer = BatchingScorer(self.head, thread, self._tasks)
        self._endpoint = await stack.enter_async_context(
            Endpoint(
                identity=identity,
                role="client",
                handler=self,
                heartbeat=config.heartbeat,
                streams=streams,
                direct=config.direct,
            )
        )
        await self.refresh()
        background = Tasks()
        stack.push_async_callback(background.close)  # before the endpoint that it dials with
        # Those who answer do so soon; one that is frozen must not keep everybody waiting.
        await asyncio.wait([background.spawn(self.probe())], timeout=FIRST_PROBE_S)
        background.spawn(self._keep_fresh())
        background.spawn(self._tick())
        background.spawn(self._get_kernels())

    async def _get_kernels(self) -> None:
        """Native ones, and how fast hidden states are written with what there is; on no token's path."""
        await native.prepare()
        hidden = self.head.hidden_size
        self._row_s[CLIENT] = hidden * await asyncio.to_thread(int8_value_s, hidden)

    async def _join_swarm(self, stack: AsyncExitStack, identity: Identity) -> StreamCarrier | None:
        """Sets the directory and its clock; returns what carries streams, if anything does. The seam for tests
        without a DHT."""
        # A client's libp2p identity is made anew for each process: several may run under one client identity.
        hive = await Hive.start(
            identity=Identity.generate(),
            bootstrap=self.join.bootstrap,
            host=listen_host(self.join.bootstrap),
            record_policy=RecordPolicy(self.join.fingerprint),
            client=True,
        )
        stack.push_async_callback(hive.close)
        await self._check_model(hive)
        self._directory = Directory(hive, identity, self.join.fingerprint, self.n_blocks)
        self._dht_time = hive.dht_time
        return hive.daemon

    async def _check_model(self, hive: Hive) -> None:
        manifest = await fetch_manifest(hive, self.join, self.config.join_timeout_s)
        names = self.family.client_tensors(text_config(self.checkpoint.config), self.checkpoint.tensor_names())
        await asyncio.to_thread(manifests.check, self.checkpoint, tuple(names.values()), manifest)

    async def close(self) -> None:
        """Closes its sessions (their peers free them), its links and its node."""
        for session in list(self.sessions.values()):
            await session.close()
        await self.trying.close()
        await self._stack.aclose()

    def dht_time(self) -> float:
        """The clock of records' expiries, seconds."""
        return self._dht_time()

    # -- the view --------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Read the directory once. Raises TimedOut, DaemonFailed."""
        records, before = await self._directory.refresh(), self.view
        self.view = apply(apply(self.view, Expired(self.dht_time())), RecordsSeen(records))
        for peer_id in forgotten(before, self.view):
            self.costs.forget(peer_id)
            self.busy_until.pop(peer_id, None)
            self._goodbyes.forget(peer_id)
            self._row_s.pop(peer_id, None)
        for record in map(self.view.records.__getitem__, self.view.changed & self.view.records.keys()):
            if record.place is not None:
                self.costs.place(record.peer_id, record.place)
            if record.int8_value_s:
                self._row_s[record.peer_id] = self.head.hidden_size * record.int8_value_s

    async def look_again(self, *, pause_s: float) -> None:
        """Read the directory, after a pause, because a route is wanted and none was found."""
        await asyncio.sleep(pause_s)
        try:
            await self.refresh()
        except (TimedOut, DaemonFailed) as error:
            log.info("the directory cannot be read now: %s", error)

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.config.refresh_s * random.uniform(*REFRESH_JITTER))
            try:
                await self.refresh()
                await self.probe()
            except (TimedOut, DaemonFailed) as error:
                # Sessions that run need no directory; it is read again soon.
                log.info("the directory cannot be read now: %s", error)

    def records(self) -> list[PeerRecord]:
        """What serves now, by peer id."""
        return list(self.view.alive(self.dht_time(), PeerState.SERVING, PeerState.DRAINING, PeerState.JOINING))

    def addresses(self, peer_id: PeerId) -> tuple[str, ...]:
        record = self.view.records.get(peer_id)
        return record.addresses if record is not None else ()

    def plan(
        self,
        request: Request,
        *,
        without: frozenset[PeerId] = frozenset(),
        crowds: bool = False,
        spread: random.Random | None = None,
    ) -> Plan:
        """The cheapest route now. With `crowds`, rather where fewer sessions are; with `spread` too, for a new session,
        clients that plan at the same moment do not all take the same of some that are as good. Raises NoRoute."""
        self.costs.advance(time.monotonic())
        now = self.dht_time()
        view = self._candidates.short_view(self.view, now, request, without=without)
        if crowds or spread is not None:
            request = self._with_crowds(view, request, spread)
        return plan(view, self.costs, request, now)

    def _with_crowds(self, view: View, request: Request, spread: random.Random | None) -> Request:
        return replace(request, penalties=crowd_penalties(view, self.costs, request, self.sessions_at, spread))

    def sessions_at(self, peer_id: PeerId) -> int:
        """Of anybody, as that peer last told; 0 if it is not connected."""
        link = self.link(peer_id)
        return link.sessions if link is not None else 0

    def plan_split(
        self,
        request: Request,
        prompt: int,
        tokens: int,
        *,
        without: frozenset[PeerId] = frozenset(),
        spread: random.Random | None = None,
    ) -> Plan | Split:
        """The quickest way through a prompt and an answer, for a new session: one chain, or two. Crowds and `spread`
        count as in `plan`. Raises NoRoute."""
        self.costs.advance(time.monotonic())

        def move_s(before: Route, after: Route) -> float:
            moved = [(old.peer_id, hop) for old, hop in zip(before, after, strict=True) if old.peer_id != hop.peer_id]
            each_s = [min(self._transfer_s(old, hop, prompt), self._replay_s(hop, prompt)) for old, hop in moved]
            return max(each_s, default=0.0)

        now = self.dht_time()
        prefill = replace(request, tokens=max(2, prompt))
        view = self._candidates.short_view(self.view, now, request, prefill, without=without)
        request, prefill = (self._with_crowds(view, each, spread) for each in (request, prefill))
        return split_plan(view, self.costs, request, prefill, now, tokens=tokens, move_s=move_s)

    def explain(self, request: Request, route: Route | None, excluded: Set[PeerId]) -> Explanation:
        """Why this route, or the one that would be taken now. Raises NoRoute."""
        self.costs.advance(time.monotonic())
        now, monotonic = self.dht_time(), time.monotonic()
        without = {peer: "it said that it is full" for peer, until in self.busy_until.items() if until > monotonic}
        without |= dict.fromkeys(excluded, "it was found to compute wrongly")
        avoided = dict.fromkeys(self.health.banned_peers(monotonic), "it failed lately")
        avoided |= dict.fromkeys(self.leaving, "it said that it leaves")
        avoided |= dict.fromkeys(self.reaching.late(), "connecting to it takes longer than it should")
        # Those that are in use, or failed, are looked at whatever they cost.
        view = self._candidates.short_view(self.view, now, replace(request, prefer=route))
        shown = self.view.records.keys() & (without.keys() | avoided.keys())
        view = View({**view.records, **{peer: self.view.records[peer] for peer in shown}}, self.n_blocks)
        return explain(
            view, self.costs, request, now, route=route, without=without, avoided=avoided, swarm=self.view
        )

    def price(self, route: Route, request: Request) -> Plan | None:
        """What a given route costs now; None if a record is gone."""
        self.costs.advance(time.monotonic())
        try:
            return route_cost(route, self.view, self.costs, request)
        except NoRoute:
            return None

    def transfer_pays(self, source: PeerId, hop: Hop, positions: int) -> bool:
        """Whether keys, values and outputs of so many positions come from a peer sooner than that hop's computes
        them."""
        self.costs.advance(time.monotonic())
        return self._transfer_s(source, hop, positions) < self._replay_s(hop, positions)

    def move_s(self, hop: Hop, positions: int) -> float:
        """How long a session with so many positions waits for a hop that begins with nothing."""
        return self._replay_s(hop, positions) + 2 * self.costs.link_s(CLIENT, hop.peer_id)

    def _transfer_s(self, source: PeerId, hop: Hop, positions: int) -> float:
        nbytes = positions * self._position_bytes(hop.exit - hop.entry)
        return 2 * self.costs.link_s(source, hop.peer_id) + self.costs.transfer_s(source, hop.peer_id, nbytes)

    def _replay_s(self, hop: Hop, positions: int) -> float:
        record = self.view.records.get(hop.peer_id)
        return self.replay_s(record, hop.exit - hop.entry, positions) if record is not None else 0.0

    def replay_s(self, record: PeerRecord, blocks: int, positions: int) -> float:
        """What computing so many positions anew takes a peer."""
        return positions * blocks * self.costs.block_s(record, CHUNK) / CHUNK

    def _position_bytes(self, blocks: int) -> int:
        """Of a cache, about: what a config calls by other names counts as if every head had keys of its own."""
        config = text_config(self.checkpoint.config)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (2 * blocks * heads * head_dim + config.hidden_size) * self.config.dtype.itemsize

    def choose_codec(self, source: PeerId, target: PeerId) -> Codec:
        """For hidden states from one end to another: what loses nothing, unless the way is known to be so slow that
        another pays."""
        self.costs.advance(time.monotonic())
        bytes_per_s = self.costs.bandwidth(source, target)
        found = self.wire.choose(source, target, bytes_per_s)
        if bytes_per_s:
            self._codecs[source, target] = found.number
        return Codec(found.number)

    def learn(self, trace: StepTrace) -> None:
        """Every step brings its own timing."""
        self.costs.advance(trace.at_s + trace.total_s)
        for index, hop in enumerate(trace.hops):
            peer_id = hop.hop.peer_id
            if trace.tokens == 1 and hop.compute_s > 0:
                self._observe_decode(hop.hop, hop.compute_s)
            elif trace.computed > 1:
                blocks = hop.hop.exit - hop.hop.entry
                self.costs.observe_prefill(peer_id, hop.compute_s / (blocks * trace.computed))
            self.costs.observe_queue(peer_id, hop.queue_s)
            self.health.worked(peer_id, trace.at_s + trace.total_s)
            if hop.from_peer_s > 0:
                self.costs.observe_rtt(trace.hops[index - 1].hop.peer_id, peer_id, 2 * hop.from_peer_s)
            if hop.next_bytes_s and index + 1 < len(trace.hops):
                self.costs.observe_bandwidth(peer_id, trace.hops[index + 1].hop.peer_id, hop.next_bytes_s)
        first = self.link(trace.hops[0].hop.peer_id) if trace.hops else None
        if first is not None and first.bytes_per_s:
            self.costs.observe_bandwidth(CLIENT, first.remote, first.bytes_per_s)

    def _observe_decode(self, hop: Hop, compute_s: float) -> None:
        record = self.view.records.get(hop.peer_id)
        claimed_s = record.decode_s if record is not None else 0.0
        self.costs.observe_decode(hop.peer_id, compute_s / (hop.exit - hop.entry), claimed_s)

    def learn_trial(self, hop: Hop, timing: HopTiming) -> None:
        self.costs.advance(time.monotonic())
        if timing.compute_us:
            self._observe_decode(hop, timing.compute_us / 1e6)
            self.costs.observe_queue(hop.peer_id, timing.queue_us / 1e6)

    # -- links -----------------------------------------------------------------------------------------------

    async def probe(self) -> None:
        """The peers that plans are likely to use, and some others: how far they are."""
        self.costs.advance(time.monotonic())
        await self.reaching.probe(self._probes.choose(self.view, self.dht_time(), self.config.most_probes))
        self.costs.place(CLIENT, self._endpoint.coordinates.coordinate)

    async def dial(self, peer_id: PeerId, timeout_s: float) -> Link:
        """Raises Unreachable, TimedOut."""
        return await self._endpoint.connect(peer_id, self.addresses(peer_id), timeout_s)

    def spares(self, hop: Hop, without: Set[PeerId], constraints: Constraints) -> list[PeerId]:
        """Who could take that hop's place, the fastest for us first."""
        found = []
        without = without | self.leaving
        for record in self.records():
            fits = record.span.start <= hop.entry and hop.exit <= record.span.end
            allowed = record.peer_id not in without and constraints.allow_hop(record, hop, self.n_blocks)
            if fits and allowed and record.state is PeerState.SERVING:
                compute_s = self.costs.block_s(record, 1) * (hop.exit - hop.entry)
                found.append((compute_s + self.costs.link_s(CLIENT, record.peer_id), record.peer_id))
        return [peer_id for _, peer_id in sorted(found)]

    def link(self, peer_id: PeerId) -> Link | None:
        link = self._endpoint.link(peer_id)
        return None if link is None or link.closed else link

    def watch(self, peers: Iterable[PeerId]) -> None:
        """Heartbeats on: sessions depend on these."""
        for peer_id in peers:
            if link := self.link(peer_id):
                link.watched = True

    # -- LinkHandler -----------------------------------------------------------------------------------------

    def link_opened(self, link: Link) -> None:
        self._goodbyes.opened(link)

    def frame_received(self, link: Link, frame: Frame) -> None:
        session = self.sessions.get(frame.session)
        if session is not None:
            session.frame_received(frame, link.remote)
        else:
            self.trying.frame_received(link, frame)

    def link_lost(self, link: Link, reason: str) -> None:
        log.info("lost %s: %s", link.remote, reason)
        self.leaving.discard(link.remote)
        self.reaching.link_lost(reason)
        self.links_lost.append((time.monotonic(), link.remote, reason))
        self.health.failed(link.remote, time.monotonic())
        self._goodbyes.lost(link.remote)
        for session in list(self.sessions.values()):
            session.link_lost(link.remote, reason)

    # -- sessions --------------------------------------------------------------------------------------------

    def session(self, config: SessionConfig, saved: SavedSession | None = None) -> Session:
        """Raises BadInput if `saved` is of another model."""
        if saved is not None and saved.fingerprint != self.join.fingerprint:
            raise BadInput(
                "this session was saved with other weights than this swarm's",
                advice="Connect with a join code of the swarm that it was saved in.",
            )
        session = Session(self, config, saved)
        self.sessions[session.id] = session
        return session

    def warm_positions(self, session: Session, route: Route) -> int:
        """How much of a session's tokens the peers of a route probably hold, thanks to others of this client."""
        return self.warm.positions(session.driver.all_names(), route, self._held_now(session))

    def warm_route(self, session: Session) -> tuple[int, Route | None]:
        """The route whose peers probably hold most of a session's tokens, and how many that is."""
        return self.warm.longest(session.driver.all_names(), self._held_now(session))

    def _held_now(self, session: Session) -> list[tuple[bytes, Route]]:
        return [
            (other.driver.held_names(), other.driver.route)
            for other in self.sessions.values()
            if other is not session and other.driver.route is not None
        ]

    def joined(self, peers: Iterable[PeerId]) -> None:
        """A session begins there: who plans next should know before they say so."""
        for peer_id in peers:
            if link := self.link(peer_id):
                link.sessions += 1

    def forget(self, session: Session) -> None:
        self.sessions.pop(session.id, None)
        if session.driver.route is not None:
            self.warm.remember(session.driver.held_names(), session.driver.route)
        used = {
            hop.peer_id for other in self.sessions.values() if other.route for hop in (*other.route, *other.standbys)
        }
        for peer_id in session.driver.peers_ever - used:
            if link := self.link(peer_id):
                link.watched = False

    def say_goodbye(self, peer_id: PeerId, frame: Frame) -> None:
        """That a session is over."""
        self._goodbyes.say(peer_id, self.link(peer_id), frame)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self._tasks.spawn(work)

    def embed(self, token_ids: Sequence[int], start: int, codec: Codec) -> memoryview:
        """Rows for positions `[start, start + len(token_ids))` as they go on the wire."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        positions = torch.arange(start, start + len(token_ids))
        return encode_rows(self.head.embed(ids, positions), codec)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for session in list(self.sessions.values()):
                session.tick(now)


async def fetch_manifest(hive: Hive, join: JoinCode, timeout_s: float) -> manifests.Manifest:
    """The swarm's manifest from any peer that the join code names, checked against the fingerprint.

    Raises Unreachable, WrongModel.
    """
    problem: SwarmError = Unreachable("the join code names no peer")
    for address in join.bootstrap:
        peer_id = address.rsplit("/p2p/", 1)[1]
        try:
            data = await hive.fetch_blob(peer_id, MANIFEST, timeout_s, manifests.MANIFEST_LIMIT)
            manifest = manifests.from_bytes(data)
        except SwarmError as error:
            problem = error
            continue
        if manifests.fingerprint(manifest) == join.fingerprint:
            return manifest
        problem = WrongModel(f"{peer_id} serves another model than the join code names")
    raise problem


def listen_host(bootstrap: Sequence[str]) -> str:
    """Loopback only where the swarm is on this machine; else any address, of the family that the swarm uses."""
    hosts = [ipaddress.ip_address(a.split("/")[2]) for a in bootstrap if a.split("/")[1] in ("ip4", "ip6")]
    if not hosts:
        return "0.0.0.0"
    version = 6 if all(host.version == 6 for host in hosts) else 4
    if all(host.is_loopback for host in hosts):
        return "::1" if version == 6 else "127.0.0.1"
    return "::" if version == 6 else "0.0.0.0"
