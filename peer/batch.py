"""The works of one pass, from the queue to their end: what became of each, and what is counted of them."""

from __future__ import annotations

from dataclasses import dataclass

from peer.counts import Passes
from peer.executor import Pass, PassItem
from peer.seats import Work
from swarm.frames import Problem


@dataclass(slots=True)
class Done:
    """What became of one work in a pass."""

    work: Work
    problem: Problem | None = None


class Batch:
    """The works of one pass, from the queue to their end."""

    def __init__(self, works: list[Work], passes: Passes):
        self.done = [Done(work) for work in works]
        self.begun = 0.0  # once it is its turn on the compute thread
        self.passes = passes  # those of its kind
        self.running: list[Done] = []  # those whose rows could be read
        self.items: list[PassItem] = []  # theirs
        self.packed: Pass | None = None
        self.seconds = 0.0  # of computing

    @property
    def waits(self) -> bool:
        """Nobody wants it soon."""
        return all(done.work.background for done in self.done)

    def count(self) -> None:
        passes, rows = self.passes, 0
        for entry in self.done:
            if entry.problem is None:
                work = entry.work
                rows += work.end - work.start
                passes.queue_s.add(max(0.0, self.begun - work.arrived))
                passes.compute_s.add(self.seconds)
        passes.busy_s += self.seconds
        if rows:
            passes.rows.add(rows)
