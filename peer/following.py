"""A seat that stands by: it follows what a hop of the route is sent, so as to take the hop's place at once. Sans-IO.

It gets all inputs of its hop, in order, from the place before. A lazy one keeps them; another one computes them when
its peer has time, or begins with pages that it pulls from its hop. What is not computed when an OPEN calls it into the
route is the first thing that it computes there. See `docs/wire.md`, "Standby" and "Pages".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from peer.ahead import Ahead
from peer.pulling import Pull
from swarm.frames import ALWAYS, NAME_BYTES, Frame, FrameType, Open, OpenHop
from swarm.names import name_at

if TYPE_CHECKING:
    from peer.seats import Seat

LEAST, MOST = 16, 512  # positions computed at once
WORTH_SWITCHING = 64  # positions: less is sooner computed again than a standby is called, or pages are


class Following:
    """Of one seat; `active` while that stands by."""

    def __init__(self, seat: Seat):
        self._seat = seat
        self.active = False
        self.lazy = False  # computes nothing
        self.ahead = Ahead()
        self.pull: Pull | None = None
        self._behind = False  # it misses something
        self._warm_at: int | None = None  # the position at which it says that it could take over

    @property
    def stuck(self) -> bool:
        return self._behind or self.pull is not None

    @property
    def ready_to(self) -> int:
        """Positions that it could answer for at once; a lazy one, that it could compute at once."""
        computes = self._seat.working is not None or self.pull is not None or self.ahead.positions >= LEAST
        return self.tip()[0] if self.lazy or not computes else self._seat.position

    def tip(self) -> tuple[int, bytes]:
        """Behind all that is here or under way: where the next input must begin, and after which name."""
        seat = self._seat
        if self.pull is not None:
            return self.ahead.tip(*self.pull.tip)
        if seat.working is not None:
            return self.ahead.tip(seat.working.end, seat.working.new_names[-NAME_BYTES:])
        return self.ahead.tip(seat.position, seat.last_name)

    # -- epochs ----------------------------------------------------------------------------------------------

    def set_aside(self, frames: Iterable[Frame]) -> None:
        """Before an epoch: of what waits, the inputs are still of use."""
        for frame in frames:
            if frame.type is FrameType.FILL:
                self._keep(frame)
        self._warm_at = None

    def open(self, body: Open, place: OpenHop, active: bool) -> None:
        """The seat has kept what it can of what it holds; so do we, whether we go on to stand by or not."""
        seat = self._seat
        self.active, self.lazy = active, place.lazy
        self.pull, self._behind, self._warm_at = None, False, None
        self.ahead.keep(seat.position, seat.last_name, body.names, place.keep_to, seat.session.epoch)

    def begin(self, body: Open, place: OpenHop) -> None:
        seat = self._seat
        self._warm_at = body.need_end
        if place.pulls and not self.ahead and body.need_end - seat.position >= WORTH_SWITCHING:
            self.pull = Pull(seat.position, body.names, body.need_end)
            self._ask_for_pages()
        self._ask_for_all()

    def end(self) -> None:
        self.active = self.lazy = self._behind = False
        self.pull = self._warm_at = None
        self.ahead.clear()

    def evict(self) -> None:
        """The seat loses what it holds."""
        self.ahead.clear()
        self.pull, self._behind = None, self.active

    # -- inputs ----------------------------------------------------------------------------------------------

    def receive(self, frame: Frame) -> None:
        """A FILL."""
        if frame.rows is None:
            self._behind = True
        else:
            self._keep(frame)

    def _keep(self, frame: Frame) -> None:
        """All inputs come from one sender in order, so what comes later is right: it may take back what came before."""
        seat = self._seat
        if frame.start < self.tip()[0]:
            self.ahead.drop_from(frame.start)
            if seat.working is None and not self.ahead and self.pull is None:
                self._go_back_to(frame)
                if frame.end <= seat.position:
                    return
                frame = _rest(frame, max(frame.start, seat.position))
        if (frame.start, name_at(frame.names, 0)) == self.tip():
            self.ahead.append(frame)
        else:
            self._behind = True

    def _go_back_to(self, frame: Frame) -> None:
        """Forget what is held and not as the frame has it."""
        seat = self._seat
        if frame.start > seat.position or not seat.continues(frame):
            return
        at = frame.start + seat.same(frame)
        if at < min(frame.end, seat.position):
            seat.truncate(at)

    def work_off(self) -> None:
        """Compute what is ahead, if it is time for it; called into the route, at once."""
        seat, least = self._seat, LEAST if self.active else 1
        if seat.working is None and not self.lazy and self.pull is None and self.ahead.positions >= least:
            seat.begin(self.ahead.take(MOST), background=self.active)
        if self._warm_at is not None and self.ready_to >= self._warm_at:
            self._warm_at = None
            seat.session.seat_opened(seat)

    # -- asking ----------------------------------------------------------------------------------------------

    def ask_again(self) -> None:
        """Something is missing, or pages do not come: have it all from the place before, and compute it."""
        self.pull = None
        self.ahead.clear()
        self._ask_for_all()

    def take_pages(self, frame: Frame) -> None:
        seat = self._seat
        if self.pull is None:
            return
        names, body = self.pull.check(frame), frame.body
        if names is None or not seat.store.take_pages(frame.start, frame.end, body.dtype, body.data):
            self.ask_again()
            return
        seat.names += names
        seat.session.counts.pages_taken += frame.end - frame.start
        if self.pull.done:
            self.pull = None
            seat.drain()
        else:
            self._ask_for_pages()

    def _ask_for_all(self) -> None:
        """What there is from here on, and from now on."""
        seat = self._seat
        assert seat.hop is not None
        self._behind, seat.progress_at = False, seat.session.now
        frame = Frame(type=FrameType.GAP, hop=seat.hop, start=self.tip()[0], end=ALWAYS, epoch=seat.session.epoch)
        seat.session.send(seat.session.before(seat.hop), frame)

    def _ask_for_pages(self) -> None:
        seat = self._seat
        assert self.pull is not None and seat.hop is not None
        seat.progress_at = seat.session.now
        for start, end in self.pull.next_asks():
            frame = Frame(type=FrameType.PULL, hop=seat.hop, start=start, end=end, epoch=seat.session.epoch)
            seat.session.send(seat.session.stood_by(seat.hop), frame)


def _rest(frame: Frame, start: int) -> Frame:
    """The frame from `start` on."""
    skip = start - frame.start
    if skip == 0:
        return frame
    coded = isinstance(frame.rows, bytes | bytearray | memoryview)
    row_bytes = len(frame.rows) // (frame.end - frame.start) if coded else 0
    rows = memoryview(frame.rows)[skip * row_bytes :] if coded else frame.rows[skip:]
    return replace(frame, start=start, names=frame.names[skip * NAME_BYTES :], rows=rows)
