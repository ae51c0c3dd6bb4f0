"""The client's half of the session rule, without I/O: tokens go in, outputs of the last block come out.

Whatever breaks is healed in one way: a new route without what was lost, the epoch raised, `OPEN` to all hops, the
last step again; the gap rule brings the rest. The driver knows no socket, no clock and no router: it says
`NeedRoute`, and is given one by `open`. See `docs/wire.md`, "The session rule".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from routing.cost import CLIENT
from routing.errors import ProtocolError, SessionError, Superseded
from routing.types import Hop, PeerId, Route
from swarm.flow import Outflow, window_positions
from swarm.frames import Codec, Frame, FrameType, HopTiming, Open, OpenHop, StepNote
from swarm.names import NameChain

NO_LIMIT = 2**32 - 1
PASS_POSITIONS = 64  # what a pass costs beside its positions, in positions: measured 65 in fp32 and bf16
LEAST_CHUNK, MOST_CHUNK, MOST_PIPELINED = 64, 512, 200


def prefill_chunk(positions: int, hops: int) -> int:
    """Positions a frame for a prompt of so many: small chunks keep all hops at work, large ones compute faster.

    n positions in chunks of c take (n / c + hops - 1) passes of time a + b c one after the other: least at
    c = sqrt(n (a / b) / (hops - 1)). Between hops never more than 200: the tokens of others wait for one block of a
    chunk, and for long prompts that costs 5 % of the time. All chunks are of about one size: a small rest would cost a
    pass for little.
    """
    most = MOST_PIPELINED if hops > 1 else MOST_CHUNK
    best = math.sqrt(positions * PASS_POSITIONS / (hops - 1)) if hops > 1 else most
    count = max(1, math.ceil(positions / min(max(best, LEAST_CHUNK), most)))
    return -(-positions // count)


@dataclass(frozen=True, slots=True)
class Send:
    peer_id: PeerId
    frame: Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedRoute:
    """The route is no more. `peers` failed by their own doing; of `edges` it is only known that they broke."""

    reason: str
    peers: frozenset[PeerId] = frozenset()
    edges: frozenset[tuple[PeerId, PeerId]] = frozenset()
    busy: Mapping[PeerId, float] = field(default_factory=dict)  # seconds after which to try again
    forgot: frozenset[PeerId] = frozenset()  # alive, but have lost what they held
    stalled: bool = False  # nobody is known to have failed, and yet nothing comes


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyLost:
    """Who stands by for a hop cannot do it any more. The step under way goes on."""

    peer_id: PeerId
    reason: str
    busy_s: float | None = None  # it has no room: seconds after which to try again


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Outputs of the last block at positions `[start, end)`, one object a RESULT frame, in order. `timings`: for each
    hop what the last frame says, and computing summed over all frames of the step; `computed` positions, 0 where some
    hop had some of them already."""

    start: int
    end: int
    rows: tuple[Any, ...]
    timings: tuple[HopTiming, ...]
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Stopped:
    error: SessionError


@dataclass(frozen=True, slots=True)
class PeerLeaves:
    """A peer asks to be spared: it ends soon."""

    peer_id: PeerId


Effect = Send | NeedRoute | StandbyLost | PeerLeaves | Output | Stopped


@dataclass(frozen=True, kw_only=True)
class DriverConfig:
    chunk: int | None = None  # positions a frame; None: what is fastest for the prompt and the route
    deadline_s: float | None = 30.0  # without any sign of progress: a last resort, None switches it off
    codec: Codec = Codec.FP32  # of results, and of all ways unless `choose` says otherwise
    choose: Callable[[PeerId, PeerId], Codec] | None = None  # for what goes from one end to another
    row_bytes: Callable[[Codec], int] = lambda codec: 4
    shares: bool = True  # seats may begin with what earlier sessions left there


class Driver:
    """One session. `embed(start, end, codec)` gives the rows of known tokens; `read(frame)` the rows of a RESULT, or
    None when a value in them is not finite."""

    def __init__(
        self,
        *,
        session_id: bytes,
        nonce: bytes,
        names: NameChain,
        embed: Callable[[int, int, Codec], Any],
        read: Callable[[Frame], Any],
        config: DriverConfig | None = None,
    ):
        self.id, self.nonce, self.config = session_id, nonce, config or DriverConfig()
        self._embed, self._read = embed, read
        self.names = names
        self.context = 0  # as OPEN says it
        # What comes into a block is written in the same codec for as long as the session lives, by whomever it is sent:
        # after a loss it is sent again, and must be what it was.
        self.codecs: dict[int, Codec] = {}
        self.deadline_s = self.config.deadline_s  # of the step under way
        self.tokens: list[int] = []
        self.epoch = -1
        self.route: Route | None = None
        self.standby: tuple[Hop, ...] = ()  # numbered after the route's hops
        self.lazy: frozenset[Hop] = frozenset()  # of these: they compute nothing until they are called
        self.effects: list[Effect] = []
        self.done_to = 0  # positions whose outputs are known, or were not wanted
        self.awaiting = False
        self.healing = False  # NeedRoute was said, and no route given yet
        self.stopped: SessionError | None = None
        self.opened: dict[int, int] = {}  # hop -> position that its seat kept
        self.progress_at = 0.0
        self._want = self._opened_at = 0
        self._results: dict[int, tuple[int, Any]] = {}  # start -> (end, rows)
        self._timings: tuple[HopTiming, ...] = ()
        self._computed: float = 0  # positions of the step that all hops computed; not finite: some did not
        self._outflows: dict[int, Outflow] = {}  # per place: the first hop, and who stands by for it
        self._standing: dict[int, int] = {}  # per place of a standby for the first hop: what it has been sent
        self._standby_lost: set[PeerId] = set()
        self._forgot: set[PeerId] = set()
        self._lost_peers: set[PeerId] = set()
        self._lost_edges: set[tuple[PeerId, PeerId]] = set()
        self._busy: dict[PeerId, float] = {}
        self._accusers: dict[PeerId, set[PeerId]] = {}
        self._keep_to: dict[tuple[PeerId, int, int], int] = {}
        self._seats: set[tuple[PeerId, int, int]] = set()  # every seat ever opened
        self._sources: dict[tuple[PeerId, int, int], frozenset[PeerId]] = {}  # whose pages a seat may have taken
        self._adopts = True  # until a peer was found wrong: then nothing that earlier sessions left is to be trusted

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    @property
    def standing_by(self) -> tuple[Hop, ...]:
        """Those that have not failed."""
        return tuple(hop for hop in self.standby if hop.peer_id not in self._standby_lost)

    def is_warm(self, hop: Hop) -> bool:
        """Whether that standby could take its hop's place with nothing to compute."""
        return hop not in self.lazy and self.is_full(hop)

    def is_full(self, hop: Hop) -> bool:
        """Whether that standby has all that its hop had when the epoch began; a lazy one, all inputs."""
        places = [len(self.route or ()) + index for index, other in enumerate(self.standby) if other == hop]
        return any(self.opened.get(place, -1) >= self._opened_at for place in places)

    @property
    def peers_ever(self) -> frozenset[PeerId]:
        return frozenset(peer_id for peer_id, _, _ in self._seats)

    @property
    def seats_ever(self) -> Set[tuple[PeerId, int, int]]:
        return self._seats

    @property
    def numeric_class(self) -> int:
        """The codec that loses most of those that anything went through."""
        return max((self.config.codec, *self.codecs.values()))

    def codec_into(self, block: int) -> Codec:
        """Of what comes into a block that begins a hop; for the block after the last, of results."""
        return self.codecs.get(block, self.config.codec)

    def held_names(self) -> bytes:
        """Of what all seats of the route hold."""
        return self.names.slice(0, self.done_to)

    def all_names(self) -> bytes:
        return self.names.slice(0, len(self.tokens))

    # -- what the caller does --------------------------------------------------------------------------------

    def step(self, tokens: Sequence[int], now: float, *, want: int | None = None) -> None:
        """Append tokens and send them down the route. `want`: the first position whose output is wanted; the last
        one alone if not given. Several wanted positions serve speculation."""
        assert not self.awaiting, "one step at a time"
        assert tokens, "a step has tokens"
        self.tokens.extend(tokens)
        self.names.extend(tokens)
        self._want = len(self.tokens) - 1 if want is None else want
        self._results, self._timings, self._computed = {}, (), 0
        self.awaiting, self.progress_at = True, now
        if self.route is not None and not self.healing and self.stopped is None:
            self._send_step(self.done_to)

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on. Peers learn it by the names of the next step."""
        assert 0 <= position <= len(self.tokens)
        del self.tokens[position:]
        self.names.truncate(position)
        self.done_to = min(self.done_to, position)
        self._standing = {place: min(sent, position) for place, sent in self._standing.items()}
        self.awaiting, self._results = False, {}

    def rename(self, names: NameChain, context: int) -> None:
        """From now on all tokens have names of another root, so that what peers hold is computed anew. They learn it by
        an epoch: the caller gives a route again, if there is one."""
        assert not self.awaiting
        names.extend(self.tokens)
        self.names, self.context, self.codecs = names, context, {}

    def open(
        self,
        route: Route,
        addresses: Mapping[PeerId, Sequence[str]],
        now: float,
        warm: int = 0,
        ready: Sequence[Sequence[PeerId]] = (),
        standby: Sequence[Hop] = (),
        lazy: Set[Hop] = frozenset(),
        pulls: Set[Hop] = frozenset(),
    ) -> None:
        """Take a route: at the start, after NeedRoute, or to move to a better one. `warm`: positions that earlier
        sessions probably left at all its hops; they are not sent. Where that is wrong, gaps bring them. `ready`: for
        each place, who may take that of a neighbour of its. `standby`: who is to be ready to take the place of a hop,
        with the same blocks; they are sent what that hop is sent, and compute it when they have time, or, if `lazy`,
        when they are called; those that `pulls` has take what is there already from their hop.
        """
        if self.stopped is not None:
            return
        self.epoch, self.route, self.healing = self.epoch + 1, route, False
        self.standby, self.lazy = tuple(standby), frozenset(lazy)
        self._lost_peers, self._lost_edges, self._busy, self.opened = set(), set(), {}, {}
        self._standby_lost, self._forgot, self._standing, self._outflows = set(), set(), {}, {}
        self.progress_at = now
        # Only the last chunk again: the seats ask for the rest, each only for what it has not got.
        start = len(self.tokens)
        if self.awaiting:
            repeat = min(self._want, start - (self.config.chunk or LEAST_CHUNK) if self.epoch > 0 else warm)
            start = max(self.done_to, repeat)
        self._opened_at, self._timings, self._computed = start, (), 0
        self._choose_codecs(route)
        fresh = [bool(self._seats) and (hop.peer_id, hop.entry, hop.exit) not in self._seats for hop in route]

        def place(index: int, hop: Hop) -> OpenHop:
            return OpenHop(
                hop.peer_id,
                tuple(addresses.get(hop.peer_id, ())),
                hop.entry,
                hop.exit,
                self._keep(hop),
                index < len(fresh) and fresh[index],
                tuple((peer, tuple(addresses.get(peer, ()))) for peer in (ready[index] if ready else ())),
                lazy=index >= len(route) and hop in self.lazy,
                pulls=index >= len(route) and hop in pulls,
                codec=self.codec_into(hop.exit),
            )

        places = [place(index, hop) for index, hop in enumerate((*route, *standby))]
        body = Open(
            nonce=self.nonce,
            route=tuple(places[: len(route)]),
            standby=tuple(places[len(route) :]),
            names=self.all_names(),
            need_end=start,
            codec=self.codecs[route[0].entry],
            numeric_class=self.numeric_class,
            context=self.context,
            adopts=self._adopts,
        )
        for hop in pulls:
            source = next(other for other in route if other.entry == hop.entry)
            past = self._sources.get((source.peer_id, hop.entry, hop.exit), frozenset())
            seat = hop.peer_id, hop.entry, hop.exit
            self._sources[seat] = self._sources.get(seat, frozenset()) | past | {source.peer_id}
        self._seats.update((hop.peer_id, hop.entry, hop.exit) for hop in (*route, *standby))
        for peer_id in sorted(route.peers | {hop.peer_id for hop in standby}):
            self._send(peer_id, Frame(type=FrameType.OPEN, body=body))
        if fresh[0] and start:
            self._pay(FrameType.FILL, 0, start)
        if self.awaiting:
            self._send_step(start)

    def distrust(self, peer_id: PeerId, keep_to: int = 0) -> None:
        """A peer was found to compute wrongly from position `keep_to` on: nothing beyond it may survive in any seat
        that ever stood downstream of it, also where that seat is not in the route now. The caller rolls back and
        gives a route without the peer."""
        entries = [entry for peer, entry, _ in self._seats if peer == peer_id]
        # In an earlier session it may have stood before any seat but those of the first block.
        first = 0 if self.config.shares else min(entries, default=NO_LIMIT)
        for seat in self._seats:
            if seat[1] > first or seat[0] == peer_id or peer_id in self._sources.get(seat, ()):
                self._keep_to[seat] = min(keep_to, self._keep_to.get(seat, NO_LIMIT))
        self._adopts = False
        self._lost_peers.add(peer_id)
        if self.route is not None:
            self._need_route(f"{peer_id} was found to compute wrongly")

    def release(self, peer_id: PeerId) -> None:
        """A peer that is out of the route need not keep anything."""
        assert self.route is None or peer_id not in self.route.peers
        self._lose_standby(peer_id, f"{peer_id} is let go")
        self._send(peer_id, Frame(type=FrameType.CLOSE))
        self._seats = {seat for seat in self._seats if seat[0] != peer_id}

    def close(self, keep: bool = True) -> None:
        """CLOSE to every peer it ever opened. `keep`: they may keep what they hold for later sessions with the same
        beginning, unless some of it was found wrong."""
        keep_to = self.done_to if keep and self._adopts else 0
        for peer_id in sorted(self.peers_ever):
            self._send(peer_id, Frame(type=FrameType.CLOSE, end=keep_to))
        self.stopped = self.stopped or SessionError("the session is closed")

    # -- what happens to it ----------------------------------------------------------------------------------

    def receive(self, frame: Frame, sender: PeerId, now: float) -> None:
        """A frame of this session from a peer that it has opened."""
        if self.stopped is not None or sender not in self.peers_ever:
            return
        if frame.type is FrameType.STALE:
            self._stale(frame.body.epoch, frame.body.nonce)
            return
        if frame.type is FrameType.LEAVING:
            self.effects.append(PeerLeaves(sender))
            return
        if frame.epoch != self.epoch or self.route is None or self.healing:
            return
        if sender not in self.route.peers:
            self._standby_says(frame, sender)
            return
        match frame.type:
            case FrameType.RESULT:
                self._result(frame, sender, now)
            case FrameType.GAP:
                if frame.hop == 0 and sender == self.route[0].peer_id:
                    self.progress_at = now
                    self._pay(FrameType.FILL, frame.start, min(frame.end, len(self.tokens)))
            case FrameType.ACK:
                if frame.hop == 0 and sender == self.route[0].peer_id:
                    self.progress_at = now
                    self._credit(0, frame.start)
            case FrameType.OPENED:
                self.progress_at = now
                self.opened.update(frame.body.positions)
            case FrameType.LOST:
                self._edge_lost((frame.body.source, frame.body.target), sender, frame.body.reason)
            case FrameType.UNKNOWN:
                self._forgot.add(sender)
                self._need_route(f"{sender} does not know the session")
            case FrameType.BUSY:
                self._busy[sender] = frame.body.retry_after_ms / 1e3
                self._need_route(f"{sender} has no room")
            case FrameType.ERROR:
                self._problem(frame.body, sender)
            case _:
                raise ProtocolError(f"{frame.type.name} is not for clients")

    def _standby_says(self, frame: Frame, sender: PeerId) -> None:
        places = [len(self.route or ()) + index for index, hop in enumerate(self.standby) if hop.peer_id == sender]
        mine = [place for place in places if place == frame.hop and self._at(place).entry == 0]
        match frame.type:
            case FrameType.OPENED:
                self.opened.update(entry for entry in frame.body.positions if entry[0] in places)
            case FrameType.GAP if mine:
                self._standing[frame.hop] = frame.start
                self._pay_standing()
            case FrameType.ACK if mine:
                self._credit(frame.hop, frame.start)
                self._pay_standing()
            case FrameType.BUSY if places:
                self._lose_standby(sender, f"{sender} has no room", frame.body.retry_after_ms / 1e3)
            case FrameType.UNKNOWN | FrameType.ERROR if places:
                self._lose_standby(sender, getattr(frame.body, "message", f"{sender} does not know the session"))
            case FrameType.LOST if places:
                self._lose_standby(sender, frame.body.reason)

    def _lose_standby(self, peer_id: PeerId, reason: str, busy_s: float | None = None) -> None:
        if peer_id in {hop.peer_id for hop in self.standby} - self._standby_lost:
            self._standby_lost.add(peer_id)
            self._standing = {p: sent for p, sent in self._standing.items() if self._at(p).peer_id != peer_id}
            self.effects.append(StandbyLost(peer_id=peer_id, reason=reason, busy_s=busy_s))

    def _at(self, place: int) -> Hop:
        assert self.route is not None
        return (*self.route, *self.standby)[place]

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        """Our own connection to a peer broke, also if it was renewed at once."""
        self._lose_standby(peer_id, reason)
        if self.route is not None and peer_id in self.route.peers:
            self._lost_peers.add(peer_id)
            self._need_route(reason)

    def tick(self, now: float) -> None:
        limit = self.deadline_s
        waits = self.awaiting and not self.healing and self.route is not None
        if limit is not None and waits and now - self.progress_at >= limit:
            self._need_route(f"no sign of progress for {limit:.3g} s", stalled=True)

    def _stale(self, epoch: int, nonce: bytes) -> None:
        if (epoch, nonce) > (self.epoch, self.nonce) and nonce != self.nonce:
            self._stop(Superseded("another driver has opened this session"))

    def _stop(self, error: SessionError) -> None:
        self.stopped = error
        self.effects.append(Stopped(error))

    def _need_route(self, reason: str, stalled: bool = False) -> None:
        if self.stopped is not None:
            return
        self.healing = True
        self.effects.append(
            NeedRoute(
                reason=reason,
                peers=frozenset(self._lost_peers),
                edges=frozenset(self._lost_edges),
                busy=dict(self._busy),
                forgot=frozenset(self._forgot),
                stalled=stalled,
            )
        )

    def _edge_lost(self, edge: tuple[PeerId, PeerId], sender: PeerId, reason: str) -> None:
        assert self.route is not None
        if sender in edge and edge in pairwise(hop.peer_id for hop in self.route):
            self._lost_edges.add(edge)  # a peer's word alone: the edge is avoided, nobody is banned
            self._need_route(reason or f"{edge[0]} and {edge[1]} lost each other")
        elif sender in edge:
            self._lose_standby(edge[1], reason)

    def _problem(self, problem: Any, sender: PeerId) -> None:
        assert self.route is not None
        hops = [hop.peer_id for hop in self.route]
        if problem.edge in pairwise(hops) and problem.edge[1] == sender:
            accused = problem.edge[0]
            self._lost_edges.add((accused, sender))
            self._accusers.setdefault(accused, set()).add(sender)
            if len(self._accusers[accused]) > 1:
                self._lost_peers.add(accused)
        elif problem.edge and sender == hops[0]:
            self._lost_edges.add((CLIENT, sender))  # it accuses us
        else:
            self._lost_peers.add(sender)
        self._need_route(f"{sender}: {problem.message}")

    def _result(self, frame: Frame, sender: PeerId, now: float) -> None:
        assert self.route is not None
        last = self.route[len(self.route) - 1].peer_id
        if sender != last or not self.awaiting or frame.end > len(self.tokens):
            return
        if frame.names != self.names.slice(frame.start, frame.end):
            return  # of content that was taken back
        self.progress_at = now
        self._timings = _added(self._timings, frame.note.timings)
        anew = all(timing.compute_us for timing in frame.note.timings)
        self._computed += frame.end - frame.start if anew else math.inf
        first = max(frame.start, self._want)
        if frame.codec != self.config.codec and len(frame.rows):
            self._lost_peers.add(sender)
            self._need_route(f"{sender} sent values in {frame.codec.name}, not in {self.config.codec.name}")
            return
        if first < frame.end and max(frame.start, frame.note.want) == first:  # its rows begin there
            rows = self._read(frame)
            if rows is None:
                self._lost_peers.add(sender)
                self._need_route(f"{sender} sent values that are not finite")
                return
            self._results[first] = (frame.end, rows)
        self._finish_if_complete()

    def _finish_if_complete(self) -> None:
        at, rows = self._want, []
        while at < len(self.tokens):
            if at not in self._results:
                return
            at, part = self._results[at]
            rows.append(part)
        self.awaiting, self.done_to = False, len(self.tokens)
        assert self.route is not None
        for hop in self.route:  # the route worked, so its seats have applied their keep_to
            self._keep_to.pop((hop.peer_id, hop.entry, hop.exit), None)
        self.effects.append(Output(start=self._want, end=at, rows=tuple(rows), timings=self._timings,
                                   computed=int(self._computed) if math.isfinite(self._computed) else 0))  # fmt: skip
        self._results = {}

    # -- sending ---------------------------------------------------------------------------------------------

    def _choose_codecs(self, route: Route) -> None:
        ends = [CLIENT, *(hop.peer_id for hop in route)]
        for before, hop in zip(ends, route, strict=False):
            if hop.entry not in self.codecs:
                choose = self.config.choose
                self.codecs[hop.entry] = choose(before, hop.peer_id) if choose is not None else self.config.codec

    @property
    def _own_codec(self) -> Codec:
        """Of what the client sends."""
        assert self.route is not None
        return self.codecs[self.route[0].entry]

    def _keep(self, hop: Hop) -> int:
        return self._keep_to.get((hop.peer_id, hop.entry, hop.exit), NO_LIMIT)

    def _send_step(self, start: int) -> None:
        self._pay(FrameType.STEP, start, len(self.tokens))
        self._pay_standing()

    def _pay_standing(self) -> None:
        """Who stands by for the first hop gets what there is, as far as it takes it."""
        for place, sent in self._standing.items():
            end = min(len(self.tokens), sent + self._outflow(place).room)
            if end > sent:
                self._pay(FrameType.FILL, sent, end, place)
                self._standing[place] = end

    def _outflow(self, place: int) -> Outflow:
        if place not in self._outflows:
            row_bytes = self.config.row_bytes(self._own_codec)
            self._outflows[place] = Outflow(window_positions(row_bytes, follows=place > 0))
        return self._outflows[place]

    def _credit(self, place: int, positions: int) -> None:
        for ready in self._outflow(place).credit(positions):
            self._send(self._at(place).peer_id, ready)

    def _pay(self, kind: FrameType, start: int, end: int, place: int = 0) -> None:
        """Embeddings of known tokens to the first hop, or to who stands by for it, in chunks."""
        note = StepNote(self._want if kind is FrameType.STEP else 0)
        for at, to in self._chunks(start, end):
            frame = Frame(
                type=kind,
                hop=place,
                start=at,
                end=to,
                codec=self._own_codec,
                names=self.names.slice(at, to),
                note=note,
                rows=self._embed(at, to, self._own_codec),
            )
            for ready in self._outflow(place).push(frame):
                self._send(self._at(place).peer_id, ready)

    def _chunks(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        assert self.route is not None
        chunk = self.config.chunk or prefill_chunk(end - start, len(self.route))
        for at in range(start, end, chunk):
            yield at, min(at + chunk, end)

    def _send(self, peer_id: PeerId, frame: Frame) -> None:
        frame.session, frame.epoch = self.id, max(0, self.epoch)
        self.effects.append(Send(peer_id, frame))


def _added(before: tuple[HopTiming, ...], last: tuple[HopTiming, ...]) -> tuple[HopTiming, ...]:
    if len(before) != len(last):
        return last
    pairs = zip(before, last, strict=True)
    return tuple(msgspec.structs.replace(new, compute_us=old.compute_us + new.compute_us) for old, new in pairs)
