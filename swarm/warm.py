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
        self._left: deque[tuple[bytes, Route]] = deque(maxlen=MOST)

    def remember(self, names: bytes, route: Route) -> None:
        """A session whose content has these names, and which was closed, stood at these hops."""
        if count(names) > 0:
            self._left.append((names, route))

    def positions(self, names: bytes, route: Route, open_now: Iterable[tuple[bytes, Route]] = ()) -> int:
        """How many positions of `names` all hops of `route` probably hold, from closed sessions or some open now."""
        sources = [*self._left, *open_now]
        return max((common_prefix(held, names) for held, other in sources if other == route), default=0)

    def longest(self, names: bytes, open_now: Iterable[tuple[bytes, Route]] = ()) -> tuple[int, Route | None]:
        """The most positions of `names` that the hops of any route probably hold, and that route."""
        best: tuple[int, Route | None] = 0, None
        for held, route in [*self._left, *open_now]:
            shared = common_prefix(held, names)
            if shared and shared >= best[0]:
                best = shared, route
        return best
