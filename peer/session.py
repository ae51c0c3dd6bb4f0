"""One session on a peer: its newest epoch and route, who may send what, its credits, and the losses it reports.

Sans-IO. It keeps a seat (`seats.py`) for each `[entry, exit)` that it ever had; which sessions there are is
`sessions.py`'s to know. See `docs/wire.md`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from peer.effects import ANSWERS, Prepare, Reach, Run, Sender, ToLink, ToPeer
from peer.seats import Seat, Work
from routing.types import PeerId
from swarm.flow import Inflow, Outflow, window_positions
from swarm.frames import NAME_BYTES, Codec, Frame, FrameType, HopTiming, Lost, Open, Opened, OpenHop, Problem
from swarm.link import REPLACED

if TYPE_CHECKING:
    from peer.sessions import SessionTable


class PeerSession:
    """One session on this peer: its newest epoch and route, and a seat for each `[entry, exit)` it ever had."""

    def __init__(self, table: SessionTable, session_id: bytes, client_id: PeerId):
        self.table, self.id, self.client_id = table, session_id, client_id
        self.client: Hashable = None  # the link that carried the newest OPEN; None: gone
        self.epoch, self.nonce = -1, b""
        self.route: tuple[OpenHop, ...] = ()
        self.codec = Codec.FP32
        self.context = 0
        self.seats: dict[tuple[int, int], Seat] = {}
        self.chunk = table.limits.chunk
        self.heard_at = self.client_gone_at = table.now
        self.abandoned = False
        self._window = window_positions(1)
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
        self.epoch, self.nonce, self.route = frame.epoch, body.nonce, body.route
        self.client, self.codec, self.abandoned = link, Codec(body.codec), False
        self.context = body.context
        self._window = window_positions(self.table.row_bytes(self.codec))
        self._outflows, self._inflows, self._spoken = {}, {}, set()
        mine = {self.seat_key(hop): index for index, hop in enumerate(body.route) if hop.peer_id == self.table.me}
        for key, seat in self.seats.items():
            if key not in mine:
                seat.retire()
        self._to_open = set(mine.values())
        for (entry, exit), index in mine.items():
            if (entry, exit) not in self.seats:
                store = self.table.make_store(entry, exit)
                self.seats[entry, exit] = Seat(self, entry, exit, store, body.names[:NAME_BYTES])
            if index + 1 < len(body.route) and body.route[index + 1].peer_id != self.table.me:
                onward = body.route[index + 1]
                self.table.effects.append(Reach(onward.peer_id, onward.addresses))
            seat = self.seats[entry, exit]
            seat.inbox.clear()
            seat.receive(Frame(type=FrameType.OPEN, hop=index, epoch=self.epoch, body=body))
            self.table.effects += [Prepare(*other) for other in body.route[index].ready if other[0] != self.table.me]

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
            self._spoken.add(self.route[hop].peer_id)
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
        # One that this epoch never used, dead for long and renewed now that it is wanted, has lost nothing of ours.
        if peer_id in self._spoken or not reason.startswith(REPLACED):
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
