"""Which dials take longer than they should, so that a session looks elsewhere first.

Owns when a dial is late: by the round trip, and by how long the last ones took. A late dial is nobody's fault (a busy
machine's handshakes take seconds) and goes on. Knows no socket and no clock: `now` is any clock that goes forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from routing.types import PeerId

LEAST_S = 0.5  # no dial is late before
ROUND_TRIPS = 8.0  # twice as many as a dial takes: TCP's, TLS's, the hello's and one to spare
LAST, TIMES = 8, 2.0  # of the median of so many that came through, so many times


@dataclass(slots=True)
class _Dial:
    begun: float
    due: float
    callers: int = 1


class Dials:
    """Of one client, those under way. Several may wait for the same one."""

    def __init__(self) -> None:
        self._running: dict[PeerId, _Dial] = {}
        self._took: deque[float] = deque(maxlen=LAST)

    def begins(self, peer_id: PeerId, rtt_s: float, now: float) -> None:
        """`rtt_s`: the round trip to it, as far as is known."""
        dial = self._running.get(peer_id)
        if dial is not None:
            dial.callers += 1
            return
        usual_s = TIMES * median(self._took) if self._took else 0.0
        self._running[peer_id] = _Dial(now, now + max(LEAST_S, ROUND_TRIPS * rtt_s, usual_s))

    def ends(self, peer_id: PeerId, now: float, *, reached: bool) -> None:
        """For one of those who wait."""
        dial = self._running[peer_id]
        dial.callers -= 1
        if dial.callers == 0:
            del self._running[peer_id]
            if reached:
                self._took.append(now - dial.begun)

    def late(self, now: float) -> frozenset[PeerId]:
        """Better not waited for, while there is somebody else."""
        return frozenset(peer_id for peer_id, dial in self._running.items() if dial.due <= now)

    def next_late_s(self, peers: Iterable[PeerId], now: float) -> float | None:
        """How long until the next of these is late. None: all are."""
        dues = (self._running[peer_id].due if peer_id in self._running else now + LEAST_S for peer_id in peers)
        return min((due - now for due in dues if due > now), default=None)
