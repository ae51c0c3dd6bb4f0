"""The one thread that computes on a device: torch beside asyncio without blocking the loop, and never two at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class ComputeThread:
    """`async with`: leaving waits for the work under way, and starts no more."""

    def __init__(self, *, threads: int | None = None, name: str = "compute"):
        """`threads`: how many cores one operation may use; None leaves torch's own choice."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=self._begin)

    def _begin(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)

    async def run(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `work` after all that was handed in before it. If the caller is cancelled, work that has begun still
        ends (a pass is not torn), and its result is dropped."""
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._pool.shutdown, wait=True)

    async def __aenter__(self) -> ComputeThread:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
