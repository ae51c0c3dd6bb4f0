"""An event loop whose time passes only while everybody waits: hours in a moment, and always the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _Jumps(selectors.DefaultSelector):
    """Waiting for nothing but time takes none."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


class Clockwork:
    """`with Clockwork() as clock: clock.run(...)`. `time()` in seconds, from 0. Not for sockets or threads."""

    def __enter__(self) -> Clockwork:
        self._selector = _Jumps()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.time = self.time  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def time(self) -> float:
        return self._selector.now

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._loop.run_until_complete(work)
