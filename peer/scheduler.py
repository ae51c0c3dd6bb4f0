"""Owns the choice of what runs in the next pass. Pure: no torch, no clock, no I/O.

A pass takes every decode step that is ready, then chunks of prefill within a budget of positions, so that a
long prompt delays the tokens of others by little. At most one work a seat in a pass, a seat's works in order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from peer.seats import Seat, Work
from peer.session import PeerSession

MOST_REMEMBERED = 1024  # sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    decode_most: int = 8  # positions: a work up to this is a decode step (a token, or a few that are guessed)
    prefill_alone: int = 512  # positions of prefill in a pass without decode steps
    prefill_beside: int = 128  # and beside decode steps, which wait for the pass


class Scheduler:
    """A queue of works. Among sessions in prefill, the one served longest ago comes first."""

    def __init__(self, config: SchedulerConfig = SchedulerConfig()):
        self.config = config
        self._queues: OrderedDict[Seat, deque[Work]] = OrderedDict()  # the longest waiting seat first
        self._served: OrderedDict[PeerSession, int] = OrderedDict()  # pass of a session's last prefill
        self._passes = 0

    def __len__(self) -> int:
        """Works that wait."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def waiting_positions(self) -> int:
        return sum(_positions(work) for queue in self._queues.values() for work in queue)

    def add(self, work: Work) -> None:
        self._queues.setdefault(work.seat, deque()).append(work)

    def next_pass(self, most_decode: int | None = None) -> list[Work]:
        """Takes the works of the next pass out of the queue; empty if nothing waits. `most_decode` bounds its
        decode steps, those that wait longest first.

        A work is never split, so the first chunk of prefill runs even if it alone is over the budget: no work
        waits for ever.
        """
        self._passes += 1
        heads = [queue[0] for queue in self._queues.values()]
        chosen = [work for work in heads if _positions(work) <= self.config.decode_most][:most_decode]
        budget = self.config.prefill_beside if chosen else self.config.prefill_alone
        chunks = [work for work in heads if _positions(work) > self.config.decode_most]
        # The sort is stable: among equals, the longest waiting first.
        chunks.sort(key=lambda work: self._served.get(work.seat.session, 0))
        for first, work in enumerate(chunks):
            if first == 0 or _positions(work) <= budget:
                chosen.append(work)
                budget -= _positions(work)
                self._remember(work.seat.session)
        for work in chosen:
            self._take(work)
        return chosen

    def _remember(self, session: PeerSession) -> None:
        """A session has no work here while its next chunk is on its way, so this outlives its queue."""
        self._served[session] = self._passes
        self._served.move_to_end(session)
        if len(self._served) > MOST_REMEMBERED:
            self._served.popitem(last=False)

    def _take(self, work: Work) -> None:
        queue = self._queues[work.seat]
        queue.popleft()
        if queue:
            self._queues.move_to_end(work.seat)
        else:
            del self._queues[work.seat]


def _positions(work: Work) -> int:
    return work.end - work.start
