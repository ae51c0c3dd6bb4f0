"""Background tasks that live as long as the object that owns them.

Like `asyncio.TaskGroup`, but opening and closing may happen in different tasks (a notebook's cells, a test's fixture),
which a TaskGroup does not allow. An unexpected failure is kept and raised at `close`, never lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


async def until_one_ends(works: Iterable[Awaitable[Any]]) -> None:
    """Runs all of them until the first one ends, and raises what that one raised; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Meanwhile(Generic[T]):
    """`async with`: work that goes on meanwhile. Unless its result is taken, nothing of it is left afterwards."""

    def __init__(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None):
        """`undo` ends what the work gives."""
        self._work, self._undo = work, undo
        self._task: asyncio.Task[T]
        self._taken = False

    async def __aenter__(self) -> Meanwhile[T]:
        self._task = asyncio.create_task(self._work)
        return self

    async def result(self) -> T:
        """The caller's from now on."""
        result = await self._task
        self._taken = True
        return result

    async def shared(self) -> T:
        """The same, for as long as this lasts: it is still undone at the end, and whoever asks may be cancelled."""
        return await asyncio.shield(self._task)

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        if self._taken:
            return
        self._taken = True
        self._task.cancel()
        (result,) = await asyncio.gather(self._task, return_exceptions=True)
        if self._undo is not None and not isinstance(result, BaseException):
            await self._undo(result)


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        if self._closed:
            task.cancel()
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)
            self._failure = self._failure or error
            self._failed.set()

    async def failure(self) -> BaseException:
        """Waits for the first failure, which is the caller's to deal with then: `close` will not raise it again."""
        while (failure := self._failure) is None:
            await self._failed.wait()
        self._failure = None
        return failure

    async def close(self) -> None:
        """Cancels what runs, waits for it, and raises the first failure there was."""
        self._closed = True
        running = [task for task in self._running if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
