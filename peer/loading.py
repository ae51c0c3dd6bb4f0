"""Brings the blocks of a span into memory: from this disk, or from other peers first; the first ones are served soon.

Owns in which order and how much at a time. Reading and building blocks is `blocks.py`, fetching `borrowed.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from peer.spread import AnyBlocks, AnyLoading
from routing.errors import SwarmError
from routing.types import Span

log = logging.getLogger(__name__)  # its warnings are shown to users

RETRY_S = 30.0
Check = Callable[[Sequence[str]], None]
Run = Callable[..., Awaitable[Any]]  # of a function with its arguments, in another thread


class Begin(Protocol):
    def __call__(self, span: Span, check: Check | None) -> AnyLoading: ...


class Loader:
    """Of one model. What fails of itself is raised, but for `rest`."""

    def __init__(self, begin: Begin, fetch: Callable[[Span], Awaitable[None]], compute: Run, first_s: float):
        """`fetch` brings the weights of a span to this disk, `compute` runs work on the compute thread."""
        self._begin, self._fetch, self._compute, self._first_s = begin, fetch, compute, first_s
        self._loading: AnyLoading | None = None

    @property
    def pending_bytes(self) -> int:
        """Memory that the blocks to come will take."""
        return self._loading.pending_bytes if self._loading is not None else 0

    async def first(self, span: Span, check: Check | None) -> AnyBlocks:
        """All of `span`; where that takes longer than `first_s`, those that are loaded by then, at least one. Nobody is
        served yet: the compute thread does it."""
        loading = self._loading = await self._compute(self._begin, span, check)
        until = time.monotonic() + self._first_s
        while not loading.whole:
            await self._load_some(loading, self._compute, until)
            if time.monotonic() >= until:
                break
        return loading.blocks()

    async def rest(self, grow: Callable[[AnyBlocks], None]) -> None:
        """What is missing of them then, beside the compute thread, which serves. `grow` is called with all that are
        loaded, each time that there are more. Where it fails it is tried again: what is served is of use meanwhile."""
        loading, told = self._loading, ""
        assert loading is not None
        while not loading.whole:
            try:
                await self._load_some(loading, asyncio.to_thread)
            except (SwarmError, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: torch's
                why = f"{loading.loaded} of blocks {loading.span} are loaded, the next one is not: {error}"
                if why != told:
                    log.warning("%s; it is tried again every %g s", why, RETRY_S)
                told = why
                await asyncio.sleep(RETRY_S)
            else:
                grow(loading.blocks())

    async def beside(self, span: Span, check: Check) -> AnyBlocks:
        """All of `span`, beside the compute thread, which goes on serving."""
        await self._fetch(span)
        return await asyncio.to_thread(lambda: self._begin(span, check).load_all())

    async def _load_some(self, loading: AnyLoading, run: Run, until: float | None = None) -> None:
        """As many blocks as there are already, or until `until`: of more blocks at once more peers lend at once."""
        start = loading.span.start + loading.loaded
        part = Span(start, min(start + max(1, loading.loaded), loading.span.end))
        await self._fetch(part)
        for _ in range(len(part)):
            await run(loading.load_next)
            if until is not None and time.monotonic() >= until:
                return
