"""All sessions of a peer: who may send what, epochs, frames that come early, credits, losses, abandoned sessions.

Sans-IO: `receive`, `link_lost`, `computed`, `tick` take what happened and the time; `effects` tells what to do. The
rule inside one `[entry, exit)` is in `seats.py`. See `docs/wire.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from peer.seats import Seat, SeatStore, Work
from routing.types import PeerId, Span
from swarm.flow import Inflow, Outflow, window_positions
from swarm.frames import (
    NAME_BYTES,
    Busy,
    Codec,
    Frame,
    FrameType,
    HopTiming,
    Lost,
    Open,
    Opened,
    OpenHop,
    Problem,
    Stale,
)
from swarm.names import count


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a frame. `link` tells connections of one client identity apart."""

    peer_id: PeerId
    role: str  # "client" or "peer"
    link: Hashable


@dataclass(slots=True)
class ToPeer:
    peer_id: PeerId
    frame: Frame


@dataclass(slots=True)
class ToLink:
    """An answer on the connection that a frame came on: a client's, or a stranger's."""

    link: Hashable
    frame: Frame


@dataclass(slots=True)
class Run:
    work: Work


@dataclass(slots=True)
class Reach:
    """A peer that this one will send to soon: dial it now."""

    peer_id: PeerId
    addresses: tuple[str, ...]


Effect = ToPeer | ToLink | Run | Reach

_ANSWERS = (FrameType.UNKNOWN, FrameType.ERROR, FrameType.BUSY)


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    hold_s: float = 2.0  # frames that came before their OPEN
    hold_frames: int = 64  # a connection
    hold_bytes: int = 1 << 20
    ask_again_s: float = 1.0
    client_gone_s: float = 120.0
    silent_s: float = 1800.0
    hops: int = 256
    chunk: int = 256  # most positions of a frame passed on
    retry_after_ms: int = 500


class PeerSession:
    """One session on this peer: its newest epoch and route, and a seat for each `[entry, exit)` it ever had."""

    def __init__(self, table: SessionTable, session_id: bytes, client_id: PeerId):
        self.table, self.id, self.client_id = table, session_id, client_id
        self.client: Hashable = None  # the link that carried the newest OPEN; None: gone
        self.epoch, self.nonce = -1, b""
        self.route: tuple[OpenHop, ...] = ()
        self.codec = Codec.FP32
        self.seats: dict[tuple[int, int], Seat] = {}
        self.chunk = table.limits.chunk
        self.heard_at = self.client_gone_at = table.now
        self.abandoned = False
        self._window = window_positions(1)
        self._outflows: dict[int, Outflow] = {}
        self._inflows: dict[int, Inflow] = {}
        self._to_open: set[int] = set()

    @property
    def now(self) -> float:
        return self.table.now

    # -- epochs ----------------------------------------------------------------------------------------------

    def open(self, frame: Frame, link: Hashable) -> None:
        """Adopt a newer epoch. The caller has checked that it is one."""
        body: Open = frame.body
        self.epoch, self.nonce, self.route = frame.epoch, body.nonce, body.route
        self.client, self.codec, self.abandoned = link, Codec(body.codec), False
        self._window = window_positions(self.table.row_bytes(self.codec))
        self._outflows, self._inflows = {}, {}
        mine = {self.seat_key(hop): index for index, hop in enumerate(body.route) if hop.peer_id == self.table.me}
        for key, seat in self.seats.items():
            if key not in mine:
                seat.retire()
        self._to_open = set(mine.values())
        for (entry, exit), index in mine.items():
            if (entry, exit) not in self.seats:
                store = self.table.make_store(entry, exit)
                self.seats[entry, exit] = Seat(self, entry, exit, store, body.names[:NAME_BYTES])
            seat = self.seats[entry, exit]
            seat.inbox.clear()
            seat.receive(Frame(type=FrameType.OPEN, hop=index, epoch=self.epoch, body=body))
            if index + 1 < len(body.route) and body.route[index + 1].peer_id != self.table.me:
                onward = body.route[index + 1]
                self.table.effects.append(Reach(onward.peer_id, onward.addresses))

    @staticmethod
    def seat_key(hop: OpenHop) -> tuple[int, int]:
        """Caches and journal belong to these boundaries alone."""
        return hop.entry, hop.exit

    def seat_opened(self, seat: Seat) -> None:
        """Called by each seat when its OPEN has taken effect; the last one answers the client."""
        self._to_open.discard(seat.hop if seat.hop is not None else -1)
        if not self._to_open:
            self.answer_opened()

    def answer_opened(self) -> None:
        seats = [seat for seat in self.seats.values() if seat.hop is not None]
        positions = tuple(sorted((seat.hop or 0, seat.position) for seat in seats))
        self.to_client(Frame(type=FrameType.OPENED, epoch=self.epoch, body=Opened(positions)))

    # -- frames of the present epoch -------------------------------------------------------------------------

    def receive(self, frame: Frame, sender: Sender) -> None:
        kind = frame.type
        if kind in _ANSWERS:
            if sender.role == "peer":  # the hop addressed could not reach the client itself
                for index in self._edges_to(sender.peer_id):
                    self._tell_lost(index, f"{sender.peer_id} answered {kind.name}")
            return
        if not self._may_send(frame, sender):
            self.table.refuse(frame, sender, f"{kind.name} for hop {frame.hop} may not come from {sender.peer_id}")
            return
        if kind is FrameType.ACK:
            for ready in self._outflow(frame.hop).credit(frame.start):
                self._emit(frame.hop, ready)
            return
        if kind in (FrameType.STEP, FrameType.FILL):
            self._credit(frame)
        at = frame.hop - 1 if kind is FrameType.GAP else frame.hop
        self.seats[self.seat_key(self.route[at])].receive(frame)

    def _may_send(self, frame: Frame, sender: Sender) -> bool:
        """STEP and FILL come from the hop before (the client for hop 0), GAP and ACK from the hop after."""
        hop = frame.hop
        if hop >= len(self.route):
            return False
        if frame.type in (FrameType.STEP, FrameType.FILL):
            if self.route[hop].peer_id != self.table.me:
                return False
            if hop == 0:
                return sender.role == "client" and sender.link == self.client
            return sender.role == "peer" and sender.peer_id == self.route[hop - 1].peer_id
        if frame.type in (FrameType.GAP, FrameType.ACK):
            return (
                hop > 0
                and self.route[hop - 1].peer_id == self.table.me
                and sender.role == "peer"
                and sender.peer_id == self.route[hop].peer_id
            )
        return False

    def _credit(self, frame: Frame) -> None:
        inflow = self._inflows.setdefault(frame.hop, Inflow(self._window))
        if due := inflow.received(frame.end - frame.start):
            self._emit(frame.hop - 1, Frame(type=FrameType.ACK, hop=frame.hop, start=due, epoch=self.epoch))

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, hop: int, frame: Frame) -> None:
        """To a hop of the route; the client is before the first and after the last."""
        if frame.type in (FrameType.STEP, FrameType.FILL):
            for ready in self._outflow(hop).push(frame):
                self._emit(hop, ready)
        else:
            self._emit(hop, frame)

    def _outflow(self, hop: int) -> Outflow:
        if hop not in self._outflows:
            self._outflows[hop] = Outflow(self._window)
        return self._outflows[hop]

    def _emit(self, hop: int, frame: Frame) -> None:
        if 0 <= hop < len(self.route):
            frame.session = self.id
            self.table.effects.append(ToPeer(self.route[hop].peer_id, frame))
        else:
            self.to_client(frame)

    def to_client(self, frame: Frame) -> None:
        frame.session = self.id
        if self.client is not None:
            self.table.effects.append(ToLink(self.client, frame))

    def run(self, work: Work) -> None:
        work.arrived = self.now
        self.table.effects.append(Run(work))

    def timing_to(self, hop: int, timing: HopTiming) -> HopTiming:
        """Adds the measured round trip to the next hop."""
        if hop >= len(self.route):
            return timing
        rtt_us = self.table.rtt_us(self.route[hop].peer_id)
        return HopTiming(timing.queue_us, timing.compute_us, rtt_us)

    # -- losses ----------------------------------------------------------------------------------------------

    def _edges_to(self, peer_id: PeerId) -> list[int]:
        """Indices i such that the edge from hop i to hop i + 1 joins this peer and the other."""
        pair = {self.table.me, peer_id}
        ids = [hop.peer_id for hop in self.route]
        return [i for i in range(len(ids) - 1) if {ids[i], ids[i + 1]} == pair]

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        for index in self._edges_to(peer_id):
            self._tell_lost(index, reason)

    def _tell_lost(self, index: int, reason: str) -> None:
        source, target = self.route[index].peer_id, self.route[index + 1].peer_id
        mine = index if source == self.table.me else index + 1
        self.to_client(Frame(type=FrameType.LOST, hop=mine, epoch=self.epoch, body=Lost(source, target, reason)))

    def problem(self, seat: Seat, problem: Problem) -> None:
        self.to_client(Frame(type=FrameType.ERROR, hop=seat.hop or 0, epoch=self.epoch, body=problem))

    def abandon(self) -> None:
        """Nobody seems to want it: what is pending goes, the content stays only as long as nobody needs the room."""
        self.abandoned = True
        for seat in self.seats.values():
            seat.retire()
            seat.inbox.clear()


class SessionTable:
    """Every session of the peer. Bound to the client that opened it first."""

    def __init__(
        self,
        *,
        me: PeerId,
        span: Span,
        make_store: Callable[[int, int], SeatStore],
        row_bytes: Callable[[Codec], int],
        admit: Callable[[int, int], bool] = lambda layers, positions: True,
        rtt_us: Callable[[PeerId], int] = lambda peer_id: 0,
        limits: SessionLimits | None = None,
    ):
        """`admit(layers, positions)` says whether that many positions fit, evicting if it must."""
        self.me, self.span, self.make_store, self.row_bytes = me, span, make_store, row_bytes
        self.admit, self.rtt_us, self.limits = admit, rtt_us, limits or SessionLimits()
        self.now = 0.0
        self.sessions: dict[bytes, PeerSession] = {}
        self.effects: list[Effect] = []
        self._early: dict[Hashable, list[tuple[float, Frame, Sender]]] = {}

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    # -- frames ----------------------------------------------------------------------------------------------

    def receive(self, frame: Frame, sender: Sender, now: float) -> None:
        self.now = now
        session = self.sessions.get(frame.session)
        if frame.type is FrameType.OPEN:
            self._open(session, frame, sender)
        elif frame.type is FrameType.CLOSE:
            self._close(session, frame, sender)
        elif frame.type in (FrameType.OPENED, FrameType.STALE, FrameType.RESULT, FrameType.LOST):
            self.refuse(frame, sender, f"{frame.type.name} is for clients")
        elif session is None or frame.epoch > session.epoch:
            if frame.type not in _ANSWERS:  # an answer to an answer would go back and forth for ever
                self.hold(frame, sender)
        elif frame.epoch == session.epoch:
            session.heard_at = now
            session.receive(frame, sender)
        # Frames of an older epoch are dropped: their route is no more.

    def _open(self, session: PeerSession | None, frame: Frame, sender: Sender) -> None:
        if problem := self._refusal(session, frame, sender):
            self.refuse(frame, sender, problem)
            return
        body: Open = frame.body
        if session is not None and (frame.epoch, body.nonce) <= (session.epoch, session.nonce):
            if (frame.epoch, body.nonce) == (session.epoch, session.nonce):
                session.client = sender.link
                session.answer_opened()
            else:
                self._stale(frame, sender.link, session)
            return
        layers = sum(hop.exit - hop.entry for hop in body.route if hop.peer_id == self.me)
        held = 0
        if session is not None:
            held = min((seat.position for seat in session.seats.values()), default=0)
        if not self.admit(layers, max(0, count(body.names) - held)):
            busy = Busy(self.limits.retry_after_ms)
            self._answer(frame, sender.link, Frame(type=FrameType.BUSY, body=busy))
            return
        if session is None:
            session = self.sessions[frame.session] = PeerSession(self, frame.session, sender.peer_id)
        elif session.client is not None and session.client != sender.link and session.nonce != body.nonce:
            # Another driver takes over: the one before learns it and stops.
            newest = Frame(type=FrameType.STALE, epoch=frame.epoch, body=Stale(frame.epoch, body.nonce))
            session.to_client(newest)
        session.heard_at = self.now
        session.open(frame, sender.link)
        self._replay_early(frame.session)

    def _refusal(self, session: PeerSession | None, frame: Frame, sender: Sender) -> str | None:
        body: Open = frame.body
        if sender.role != "client" or (session is not None and session.client_id != sender.peer_id):
            return "OPEN may only come from the session's client"
        if not 0 < len(body.route) <= self.limits.hops:
            return f"a route has 1 to {self.limits.hops} hops, this one {len(body.route)}"
        if len(body.names) % NAME_BYTES or not body.names:
            return "names are 8 bytes each, and the first is always there"
        if body.codec not in (Codec.FP32, Codec.BF16):
            return f"codec {body.codec} is not known here"
        at = 0
        for hop in body.route:
            if hop.entry != at or hop.exit <= hop.entry:
                return "the hops of the route do not follow each other"
            at = hop.exit
        mine = [hop for hop in body.route if hop.peer_id == self.me]
        if not mine:
            return "this peer is not in the route"
        for hop in mine:
            if hop.entry not in self.span or hop.exit > self.span.end:
                return f"blocks {hop.entry}:{hop.exit} are not served here, but {self.span}"
        return None

    def _stale(self, frame: Frame, link: Hashable, session: PeerSession) -> None:
        stale = Frame(type=FrameType.STALE, body=Stale(session.epoch, session.nonce))
        self._answer(frame, link, stale)

    def _close(self, session: PeerSession | None, frame: Frame, sender: Sender) -> None:
        if session is None:
            return
        if sender.role != "client" or session.client_id != sender.peer_id:
            self.refuse(frame, sender, "CLOSE may only come from the session's client")
        elif frame.epoch > session.epoch or (
            # A driver that was superseded says goodbye, too; that must not end the session of the one that stays.
            frame.epoch == session.epoch and session.client in (None, sender.link)
        ):
            self._drop(session)

    def _drop(self, session: PeerSession) -> None:
        session.abandon()
        for seat in session.seats.values():
            if seat.working is None:
                seat.evict()
        del self.sessions[session.id]

    def refuse(self, frame: Frame, sender: Sender, why: str) -> None:
        problem = Problem("refused", why)
        self._answer(frame, sender.link, Frame(type=FrameType.ERROR, hop=frame.hop, body=problem))

    def _answer(self, frame: Frame, link: Hashable, answer: Frame) -> None:
        answer.session, answer.epoch = frame.session, frame.epoch
        self.effects.append(ToLink(link, answer))

    # -- frames before their OPEN ----------------------------------------------------------------------------

    def hold(self, frame: Frame, sender: Sender) -> None:
        """A neighbour heard of the new epoch before we did. Past the bytes allowed, a step is held as range and
        names only: the gap rule brings its rows."""
        held = self._early.setdefault(sender.link, [])
        if len(held) >= self.limits.hold_frames:
            self._answer(frame, sender.link, Frame(type=FrameType.UNKNOWN, hop=frame.hop))
            return
        size = sum(_size(other) for _, other, _ in held)
        if frame.rows is not None and size + _size(frame) > self.limits.hold_bytes:
            frame.rows = None
        held.append((self.now + self.limits.hold_s, frame, sender))

    def _replay_early(self, session_id: bytes) -> None:
        for link, held in list(self._early.items()):
            mine = [(frame, sender) for _, frame, sender in held if frame.session == session_id]
            left = [entry for entry in held if entry[1].session != session_id]
            if left:
                self._early[link] = left
            else:
                del self._early[link]
            for frame, sender in mine:
                self.receive(frame, sender, self.now)

    # -- what happened elsewhere -----------------------------------------------------------------------------

    def computed(self, work: Work, timing: HopTiming, now: float) -> None:
        self.now = now
        work.seat.computed(work, timing)
        if self.sessions.get(work.seat.session.id) is not work.seat.session:
            work.seat.evict()  # closed while it computed

    def failed(self, work: Work, problem: Problem, now: float) -> None:
        self.now = now
        session = work.seat.session
        if work.frame.epoch == session.epoch:
            if problem.kind == "busy":
                session.to_client(
                    Frame(type=FrameType.BUSY, epoch=session.epoch, body=Busy(self.limits.retry_after_ms))
                )
            else:
                session.problem(work.seat, problem)
        work.seat.abandoned(work)
        if self.sessions.get(session.id) is not session:
            work.seat.evict()  # closed while it waited

    def upstream_of(self, work: Work) -> PeerId:
        """Who sent the input of a work."""
        hop = work.frame.hop
        session = work.seat.session
        return session.route[hop - 1].peer_id if 0 < hop <= len(session.route) else session.client_id

    def link_lost(self, peer_id: PeerId, reason: str, now: float) -> None:
        """Told for a connection that was renewed at once, too: what was under way is gone."""
        self.now = now
        for session in self.sessions.values():
            session.link_lost(peer_id, reason)

    def client_lost(self, link: Hashable, now: float) -> None:
        self.now = now
        self._early.pop(link, None)
        for session in self.sessions.values():
            if session.client == link:
                session.client, session.client_gone_at = None, now

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        self.now = now
        for link, held in list(self._early.items()):
            due = [entry for entry in held if entry[0] <= now]
            if due:
                left = [entry for entry in held if entry[0] > now]
                self._early[link] = left
                if not left:
                    del self._early[link]
            for session_id in {frame.session for _, frame, _ in due}:
                frame = next(frame for _, frame, _ in due if frame.session == session_id)
                self._answer(frame, link, Frame(type=FrameType.UNKNOWN, hop=frame.hop))
        for session in list(self.sessions.values()):
            self._tick_session(session)

    def _tick_session(self, session: PeerSession) -> None:
        for seat in session.seats.values():
            if seat.hop is not None and seat.stuck and self.now - seat.progress_at >= self.limits.ask_again_s:
                seat.ask_again()
        silent = self.now - session.heard_at
        gone = session.client is None and self.now - session.client_gone_at >= self.limits.client_gone_s
        if silent >= 2 * self.limits.silent_s:
            self._drop(session)
        elif not session.abandoned and (gone or silent >= self.limits.silent_s):
            session.abandon()

    def reclaim(self, enough: Callable[[], bool], idle_s: float = 5.0) -> bool:
        """Evict seats until `enough`: those of abandoned sessions first, then the longest idle. They heal by the
        gap rule when they speak again."""
        seats = [
            (not session.abandoned, session.heard_at, seat)
            for session in self.sessions.values()
            for seat in session.seats.values()
            if seat.working is None and not seat.inbox
            if session.abandoned or seat.hop is None or self.now - session.heard_at >= idle_s
        ]
        seats.sort(key=lambda entry: entry[:2])
        for _, _, seat in seats:
            if enough():
                return True
            seat.evict()
        return enough()


def _size(frame: Frame) -> int:
    rows = frame.rows
    return len(frame.names) + (0 if rows is None else getattr(rows, "nbytes", None) or len(rows))
