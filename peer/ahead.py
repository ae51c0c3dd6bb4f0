"""Inputs that a standby was sent and has not computed yet. Sans-IO.

A lazy standby computes nothing until it is called. Another one computes a few positions at a time, which costs little
more than one. What waits is kept when the seat takes a place in the route: it is the first thing that is computed.
"""

from __future__ import annotations

from swarm.frames import Frame
from swarm.names import name_at


class Ahead:
    """Frames whose positions follow each other without a hole."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def positions(self) -> int:
        return self._frames[-1].end - self._frames[0].start if self._frames else 0

    def tip(self, position: int, name: bytes) -> tuple[int, bytes]:
        """Where the next input must begin, and after which name, when `position` and `name` are the last ones held."""
        return _end(self._frames[-1]) if self._frames else (position, name)

    def append(self, frame: Frame) -> None:
        self._frames.append(frame)

    @property
    def nbytes(self) -> int:
        return sum(len(frame.names) + getattr(frame.rows, "nbytes", len(frame.rows)) for frame in self._frames)

    def clear(self) -> None:
        self._frames.clear()

    def drop_from(self, position: int) -> None:
        """Whole frames that reach beyond `position`: other content follows it now."""
        while self._frames and self._frames[-1].end > position:
            self._frames.pop()

    def keep(self, position: int, name: bytes, names: bytes, keep_to: int, epoch: int) -> None:
        """Only what continues the content held and agrees with `names`, up to `keep_to`; it is of `epoch` now."""
        kept: list[Frame] = []
        for frame in self._frames:
            end, last = _end(frame)
            fits = (frame.start, name_at(frame.names, 0)) == (position, name) and end <= keep_to
            if not fits or name_at(names, end) != last:
                break
            frame.epoch = epoch
            kept.append(frame)
            position, name = end, last
        self._frames = kept

    def take(self, most: int) -> list[Frame]:
        """The first frames, of `most` positions or a little more."""
        count, positions = 0, 0
        while count < len(self._frames) and positions < most:
            positions += self._frames[count].end - self._frames[count].start
            count += 1
        taken, self._frames = self._frames[:count], self._frames[count:]
        return taken


def _end(frame: Frame) -> tuple[int, bytes]:
    return frame.end, name_at(frame.names, frame.end - frame.start)
