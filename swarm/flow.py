"""Credits between two consecutive hops of a session, so that a slow hop is never buried.

Counted in positions. Both sides compute the same window from the bytes of a row; the receiver credits on receipt, a
quarter of a window at a time, so that decode steps do not pay a frame each way.
"""

from __future__ import annotations

from collections import deque

from swarm.frames import Frame

WINDOW_POSITIONS = 4096
WINDOW_BYTES = 16 << 20
FOLLOW_BYTES = 64 << 10  # to a standby: what fills it up must not stand before the steps on a slow uplink


def window_positions(row_bytes: int, follows: bool = False) -> int:
    """Positions that may be under way without credit, for rows of `row_bytes` on the wire; to a hop, or to a standby
    that `follows` one."""
    return max(1, min(WINDOW_POSITIONS, (FOLLOW_BYTES if follows else WINDOW_BYTES) // max(1, row_bytes)))


class Outflow:
    """The sender's side: frames in, frames that may leave now out. First in, first out."""

    def __init__(self, window: int):
        self._window, self._used = window, 0
        self._waiting: deque[Frame] = deque()

    @property
    def room(self) -> int:
        """Positions that would leave at once."""
        return 0 if self._waiting else max(0, self._window - self._used)

    def push(self, frame: Frame) -> list[Frame]:
        self._waiting.append(frame)
        return self._ready()

    def credit(self, positions: int) -> list[Frame]:
        self._used = max(0, self._used - positions)
        return self._ready()

    def _ready(self) -> list[Frame]:
        ready = []
        while self._waiting:
            size = self._waiting[0].end - self._waiting[0].start
            # Below a quarter the receiver may not have credited yet, so a frame of any size must pass.
            if self._used >= self._window // 4 and self._used + size > self._window:
                break
            self._used += size
            ready.append(self._waiting.popleft())
        return ready

    def __len__(self) -> int:
        return len(self._waiting)


class Inflow:
    """The receiver's side: what to credit, when it is worth a frame."""

    def __init__(self, window: int):
        self._threshold, self._received = max(1, window // 4), 0

    def received(self, positions: int) -> int:
        """Positions to credit now; 0 while less than a quarter of the window came."""
        self._received += positions
        if self._received < self._threshold:
            return 0
        due, self._received = self._received, 0
        return due
