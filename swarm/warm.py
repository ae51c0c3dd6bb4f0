"""What a client's sessions probably left at which peers: a new session with the same beginning need not send it.

Only a guess: peers forget when they need the room. Where it is wrong, the gap rule brings what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from routing.types import Route
from swarm.names import common_prefix, count

MOST = 64  # sequences


class WarmPrefixes:
    def __init__(self) -> None:
        self._left: deque[tuple[bytes, frozenset[tuple[str, int, int]]]] = deque(maxlen=MOST)

    def remember(self, names: bytes, route: Route) -> None:
        """A session whose content has these names, and which was closed, stood at these hops."""
        if count(names) > 0:
            self._left.append((names, _seats(route)))

    def positions(self, names: bytes, route: Route, open_now: Iterable[tuple[bytes, Route]] = ()) -> int:
        """How many positions of `names` all hops of `route` probably hold, from closed sessions or some open now."""
        wanted, best = _seats(route), 0
        sources = [*self._left, *((held, _seats(other)) for held, other in open_now)]
        for held, seats in sources:
            if wanted <= seats:
                best = max(best, common_prefix(held, names))
        return best


def _seats(route: Route) -> frozenset[tuple[str, int, int]]:
    return frozenset((hop.peer_id, hop.entry, hop.exit) for hop in route)
