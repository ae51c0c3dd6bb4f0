"""The works of one pass, from the queue to their end: what became of each, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from peer.cache import SeatCache
from peer.counts import Passes
from peer.executor import Pass, PassItem
from peer.seats import Work
from peer.spread import SpreadCache
from swarm.frames import Problem

CACHES = (SeatCache, SpreadCache)


@dataclass(slots=True)
class Done:
    """What became of one work in a pass."""

    work: Work
    problem: Problem | None = None


class Batch:
    """The works of one pass, from the queue to their end. Where blocks lie on several devices it is a pass on each in
    turn; all works of a batch need the same ones."""

    def __init__(self, works: Sequence[Work], passes: Passes):
        self.done = [Done(work) for work in works]
        self.parts = len(cache_of(works[0]).parts)  # devices that it is to pass
        self.at = 0  # which of them it is at
        self.begun = 0.0  # once it is its turn on the first compute thread
        self.between_s = 0.0  # that it waited for its turn on the others
        self.passes = passes  # those of its kind
        self.running: list[Done] = []  # those whose rows could be read, and were well computed so far
        self.items: list[PassItem] = []  # theirs
        self.packed: Pass | None = None
        self.seconds = 0.0  # of computing
        self._came_at = 0.0

    @property
    def waits(self) -> bool:
        """Nobody wants it soon."""
        return all(done.work.background for done in self.done)

    def begin(self, now: float) -> None:
        """It is its turn, on the first device or on one of the others."""
        if self.at:
            self.between_s += max(0.0, now - self._came_at)
        else:
            self.begun = now

    def go_on(self, now: float) -> bool:
        """To the next device, with the outputs of this one. False if there is none, or nothing to compute there."""
        if self.at + 1 == self.parts or self.packed is None or self.packed.result is None:
            return False
        self.at += 1
        outputs = self.packed.result.outputs
        running = list(zip(self.running, self.items, outputs, strict=True))
        going = [each for each in running if each[0].problem is None]
        self.running = [entry for entry, _, _ in going]
        self.items = [
            PassItem(cache_of(entry.work).parts[self.at], output, item.long) for entry, item, output in going
        ]
        self.packed, self._came_at = None, now
        return bool(going)

    def queued_s(self, work: Work) -> float:
        """Between the arrival of one of its works and its end, without what was computed."""
        return max(0.0, self.begun - work.arrived) + self.between_s

    def count(self) -> None:
        passes, rows = self.passes, 0
        for entry in self.done:
            if entry.problem is None:
                work = entry.work
                rows += work.end - work.start
                passes.queue_s.add(self.queued_s(work))
                passes.compute_s.add(self.seconds)
        passes.busy_s += self.seconds
        if rows:
            passes.rows.add(rows)


def cache_of(work: Work) -> SeatCache | SpreadCache:
    store = work.seat.store
    assert isinstance(store, CACHES)
    return store


def by_exit(works: Sequence[Work]) -> Iterator[list[Work]]:
    """Those that leave at the same device together."""

    def parts(work: Work) -> int:
        return len(cache_of(work).parts)

    for _, together in groupby(sorted(works, key=parts), parts):
        yield list(together)
