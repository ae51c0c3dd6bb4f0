"""Whom a client tries out: peers of a chain that seems cheaper than the one in use, known by what they claim alone.

Owns who is worth it and how often. A claim may be a fifth off, as far as noise makes a session wait before it moves;
a few steps that mean nothing tell before anything is moved. Knows no clock and no link.
"""

from __future__ import annotations

from collections import deque

from routing.types import Hop, PeerId, Route

ENOUGH, WITHIN_S = 5, 120.0  # trials of one peer, as long as what they tell is worth half


class Trials:
    """Of one client, whatever its sessions."""

    def __init__(self) -> None:
        self._tried: dict[PeerId, deque[float]] = {}

    def choose(self, route: Route, other: Route, now: float) -> Hop | None:
        """The hop of `other`, a cheaper route as it seems, that was tried least and does not run on `route` already;
        None: all were tried enough of late."""
        old = now - WITHIN_S
        self._tried = {peer: times for peer, times in self._tried.items() if times[-1] > old}
        hops = [hop for hop in other if hop.peer_id not in route.peers]
        least = min(hops, key=lambda hop: self._count(hop.peer_id, old), default=None)
        if least is None or self._count(least.peer_id, old) >= ENOUGH:
            return None
        self._tried.setdefault(least.peer_id, deque(maxlen=ENOUGH)).append(now)
        return least

    def _count(self, peer_id: PeerId, since: float) -> int:
        return sum(at > since for at in self._tried.get(peer_id, ()))
