"""A seat: a peer's state for one session and one `[entry, exit)`. The session rule's inner half, without I/O.

Frames come in, effects go out; computing happens elsewhere. While a seat computes, what arrives for it waits in its
inbox, so that the rule may be read as if computing took no time. Names decide everything: what is held under the
same names is answered from the journal, other names truncate, a step above the position shows a gap, and gaps are
asked of the hop before. See `docs/wire.md`, "The session rule".
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from peer.following import WORTH_SWITCHING, Following
from peer.pulling import digest
from swarm.frames import ALWAYS, Frame, FrameType, HopTiming, Open, Pages, StepNote
from swarm.names import NAME_BYTES, common_positions, common_prefix, count, name_at

if TYPE_CHECKING:
    from peer.session import PeerSession


MOST_WAITING = 1024  # steps over gaps; an honest client has far fewer, and repeats what it misses
CLIENT_PLACE = -1  # the client's number: before the first hop, and after the last


class SeatStore(Protocol):
    """Where K, V and the journal lie. `position` counts the positions held; computing appends to it."""

    @property
    def position(self) -> int: ...
    def truncate(self, position: int) -> int:
        """Forget what is from `position` on. The position reached, which is 0 if the store cannot stop there."""

    def rows(self, start: int, end: int) -> Any: ...
    def evict(self) -> None:
        """Give all memory back; position 0."""

    def pages(self, start: int, end: int) -> tuple[str, bytes] | None:
        """What is held of those positions, and in which dtype; None if it cannot be given."""

    def take_pages(self, start: int, end: int, dtype: str, data: bytes) -> bool:
        """Append what another store of the same blocks gave. False, and nothing has changed, if it does not fit."""

    def copy_prefix(self, other: Any, positions: int) -> bool:
        """Take the first positions of another store of the same blocks in place of what is held. False, and nothing
        has changed, if there is no room."""


@dataclass(slots=True, eq=False)
class Work:
    """Compute `[start, end)` from the rows of `frame`, of which the first `skip` are held already, and of `more`.
    In the `background`: only while nothing else is wanted of the peer."""

    seat: Seat
    frame: Frame
    start: int
    end: int
    skip: int
    more: tuple[Frame, ...] = ()
    background: bool = False
    arrived: float = 0.0

    @property
    def new_names(self) -> bytes:
        """`D[start + 1..end]`."""
        after = ((self.frame, self.skip), *((frame, 0) for frame in self.more))
        return b"".join(frame.names[(skip + 1) * NAME_BYTES :] for frame, skip in after)


@dataclass(slots=True)
class WaitingStep:
    """A step over a gap: its range and names only. Its rows come again with the FILL."""

    start: int
    end: int
    last_name: bytes
    note: StepNote


class Seat:
    def __init__(self, session: PeerSession, entry: int, exit: int, store: SeatStore, root: bytes):
        self.session, self.entry, self.exit, self.store = session, entry, exit, store
        self.names = bytearray(root)  # D[0..position]
        self.hop: int | None = None  # its number among the session's places; None: out of them, but may return
        self.inbox: deque[Frame] = deque()
        self.working: Work | None = None
        self.waiting: list[WaitingStep] = []
        self.asked_to = -1
        self.owed: dict[int, tuple[int, int]] = {}  # per asking hop: what it has not got yet
        self.followers: dict[int, int] = {}  # per standby that is sent all there is: from where on it has not got it
        self.following = Following(self)
        self.forgot = False  # it lost what it held in this epoch
        self.progress_at = 0.0

    @property
    def key(self) -> tuple[int, int]:
        """Caches and journal belong to these boundaries alone."""
        return self.entry, self.exit

    @property
    def position(self) -> int:
        return count(self.names)

    @property
    def stuck(self) -> bool:
        """Whether something waits for a FILL."""
        if self.working is not None:
            return False
        if self.stands_by:
            return self.following.stuck
        return bool(self.waiting or self.owed or self.asked_to > self.position)

    @property
    def stands_by(self) -> bool:
        """It follows what a hop of the route is sent, to take its place if need be, and passes nothing on."""
        return self.following.active

    @property
    def ready_to(self) -> int:
        """Positions that it could answer for at once."""
        return self.following.ready_to if self.stands_by else self.position

    @property
    def last_name(self) -> bytes:
        """D[position]."""
        return bytes(self.names[-NAME_BYTES:])

    # -- frames ----------------------------------------------------------------------------------------------

    def receive(self, frame: Frame) -> None:
        self.inbox.append(frame)
        if frame.type is FrameType.OPEN and self.working is not None:
            self.working.background = False  # it may be wanted in the route now
        self.drain()

    def drain(self) -> None:
        while self.inbox and self.working is None:
            ahead = not self.stands_by and self.following.ahead
            if ahead and self.inbox[0].type in (FrameType.STEP, FrameType.FILL):
                break  # what comes before it is here
            frame = self.inbox.popleft()
            if frame.epoch != self.session.epoch:
                continue  # overtaken by a newer OPEN while it waited
            if frame.type is FrameType.OPEN:
                self._open(frame.hop, frame.body)
            elif frame.type is FrameType.GAP:
                self._owe(frame.hop, frame.start, frame.end)
            elif frame.type is FrameType.PULL:
                self._give_pages(frame)
            elif self.stands_by:
                self.following.receive(frame)
            else:
                self._take(frame)
        self.following.work_off()

    def set_aside(self) -> None:
        """A newer epoch comes. Of what waits, only what a standby was sent is still of use."""
        if self.stands_by:
            self.following.set_aside(frame for frame in self.inbox if frame.epoch == self.session.epoch)
        self.inbox.clear()

    def retire(self) -> None:
        """Out of the route: keep the content, forget what was under way."""
        self.hop = None
        self.following.end()
        self._reset()

    def _reset(self) -> None:
        self.waiting, self.asked_to, self.owed, self.followers, self.forgot = [], -1, {}, {}, False

    def _open(self, hop: int, body: Open) -> None:
        self.hop = hop
        self._reset()
        stood_by = self.stands_by
        self.progress_at = self.session.now
        place = self.session.places[hop]
        kept = self._kept(body.names, place.keep_to)
        if kept < self.position:
            self.truncate(kept)
        if self.position == 0:
            self.names = bytearray(body.names[:NAME_BYTES])
        if body.adopts:
            self._adopt(body.names, place.keep_to)
        self.following.open(body, place, hop >= len(self.session.route))
        self.session.seat_opened(self)
        if stood_by and not self.stands_by:
            self.session.counts.takeovers += 1
        if self.stands_by:
            self.following.begin(body, place)
            return
        if self.following.ahead:
            self.asked_to, _ = self.following.tip()  # it is here, and computed first
        if self.position < body.need_end:
            if place.fresh:
                self.asked_to = body.need_end  # as good as asked: it is on its way
            else:
                self.ask(body.need_end)
        if hop + 1 < len(body.route) and body.route[hop + 1].fresh and body.need_end:
            self._owe(hop + 1, 0, body.need_end)

    def _adopt(self, names: bytes, keep_to: int) -> None:
        """Begin with what another session of this client holds or left here, if that is more than we hold."""
        donor = self.session.table.find_prefix(self, names)
        if donor is None or (positions := min(donor.positions, keep_to)) <= self.position:
            return
        if donor.kept is not None and positions == count(donor.kept.names):
            self.store.evict()
            self.store = self.session.table.prefixes.take(donor.kept)
        elif not self.store.copy_prefix(donor.store, positions):
            return
        self.session.counts.adopted += positions - self.position
        self.names = bytearray(names[: (positions + 1) * NAME_BYTES])

    def _kept(self, names: bytes, keep_to: int) -> int:
        """The longest prefix whose names agree, up to `keep_to`."""
        return common_prefix(self.names, names, min(self.position, keep_to))

    def _owe(self, asker: int, start: int, end: int) -> None:
        if end == ALWAYS:
            self.followers[asker] = start
        else:
            low, high = self.owed.get(asker, (start, end))
            self.owed[asker] = (min(low, start), max(high, end))
        self.pay()

    def _take(self, frame: Frame) -> None:
        """A STEP or a FILL."""
        if frame.start > self.position or not self.continues(frame):
            if self.forgot and frame.start - self.position >= WORTH_SWITCHING and self.session.has_standby(self):
                self.session.unknown(self)  # whoever stands by has it
                return
            if frame.start <= self.position:
                self.truncate(0)  # other content before it: our prefix is stale
            self._wait(frame)
            return
        same = self.same(frame)
        at = frame.start + same
        if at == frame.end:
            self._finish(frame, HopTiming())
            return
        if frame.rows is None:  # its rows were dropped while it waited for its OPEN
            self._wait(frame)
            return
        if at < self.position:
            if frame.type is FrameType.FILL:
                return  # a FILL never rolls back
            self.truncate(at)  # a real rollback; an append must not forget what was asked for
            if self.position < at:
                self._wait(frame)
                return
        self.begin([frame], skip=same)

    def begin(self, frames: list[Frame], *, skip: int = 0, background: bool = False) -> None:
        """Compute the rows of frames that follow each other, but for the first `skip` of them."""
        first, *more = frames
        start, end = first.start + skip, frames[-1].end
        self.working = Work(self, first, start, end, skip, more=tuple(more), background=background)
        self.session.run(self.working)

    def _wait(self, frame: Frame) -> None:
        """A STEP over a gap waits; a FILL that does not fit is a leftover."""
        if frame.type is FrameType.STEP:
            last = name_at(frame.names, frame.end - frame.start)
            self.waiting.append(WaitingStep(frame.start, frame.end, last, frame.note))
            del self.waiting[:-MOST_WAITING]
            self.ask(frame.end)

    def continues(self, frame: Frame) -> bool:
        """Whether the content before the frame is ours, by name."""
        return name_at(self.names, frame.start) == name_at(frame.names, 0)

    def same(self, frame: Frame) -> int:
        """Positions of the frame that we hold under the same names: answered from the journal."""
        return common_positions(self.names, frame.start, frame.names, frame.end - frame.start)

    # -- after computing -------------------------------------------------------------------------------------

    def computed(self, work: Work, timing: HopTiming) -> None:
        """The store has grown by the work's positions. Appending is right whatever came meanwhile: names say what
        it is, and an OPEN that waits in the inbox compares them."""
        self.working = None
        self.names += work.new_names
        self.progress_at = self.session.now
        if work.frame.epoch == self.session.epoch and self.hop is not None:
            self._finish(work.frame, timing)
        self.drain()

    def abandoned(self, work: Work) -> None:
        """The work was not done; the store is as it was."""
        self.working = None
        self.drain()

    def _finish(self, frame: Frame, timing: HopTiming) -> None:
        if frame.type is FrameType.STEP:
            self._pass_on(frame.start, frame.end, frame.note, timing)
        self.pay()
        self._release()

    def _release(self) -> None:
        """Steps whose gap has closed go on as the steps they are."""
        waiting, self.waiting = self.waiting, []
        for step in waiting:
            if step.end <= self.position and name_at(self.names, step.end) == step.last_name:
                self._pass_on(step.start, step.end, step.note, HopTiming())
            else:
                self.waiting.append(step)

    # -- paying, asking, passing on --------------------------------------------------------------------------

    def pay(self) -> None:
        """Send who asked what they asked for, as far as we have it; the rest as we get it. Standbys last, and no more
        than may be under way, so that nothing piles up here for one that is slow."""
        for asker, (start, end) in list(self.owed.items()):
            have = min(end, self.position)
            if have > start:
                self._send_rows(FrameType.FILL, asker, start, have, StepNote())
                self.session.counts.replayed += have - start
                start = have
            if start < end:
                self.owed[asker] = (start, end)
                self.ask(end)
            else:
                del self.owed[asker]
        for asker, start in list(self.followers.items()):
            have = min(self.position, start + self.session.room(asker))
            if have > start:
                self._send_rows(FrameType.FILL, asker, start, have, StepNote())
                self.session.counts.sent_to_standbys += have - start
                self.followers[asker] = have

    def _give_pages(self, frame: Frame) -> None:
        """To the standby at place `frame.hop`. In its turn: an OPEN before it may say that they are not to be
        trusted."""
        found = self.store.pages(frame.start, frame.end) if frame.end <= self.position else None
        body = Pages()
        if found is not None:
            dtype, data = found
            self.session.counts.pages_given += frame.end - frame.start
            body = Pages(dtype, data, digest(dtype, data), name_at(self.names, frame.end))
        answer = Frame(
            type=FrameType.PAGES, hop=frame.hop, start=frame.start, end=frame.end, epoch=frame.epoch, body=body
        )
        self.session.send(frame.hop, answer)

    def ask(self, upto: int) -> None:
        """Ask the hop before for what is missing below `upto`, once."""
        if self.hop is None or self.asked_to >= upto or upto <= self.position:
            return
        start = max(self.position, self.asked_to)
        self.asked_to = upto
        self.session.counts.gaps += 1
        gap = Frame(type=FrameType.GAP, hop=self.hop, start=start, end=upto, epoch=self.session.epoch)
        self.session.send(self.session.before(self.hop), gap)

    def ask_again(self) -> None:
        """Nothing came for a while, or what was asked for is gone: repeat the ask from where we stand."""
        if self.stands_by:
            self.following.ask_again()
            return
        ends = [self.asked_to, *(step.end for step in self.waiting), *(end for _, end in self.owed.values())]
        self.asked_to = -1
        self.progress_at = self.session.now
        self.ask(max(ends))

    def truncate(self, position: int) -> None:
        reached = self.store.truncate(position)
        del self.names[(reached + 1) * NAME_BYTES :]
        self.asked_to = -1  # what was asked for starts above where we stand now
        self.followers = {asker: min(start, reached) for asker, start in self.followers.items()}

    def evict(self, position: int = 0) -> None:
        """Give pages back. Never while computing; a step that waits asks again."""
        assert self.working is None
        wanted = self.asked_to
        self.forgot = self.forgot or self.position - position >= WORTH_SWITCHING
        self.following.evict()
        self.truncate(min(position, self.position))
        if self.position == 0:
            self.store.evict()
        if (self.waiting or self.owed) and not self.stands_by:
            self.asked_to = wanted
            self.ask_again()

    def _pass_on(self, start: int, end: int, note: StepNote, timing: HopTiming) -> None:
        assert self.hop is not None
        onward = StepNote(note.want, (*note.timings, self.session.timing_to(self.hop + 1, timing)))
        self._send_rows(FrameType.STEP, self.hop + 1, start, end, onward)

    def _send_rows(self, kind: FrameType, hop: int, start: int, end: int, note: StepNote) -> None:
        assert self.hop is not None
        last = hop == len(self.session.route) and kind is FrameType.STEP
        for at in range(start, end, self.session.chunk):
            to = min(at + self.session.chunk, end)
            first = min(max(at, note.want), to) if last else at
            frame = Frame(
                type=FrameType.RESULT if last else kind,
                hop=hop - 1 if last else hop,
                start=at,
                end=to,
                epoch=self.session.epoch,
                codec=self.session.codec_from(self.hop),
                names=bytes(self.names[at * NAME_BYTES : (to + 1) * NAME_BYTES]),
                note=note,
                rows=self.store.rows(first, to) if first < to else b"",
            )
            self.session.send(CLIENT_PLACE if last else hop, frame)
