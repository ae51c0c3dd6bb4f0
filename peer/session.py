"""One session on a peer: its newest epoch and route, who may send what, its credits, and the losses it reports.

Sans-IO. It keeps a seat (`seats.py`) for each `[entry, exit)` that it ever had; which sessions there are is
`sessions.py`'s to know. See `docs/wire.md`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from peer.effects import ANSWERS, Prepare, Reach, Run, Sender, ToLink, ToPeer
from peer.seats import CLIENT_PLACE, Seat, Work
from routing.types import PeerId
from swarm.flow import Inflow, Outflow, window_positions
from swarm.frames import NAME_BYTES, Busy, Codec, Frame, FrameType, HopTiming, Lost, Open, Opened, OpenHop, Problem
from swarm.link import REPLACED

if TYPE_CHECKING:
    from peer.sessions import SessionTable


class PeerSession:
    """One session on this peer: its newest epoch and route, and a seat for each `[entry, exit)` it ever had."""

    def __init__(self, table: SessionTable, session_id: bytes, client_id: PeerId):
        self.table, self.id, self.client_id = table, session_id, client_id
        self.counts = table.counts
        self.client: Hashable = None  # the link that carried the newest OPEN; None: gone
        self.epoch, self.nonce = -1, b""
        self.route: tuple[OpenHop, ...] = ()
        self.places: tuple[OpenHop, ...] = ()  # the route's hops, then those who stand by for one
        self.codec = Codec.FP32  # of what the client sends
        self.numeric_class = 0
        self.context = 0
        self.seats: dict[tuple[int, int], Seat] = {}
        self.chunk = table.limits.chunk
        self.heard_at = self.client_gone_at = table.now
        self.abandoned = False
        self._outflows: dict[int, Outflow] = {}
        self._inflows: dict[int, Inflow] = {}
        self._to_open: set[int] = set()
        self._spoken: set[PeerId] = set()  # neighbours that a frame of this epoch went to or came from

    @property
    def now(self) -> float:
        return self.table.now

    # -- epochs ----------------------------------------------------------------------------------------------

    def open(self, frame: Frame, link: Hashable) -> None:
        """Adopt a newer epoch. The caller has checked that it is one."""
        body: Open = frame.body
        for seat in self.seats.values():
            seat.set_aside()
        self.epoch, self.nonce, self.route = frame.epoch, body.nonce, body.route
        self.places = body.route + body.standby
        self.client, self.codec, self.abandoned = link, Codec(body.codec), False
        self.context = body.context
        self.numeric_class = max(self.numeric_class, body.numeric_class)
        self._outflows, self._inflows, self._spoken = {}, {}, set()
        mine = {self.seat_key(hop): index for index, hop in enumerate(self.places) if hop.peer_id == self.table.me}
        for key, seat in self.seats.items():
            if key not in mine:
                seat.retire()
        self._to_open = set(mine.values())
        for (entry, exit), index in mine.items():
            if (entry, exit) not in self.seats:
                store = self.table.make_store(entry, exit)
                self.seats[entry, exit] = Seat(self, entry, exit, store, body.names[:NAME_BYTES])
            pulled = [self.places[self.stood_by(index)]] if self.places[index].pulls else []
            for onward in self._after(index) + pulled:
                if onward.peer_id != self.table.me:
                    self.table.effects.append(Reach(onward.peer_id, onward.addresses))
            self.seats[entry, exit].receive(Frame(type=FrameType.OPEN, hop=index, epoch=self.epoch, body=body))
            self.table.effects += [Prepare(*other) for other in self.places[index].ready if other[0] != self.table.me]

    @staticmethod
    def seat_key(hop: OpenHop) -> tuple[int, int]:
        """Caches and journal belong to these boundaries alone."""
        return hop.entry, hop.exit

    # -- places ----------------------------------------------------------------------------------------------

    def before(self, place: int) -> int:
        """Who sends to that place: a standby gets what the hop gets that it stands by for."""
        if place < len(self.route):
            return place - 1
        entry = self.places[place].entry
        return next(index for index, hop in enumerate(self.route) if hop.entry == entry) - 1

    def stood_by(self, place: int) -> int:
        """The hop that a standby stands by for."""
        return self.before(place) + 1

    def codec_from(self, place: int) -> Codec:
        """Of all rows that a place sends, as OPEN says."""
        return self.codec if place == CLIENT_PLACE else Codec(self.places[place].codec)

    def upstream(self, place: int) -> PeerId:
        """Who sends to that place."""
        before = self.before(place) if place < len(self.places) else CLIENT_PLACE
        return self.client_id if before == CLIENT_PLACE else self.places[before].peer_id

    def _after(self, index: int) -> list[OpenHop]:
        """To whom that place sends."""
        if index >= len(self.route):
            return []
        onward = list(self.route[index + 1 : index + 2])
        return onward + [hop for hop in self.places[len(self.route) :] if onward and hop.entry == onward[0].entry]

    def has_standby(self, seat: Seat) -> bool:
        """One that computes what it is sent."""
        return any(self.seat_key(hop) == seat.key and not hop.lazy for hop in self.places[len(self.route) :])

    def seat_opened(self, seat: Seat) -> None:
        """Called by each seat when its OPEN has taken effect; the last one answers the client."""
        self._to_open.discard(seat.hop if seat.hop is not None else -1)
        if not self._to_open:
            self.answer_opened()

    def answer_opened(self) -> None:
        seats = [seat for seat in self.seats.values() if seat.hop is not None]
        positions = tuple(sorted((seat.hop or 0, seat.ready_to) for seat in seats))
        self.to_client(Frame(type=FrameType.OPENED, epoch=self.epoch, body=Opened(positions)))

    # -- frames of the present epoch -------------------------------------------------------------------------

    def receive(self, frame: Frame, sender: Sender) -> None:
        kind = frame.type
        if sender.role == "peer":
            self._spoken.add(sender.peer_id)
        if kind in ANSWERS:
            if sender.role == "peer":  # the hop addressed could not reach the client itself
                for index in self._edges_to(sender.peer_id):
                    self._tell_lost(index, f"{sender.peer_id} answered {kind.name}")
            return
        if not self._may_send(frame, sender):
            self.table.refuse(frame, sender, f"{kind.name} for hop {frame.hop} may not come from {sender.peer_id}")
            return
        at = self.before(frame.hop) if kind in (FrameType.GAP, FrameType.ACK) else frame.hop
        seat = self.seats[self.seat_key(self.places[at])]
        if kind is FrameType.ACK:
            for ready in self._outflow(frame.hop).credit(frame.start):
                self._emit(frame.hop, ready)
            if frame.hop >= len(self.route):
                seat.pay()
            return
        if kind is FrameType.PAGES:
            seat.following.take_pages(frame)
            return
        if kind in (FrameType.STEP, FrameType.FILL):
            stated = self.codec_from(self.before(frame.hop))
            if frame.codec != stated:
                edge = (self.upstream(frame.hop), self.table.me)
                self.problem(seat, Problem("bad-rows", f"rows in {frame.codec.name}, not in {stated.name}", edge))
                return
            self._credit(frame)
        seat.receive(frame)

    def _may_send(self, frame: Frame, sender: Sender) -> bool:
        """STEP and FILL come from the place before (the client for hop 0), GAP and ACK from the one after. A standby
        gets no STEP."""
        if frame.hop >= len(self.places) or (frame.type is FrameType.STEP and frame.hop >= len(self.route)):
            return False
        place, before = self.places[frame.hop], self.before(frame.hop)
        if frame.type in (FrameType.STEP, FrameType.FILL):
            if place.peer_id != self.table.me:
                return False
            if before == CLIENT_PLACE:
                return sender.role == "client" and sender.link == self.client
            return sender.role == "peer" and sender.peer_id == self.places[before].peer_id
        if frame.type in (FrameType.GAP, FrameType.ACK):
            mine = before != CLIENT_PLACE and self.places[before].peer_id == self.table.me
            return mine and sender.role == "peer" and sender.peer_id == place.peer_id
        if frame.type in (FrameType.PULL, FrameType.PAGES) and place.pulls and frame.hop >= len(self.route):
            holder = self.places[self.stood_by(frame.hop)].peer_id
            source, target = (place.peer_id, holder) if frame.type is FrameType.PULL else (holder, place.peer_id)
            return target == self.table.me and sender.role == "peer" and sender.peer_id == source
        return False

    def _credit(self, frame: Frame) -> None:
        inflow = self._inflows.setdefault(frame.hop, Inflow(self._window(frame.hop)))
        if due := inflow.received(frame.end - frame.start):
            self._emit(self.before(frame.hop), Frame(type=FrameType.ACK, hop=frame.hop, start=due, epoch=self.epoch))

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, hop: int, frame: Frame) -> None:
        """To a place, or to the client."""
        if frame.type in (FrameType.STEP, FrameType.FILL):
            for ready in self._outflow(hop).push(frame):
                self._emit(hop, ready)
        else:
            self._emit(hop, frame)

    def room(self, place: int) -> int:
        """Positions that may leave for it now."""
        return self._outflow(place).room

    def _window(self, place: int) -> int:
        row_bytes = self.table.row_bytes(self.codec_from(self.before(place)))
        return window_positions(row_bytes, follows=place >= len(self.route))

    def _outflow(self, hop: int) -> Outflow:
        if hop not in self._outflows:
            self._outflows[hop] = Outflow(self._window(hop))
        return self._outflows[hop]

    def _emit(self, hop: int, frame: Frame) -> None:
        if hop != CLIENT_PLACE:
            frame.session = self.id
            self._spoken.add(self.places[hop].peer_id)
            self.table.effects.append(ToPeer(self.places[hop].peer_id, frame))
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
        """Adds what was measured of the way to the next hop."""
        if hop >= len(self.route):
            return timing
        return HopTiming(timing.queue_us, timing.compute_us, *self.table.way_to(self.route[hop].peer_id))

    # -- losses ----------------------------------------------------------------------------------------------

    def _edges_to(self, peer_id: PeerId) -> list[int]:
        """Places such that the edge to them from the one before joins this peer and the other."""
        pair = {self.table.me, peer_id}
        befores = [(index, self.before(index)) for index in range(len(self.places))]
        return [
            index
            for index, before in befores
            if before != CLIENT_PLACE and {self.places[before].peer_id, self.places[index].peer_id} == pair
        ]

    def link_lost(self, peer_id: PeerId, reason: str) -> None:
        # One that this epoch never used, dead for long and renewed now that it is wanted, has lost nothing of ours.
        if peer_id in self._spoken or not reason.startswith(REPLACED):
            for index in self._edges_to(peer_id):
                self._tell_lost(index, reason)
        for seat in self.seats.values():
            pulls = seat.following.pull is not None and seat.hop is not None
            if pulls and self.places[self.stood_by(seat.hop or 0)].peer_id == peer_id:
                seat.following.ask_again()

    def _tell_lost(self, index: int, reason: str) -> None:
        before = self.before(index)
        source, target = self.places[before].peer_id, self.places[index].peer_id
        mine = before if source == self.table.me else index
        if mine == before:
            self.seats[self.seat_key(self.places[before])].followers.pop(index, None)
        self.to_client(Frame(type=FrameType.LOST, hop=mine, epoch=self.epoch, body=Lost(source, target, reason)))

    def unknown(self, seat: Seat) -> None:
        self.to_client(Frame(type=FrameType.UNKNOWN, hop=seat.hop or 0, epoch=self.epoch))

    def full(self, seat: Seat) -> None:
        """No room for what this seat is to hold."""
        busy = Busy(self.table.limits.retry_after_ms)
        self.to_client(Frame(type=FrameType.BUSY, hop=seat.hop or 0, epoch=self.epoch, body=busy))

    def problem(self, seat: Seat, problem: Problem) -> None:
        self.to_client(Frame(type=FrameType.ERROR, hop=seat.hop or 0, epoch=self.epoch, body=problem))

    def abandon(self) -> None:
        """Nobody seems to want it: what is pending goes, the content stays only as long as nobody needs the room."""
        self.abandoned = True
        for seat in self.seats.values():
            seat.retire()
            seat.inbox.clear()
