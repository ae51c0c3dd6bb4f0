"""All sessions of a peer: who may open and close them, frames that come early, room, abandoned sessions.

Sans-IO: `receive`, `link_lost`, `computed`, `tick` take what happened and the time; `effects` tells what to do. One
session's rule is in `session.py`, the rule inside one `[entry, exit)` in `seats.py`. See `docs/wire.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from peer.counts import Counts
from peer.effects import ANSWERS, Effect, Sender, SessionLimits, ToLink
from peer.prefixes import Donor, Prefixes
from peer.seats import Seat, SeatStore, Work
from peer.session import PeerSession
from routing.types import PeerId, Span
from swarm.frames import NAME_BYTES, Busy, Codec, Frame, FrameType, HopTiming, Open, Problem, Stale
from swarm.names import count

FOR_CLIENTS = (FrameType.OPENED, FrameType.STALE, FrameType.RESULT, FrameType.LOST, FrameType.LEAVING)


class SessionTable:
    """Every session of the peer. Bound to the client that opened it first."""

    def __init__(
        self,
        *,
        me: PeerId,
        span: Span,
        make_store: Callable[[int, int], SeatStore],
        row_bytes: Callable[[Codec], int],
        admit: Callable[[Sequence[tuple[int, int]], int], bool] = lambda spans, positions: True,
        way_to: Callable[[PeerId], tuple[int, int]] = lambda peer_id: (0, 0),
        limits: SessionLimits | None = None,
    ):
        """`admit(spans, positions)` says whether that many positions of each `(entry, exit)` fit, evicting if it
        must."""
        self.me, self.span, self.make_store, self.row_bytes = me, span, make_store, row_bytes
        self.admit, self.way_to, self.limits = admit, way_to, limits or SessionLimits()
        self.now = 0.0
        self.sessions: dict[bytes, PeerSession] = {}
        self.effects: list[Effect] = []
        self.prefixes = Prefixes(self.limits.kept_s)
        self.leaving = False
        self.counts = Counts()
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
        elif frame.type in FOR_CLIENTS:
            self.refuse(frame, sender, f"{frame.type.name} is for clients")
        elif session is None or frame.epoch > session.epoch:
            if frame.type not in ANSWERS:  # an answer to an answer would go back and forth for ever
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
        # What stands by is not admitted here: it never takes room from others.
        spans = [(hop.entry, hop.exit) for hop in body.route if hop.peer_id == self.me]
        held = 0
        if session is not None:
            held = min((seat.position for seat in session.seats.values()), default=0)
        if (self.leaving and session is None) or not self.admit(spans, max(0, count(body.names) - held)):
            self.counts.sessions_refused += 1
            busy = Busy(self.limits.retry_after_ms)
            self._answer(frame, sender.link, Frame(type=FrameType.BUSY, body=busy))
            return
        if session is None:
            session = self.sessions[frame.session] = PeerSession(self, frame.session, sender.peer_id)
            self.counts.sessions_opened += 1
        elif session.client is not None and session.client != sender.link and session.nonce != body.nonce:
            # Another driver takes over: the one before learns it and stops.
            newest = Frame(type=FrameType.STALE, epoch=frame.epoch, body=Stale(frame.epoch, body.nonce))
            session.to_client(newest)
        contested = frame.epoch == session.epoch
        session.heard_at = self.now
        session.open(frame, sender.link)
        if contested:
            # What came from the hop before while this OPEN was on its way went to the other driver's client, and
            # nothing on it says whose it was: a newer epoch ends the doubt.
            self._answer(frame, sender.link, Frame(type=FrameType.UNKNOWN))
        self._replay_early(frame.session)

    def _refusal(self, session: PeerSession | None, frame: Frame, sender: Sender) -> str | None:
        body: Open = frame.body
        if sender.role != "client" or (session is not None and session.client_id != sender.peer_id):
            return "OPEN may only come from the session's client"
        if not 0 < len(body.route) <= self.limits.hops:
            return f"a route has 1 to {self.limits.hops} hops, this one {len(body.route)}"
        if len(body.names) % NAME_BYTES or not body.names:
            return "names are 8 bytes each, and the first is always there"
        at = body.route[0].entry
        for hop in body.route:
            if hop.entry != at or hop.exit <= hop.entry:
                return "the hops of the route do not follow each other"
            at = hop.exit
        if problem := _standby_refusal(body):
            return problem
        mine = [hop for hop in body.route + body.standby if hop.peer_id == self.me]
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
            self._drop(session, keep_to=frame.end)

    def leave(self, now: float) -> None:
        """This peer is to end soon: the clients of its sessions move them elsewhere meanwhile."""
        self.now, self.leaving = now, True
        self.counts.hand_overs += len(self.sessions)
        for session in self.sessions.values():
            session.to_client(Frame(type=FrameType.LEAVING, epoch=session.epoch))

    def stay(self) -> None:
        """It does not end after all, and takes new sessions again."""
        self.leaving = False

    def needed(self, now: float, quiet_s: float, *, standby: bool = True) -> int:
        """Sessions that stand here, or with `standby` stand by here, and that something was heard of in the last
        `quiet_s`."""
        return sum(
            session.client is not None and now - session.heard_at < quiet_s
            for session in self.sessions.values()
            if any(seat.hop is not None and (standby or not seat.stands_by) for seat in session.seats.values())
        )

    def _drop(self, session: PeerSession, keep_to: int = 0) -> None:
        """Ends it. Of the seats of its route, the first `keep_to` positions stay for later sessions of the client."""
        of_route = {seat for seat in session.seats.values() if seat.hop is not None}
        session.abandon()
        for seat in session.seats.values():
            if seat.working is None:
                # A seat out of the route may hold what was found wrong since.
                if seat in of_route and keep_to:
                    seat.truncate(min(keep_to, seat.position))
                    names, lost = bytes(seat.names), session.numeric_class
                    self.prefixes.keep(session.client_id, seat.key, names, seat.store, self.now, lost)
                else:
                    seat.evict()
        del self.sessions[session.id]

    def refuse(self, frame: Frame, sender: Sender, why: str) -> None:
        self.counts.frames_refused += 1
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
        self.counts.steps_refused[problem.kind] += 1
        session = work.seat.session
        if work.frame.epoch == session.epoch:
            if problem.kind == "busy":
                session.full(work.seat)
            else:
                session.problem(work.seat, problem)
        work.seat.abandoned(work)
        if self.sessions.get(session.id) is not session:
            work.seat.evict()  # closed while it waited

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
        self._bound_ahead()
        self.prefixes.tick(now)

    def _bound_ahead(self) -> None:
        """Who keeps most for a standby's sake is let go."""
        seats = [seat for session in self.sessions.values() for seat in session.seats.values()]
        kept = {seat: seat.following.ahead.nbytes for seat in seats if seat.following.ahead}
        for seat in sorted(kept, key=lambda seat: kept[seat], reverse=True):
            if sum(kept.values()) <= self.limits.ahead_bytes:
                return
            if seat.stands_by:
                del kept[seat]
                seat.following.ahead.clear()
                seat.session.full(seat)

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

    def find_prefix(self, seat: Seat, names: bytes) -> Donor | None:
        """Which other seat of the client, of a closed session or an open one, holds the longest prefix of `names`. Not
        one to which more was lost on the wire than the session of `seat` allows."""
        client_id, most_lost = seat.session.client_id, seat.session.numeric_class
        best = self.prefixes.find(client_id, seat.key, names, self.now, most_lost)
        for session in self.sessions.values():
            fits = session.client_id == client_id and session.numeric_class <= most_lost
            if fits and session is not seat.session:
                other = session.seats.get(seat.key)
                # A seat out of the route may hold what was found wrong since.
                if other is not None and other.hop is not None:
                    found = Donor.of(other.names, other.store, names)
                    if found is not None and (best is None or found.positions > best.positions):
                        best = found
        return best

    def reclaim(self, enough: Callable[[], bool]) -> bool:
        """Evict until `enough`: what closed sessions left, then seats of abandoned sessions and such as only stand by,
        then the longest idle.
        They heal by the gap rule when they speak again."""
        while not enough() and self.prefixes.drop_oldest():
            self.counts.prefixes_evicted += 1
        seats = [
            (not (session.abandoned or seat.stands_by), session.heard_at, seat)
            for session in self.sessions.values()
            for seat in session.seats.values()
            if seat.working is None and not seat.inbox and seat.position
            if session.abandoned
            or seat.hop is None
            or seat.stands_by
            or self.now - session.heard_at > self.limits.idle_s
        ]
        seats.sort(key=lambda entry: entry[:2])
        for _, _, seat in seats:
            if enough():
                return True
            seat.evict()
            self.counts.seats_evicted += 1
        return enough()


def _standby_refusal(body: Open) -> str | None:
    taken = {(hop.entry, hop.exit, hop.peer_id) for hop in body.route}
    spans, peers = {(hop.entry, hop.exit) for hop in body.route}, {hop.peer_id for hop in body.route}
    for hop in body.standby:
        if (hop.entry, hop.exit) not in spans:
            return f"no hop of the route has the blocks {hop.entry}:{hop.exit} that {hop.peer_id} is to stand by for"
        if hop.peer_id in peers or (place := (hop.entry, hop.exit, hop.peer_id)) in taken:
            return f"{hop.peer_id} cannot stand by for blocks {hop.entry}:{hop.exit}: it is in the route"
        taken.add(place)
    return None


def _size(frame: Frame) -> int:
    rows = frame.rows
    return len(frame.names) + (0 if rows is None else getattr(rows, "nbytes", None) or len(rows))
