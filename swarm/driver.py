"""The client's half of the session rule, without I/O: tokens go in, outputs of the last block come out.

Whatever breaks is healed in one way: a new route without what was lost, the epoch raised, `OPEN` to all hops, the
last step again; the gap rule brings the rest. The driver knows no socket, no clock and no router: it says
`NeedRoute`, and is given one by `open`. See `docs/wire.md`, "The session rule".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from routing.cost import CLIENT
from routing.errors import ProtocolError, SessionError, Superseded
from routing.types import PeerId, Route
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Outputs of the last block at positions `[start, end)`, one object a RESULT frame, in order."""

    start: int
    end: int
    rows: tuple[Any, ...]
    timings: tuple[HopTiming, ...]


@dataclass(frozen=True, slots=True)
class Stopped:
    error: SessionError


Effect = Send | NeedRoute | Output | Stopped


@dataclass(frozen=True, kw_only=True)
class DriverConfig:
    chunk: int | None = None  # positions a frame; None: what is fastest for the prompt and the route
    deadline_s: float | None = 30.0  # without any sign of progress: a last resort, None switches it off
    codec: Codec = Codec.FP32
    row_bytes: int = 4
    numeric_class: int = 0


class Driver:
    """One session. `embed(start, end)` gives the rows of known tokens; `read(frame)` the rows of a RESULT, or None
    when a value in them is not finite."""

    def __init__(
        self,
        *,
        session_id: bytes,
        nonce: bytes,
        names: NameChain,
        embed: Callable[[int, int], Any],
        read: Callable[[Frame], Any],
        config: DriverConfig | None = None,
    ):
        self.id, self.nonce, self.config = session_id, nonce, config or DriverConfig()
        self._embed, self._read = embed, read
        self.names = names
        self.context = 0  # as OPEN says it
        self.tokens: list[int] = []
        self.epoch = -1
        self.route: Route | None = None
        self.effects: list[Effect] = []
        self.done_to = 0  # positions whose outputs are known, or were not wanted
        self.awaiting = False
        self.healing = False  # NeedRoute was said, and no route given yet
        self.stopped: SessionError | None = None
        self.opened: dict[int, int] = {}  # hop -> position that its seat kept
        self.progress_at = 0.0
        self._want = 0
        self._results: dict[int, tuple[int, Any]] = {}  # start -> (end, rows)
        self._timings: tuple[HopTiming, ...] = ()
        self._outflow = Outflow(1)
        self._lost_peers: set[PeerId] = set()
        self._lost_edges: set[tuple[PeerId, PeerId]] = set()
        self._busy: dict[PeerId, float] = {}
        self._accusers: dict[PeerId, set[PeerId]] = {}
        self._keep_to: dict[tuple[PeerId, int, int], int] = {}
        self._seats: set[tuple[PeerId, int, int]] = set()  # every seat ever opened
        self._adopt_to = NO_LIMIT  # beyond it, nothing that earlier sessions left is to be trusted

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    @property
    def peers_ever(self) -> frozenset[PeerId]:
        return frozenset(peer_id for peer_id, _, _ in self._seats)

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
        self._results, self._timings = {}, ()
        self.awaiting, self.progress_at = True, now
        if self.route is not None and not self.healing and self.stopped is None:
            self._send_step(self.done_to)

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on. Peers learn it by the names of the next step."""
        assert 0 <= position <= len(self.tokens)
        del self.tokens[position:]
        self.names.truncate(position)
        self.done_to = min(self.done_to, position)
        self.awaiting, self._results = False, {}

    def rename(self, names: NameChain, context: int) -> None:
        """From now on all tokens have names of another root, so that what peers hold is computed anew. They learn it by
        an epoch: the caller gives a route again, if there is one."""
        assert not self.awaiting
        names.extend(self.tokens)
        self.names, self.context = names, context

    def open(
        self,
        route: Route,
        addresses: Mapping[PeerId, Sequence[str]],
        now: float,
        warm: int = 0,
        ready: Sequence[Sequence[PeerId]] = (),
    ) -> None:
        """Take a route: at the start, after NeedRoute, or to move to a better one. `warm`: positions that earlier
        sessions probably left at all its hops; they are not sent. Where that is wrong, gaps bring them. `ready`: for
        each hop, who may take the place of a neighbour of its.
        """
        if self.stopped is not None:
            return
        self.epoch, self.route, self.healing = self.epoch + 1, route, False
        self._lost_peers, self._lost_edges, self._busy, self.opened = set(), set(), {}, {}
        self._outflow = Outflow(window_positions(self.config.row_bytes))
        self.progress_at = now
        # Only the last chunk again: the seats ask for the rest, each only for what it has not got.
        start = len(self.tokens)
        if self.awaiting:
            repeat = min(self._want, start - (self.config.chunk or LEAST_CHUNK) if self.epoch > 0 else warm)
            start = max(self.done_to, repeat)
        fresh = [bool(self._seats) and (hop.peer_id, hop.entry, hop.exit) not in self._seats for hop in route]
        body = Open(
            nonce=self.nonce,
            route=tuple(
                OpenHop(
                    hop.peer_id,
                    tuple(addresses.get(hop.peer_id, ())),
                    hop.entry,
                    hop.exit,
                    self._keep(hop),
                    fresh[index],
                    tuple((peer, tuple(addresses.get(peer, ()))) for peer in (ready[index] if ready else ())),
                )
                for index, hop in enumerate(route)
            ),
            names=self.all_names(),
            need_end=start,
            codec=self.config.codec,
            numeric_class=self.config.numeric_class,
            context=self.context,
        )
        self._seats.update((hop.peer_id, hop.entry, hop.exit) for hop in route)
        for peer_id in sorted(route.peers):
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
        if not entries:
            return
        for seat in self._seats:
            if seat[1] > min(entries) or seat[0] == peer_id:
                self._keep_to[seat] = min(keep_to, self._keep_to.get(seat, NO_LIMIT))
        self._adopt_to = min(keep_to, self._adopt_to)
        self._lost_peers.add(peer_id)
        if self.route is not None:
            self._need_route(f"{peer_id} was found to compute wrongly")

    def close(self, keep: bool = True) -> None:
        """CLOSE to every peer it ever opened. `keep`: they may keep what they hold for later sessions with the same
        beginning, unless some of it was found wrong."""
        keep_to = self.done_to if keep and self._adopt_to == NO_LIMIT else 0
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
        if frame.epoch != self.epoch or self.route is None or self.healing or sender not in self.route.peers:
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
                    for ready in self._outflow.credit(frame.start):
                        self._send(self.route[0].peer_id, ready)
            case FrameType.OPENED:
                self.progress_at = now
                self.opened.update(frame.body.positions)
            case FrameType.LOST:
                self._edge_lost((frame.body.source, frame.body.target), sender, frame.body.reason)
            case FrameType.UNKNOWN:
                self._need_route(f"{sender} does not know the session")
            case FrameType.BUSY:
                self._busy[sender] = frame.body.retry_after_ms / 1e3
                self._need_route(f"{sender} has no room")
            case FrameType.ERROR:
                self._problem(frame.body, sender)
            case _:
                raise ProtocolError(f"{frame.type.name} is not for clients")

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        """Our own connection to a peer broke, also if it was renewed at once."""
        if self.route is not None and peer_id in self.route.peers:
            self._lost_peers.add(peer_id)
            self._need_route(reason)

    def tick(self, now: float) -> None:
        limit = self.config.deadline_s
        waits = self.awaiting and not self.healing and self.route is not None
        if limit is not None and waits and now - self.progress_at >= limit:
            self._need_route(f"no sign of progress for {limit:g} s")

    def _stale(self, epoch: int, nonce: bytes) -> None:
        if (epoch, nonce) > (self.epoch, self.nonce) and nonce != self.nonce:
            self._stop(Superseded("another driver has opened this session"))

    def _stop(self, error: SessionError) -> None:
        self.stopped = error
        self.effects.append(Stopped(error))

    def _need_route(self, reason: str) -> None:
        if self.stopped is not None:
            return
        self.healing = True
        self.effects.append(
            NeedRoute(
                reason=reason,
                peers=frozenset(self._lost_peers),
                edges=frozenset(self._lost_edges),
                busy=dict(self._busy),
            )
        )

    def _edge_lost(self, edge: tuple[PeerId, PeerId], sender: PeerId, reason: str) -> None:
        assert self.route is not None
        if sender in edge and edge in pairwise(hop.peer_id for hop in self.route):
            self._lost_edges.add(edge)  # a peer's word alone: the edge is avoided, nobody is banned
            self._need_route(reason or f"{edge[0]} and {edge[1]} lost each other")

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
        self._timings = frame.note.timings
        first = max(frame.start, self._want)
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
        self.effects.append(Output(start=self._want, end=at, rows=tuple(rows), timings=self._timings))
        self._results = {}

    # -- sending ---------------------------------------------------------------------------------------------

    def _keep(self, hop: Any) -> int:
        seat = (hop.peer_id, hop.entry, hop.exit)
        # A seat that is new to us may begin with what an earlier session left there, through the same wrong peer.
        return self._keep_to.get(seat, NO_LIMIT if seat in self._seats else self._adopt_to)

    def _send_step(self, start: int) -> None:
        self._pay(FrameType.STEP, start, len(self.tokens))

    def _pay(self, kind: FrameType, start: int, end: int) -> None:
        """Embeddings of known tokens to the first hop, in chunks."""
        assert self.route is not None
        note = StepNote(self._want if kind is FrameType.STEP else 0)
        for at, to in self._chunks(start, end):
            frame = Frame(
                type=kind,
                start=at,
                end=to,
                codec=self.config.codec,
                names=self.names.slice(at, to),
                note=note,
                rows=self._embed(at, to),
            )
            for ready in self._outflow.push(frame):
                self._send(self.route[0].peer_id, ready)

    def _chunks(self, start: int, end: int) -> Iterable[tuple[int, int]]:
        assert self.route is not None
        chunk = self.config.chunk or prefill_chunk(end - start, len(self.route))
        for at in range(start, end, chunk):
            yield at, min(at + chunk, end)

    def _send(self, peer_id: PeerId, frame: Frame) -> None:
        frame.session, frame.epoch = self.id, max(0, self.epoch)
        self.effects.append(Send(peer_id, frame))
