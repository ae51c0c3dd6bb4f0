"""Virtual time: what happens when, in order. Knows nothing of what happens."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Of two things at the same moment the one that was put down first goes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._things: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, when: float, do: Callable[..., None], *arguments: Any) -> None:
        """`do` at `when`, or now if that is over."""
        self._count += 1
        heapq.heappush(self._things, (max(when, self.now), self._count, do, arguments))

    def after(self, seconds: float, do: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, do, *arguments)

    def run(self, until: float) -> int:
        """Everything up to that moment; returns how many things happened."""
        count = 0
        while self._things and self._things[0][0] <= until:
            self.now, _, do, arguments = heapq.heappop(self._things)
            do(*arguments)
            count += 1
        self.now = until
        return count
