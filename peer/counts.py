"""What a peer has done since it began, as plain numbers: added to where it happens, read by `metrics.py`.

All of it on the event loop, without locks: a step costs a few additions. Knows no library and no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REASONS = ("busy", "bad-rows", "nonfinite-input", "nonfinite-output", "failed")  # kinds of `Problem`


class Spread:
    """A histogram: how many values were at most each bound, and more than the one before; and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Passes:
    """Passes of one kind, and the steps in them. Seconds; rows are tokens, each through the blocks of its hop."""

    __slots__ = ("busy_s", "compute_s", "queue_s", "rows")

    def __init__(self) -> None:
        self.rows = Spread(ROWS)  # of each pass
        self.busy_s = 0.0  # of computing, all together
        self.queue_s = Spread(SECONDS)  # of each step, from its arrival to its pass
        self.compute_s = Spread(SECONDS)  # of each step: that of its pass


@dataclass(slots=True)
class Counts:
    """Of one peer, from its start."""

    decode: Passes = field(default_factory=Passes)
    prefill: Passes = field(default_factory=Passes)
    standby: Passes = field(default_factory=Passes)  # in the background, to keep standbys warm
    steps_refused: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    sessions_opened: int = 0
    sessions_refused: int = 0  # no room, or this peer leaves
    frames_refused: int = 0  # that broke the session rule
    gaps: int = 0  # times that positions were missing here, and asked for
    replayed: int = 0  # positions paid from a journal to a hop that missed them
    sent_to_standbys: int = 0  # positions
    adopted: int = 0  # positions that a session took over from another one of its client
    pages_given: int = 0  # positions whose keys and values were handed to another peer
    pages_taken: int = 0
    takeovers: int = 0  # seats that stood by and were called into a route
    hand_overs: int = 0  # sessions whose clients were asked to move them, because this peer leaves
    seats_evicted: int = 0  # for want of room
    prefixes_evicted: int = 0
