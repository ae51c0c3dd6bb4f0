"""How many bytes a second a link takes: while more waits than it takes, what has left tells.

Owns one link's last such stretch. Bulk alone tells; steps of a few kilobytes never fill a link. Knows no socket: the
link says when its channel would take no more, and when it did again. Time is an argument.
"""

from __future__ import annotations

LEAST_BYTES = 96 * 1024  # a chunk of a prompt; less tells how a connection begins (TCP's slow start), not what it takes
BELIEVED_S = 60.0
WEIGHT = 0.5  # of the newest stretch


class Throughput:
    """`buffered`: bytes that leave between a pause of the channel and its end, beside what is written meanwhile."""

    def __init__(self, buffered: int):
        self._buffered = buffered
        self._since: float | None = None  # of the stretch under way
        self._written = self._left = 0
        self._resumed_at = 0.0
        self._rate, self._rate_at = 0.0, 0.0

    def bytes_per_s(self, now: float) -> float:
        """0: not known, or too long ago."""
        return self._rate if now - self._rate_at < BELIEVED_S else 0.0

    def wrote(self, nbytes: int) -> None:
        self._written += nbytes

    def paused(self, now: float) -> None:
        """The channel takes no more."""
        if self._since is None:
            self._since, self._resumed_at, self._written = now, now, 0

    def resumed(self, now: float) -> None:
        """The channel takes more again: all has left but what it may hold."""
        if self._since is not None:
            self._resumed_at, self._left = now, self._written + self._buffered

    def emptied(self) -> None:
        """Nothing waits any more: what leaves from now on does not tell how much could."""
        since, self._since = self._since, None
        if since is None or self._resumed_at <= since or self._left < LEAST_BYTES:
            return
        rate = self._left / (self._resumed_at - since)
        self._rate = rate if not self.bytes_per_s(self._resumed_at) else WEIGHT * rate + (1 - WEIGHT) * self._rate
        self._rate_at = self._resumed_at
