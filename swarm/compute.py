"""The one thread that computes on a device: torch beside asyncio without blocking the loop, and never two at once.

A decode step goes through it once in every process, so its hand-overs are kept short: there and back 55 us, where the
standard library's executor takes 140. Who shares it with others has a lane of its own, and lanes that have work get
equal shares of its time (start-time fair queueing, Goyal et al. 1996).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

# A lane whose next work waits to hear of the last one is idle between the two, which must not cost it its share.
CREDIT_S = 0.25

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    arrived_s: float  # in the thread's virtual time


class Lane:
    """A user of the thread: its work runs in order, and waits for no more than its share beside that of other lanes."""

    def __init__(self, thread: ComputeThread):
        self.thread = thread
        self.jobs: deque[_Job] = deque()
        self.spent_s = 0.0  # where its last job ended in the thread's virtual time; the thread's own to write

    async def run(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs `work` after all that was handed in here before it. If the caller is cancelled, work that has begun
        still ends (a pass is not torn), and its result is dropped."""
        return await self.thread.run_in(self, lambda: work(*args, **kwargs))

    @property
    def gives_way(self) -> bool:
        """Asked by the work that runs: whether others are due before more of it."""
        return self.thread.others_due(self)

    @property
    def due_s(self) -> float:
        """When its next job begins, in virtual time: of what it did not use, it has kept no more than CREDIT_S."""
        return max(self.spent_s, self.jobs[0].arrived_s - CREDIT_S)


class ComputeThread:
    """`async with`: leaving waits for the work under way, and starts no more."""

    def __init__(self, *, threads: int | None = None, nice: bool = False, name: str = "compute"):
        """`threads`: how many cores one operation may use; None leaves torch's own choice. `nice`: it computes while
        nobody else wants the processor."""
        self._threads, self._nice = threads, nice
        self._wake: SimpleQueue[bool] = SimpleQueue()  # True for each job in a lane
        self.lanes: list[Lane] = []
        self._own = self.lane()
        self._now_s = self._began = 0.0  # of the job that runs: its start in virtual time, and on the clock
        self._closed = False
        self._thread = threading.Thread(target=self._compute, name=name, daemon=True)

    async def run(self, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """In the lane of those who have none of their own."""
        return await self.run_in(self._own, lambda: work(*args, **kwargs))

    def lane(self) -> Lane:
        """A new one."""
        lane = Lane(self)
        self.lanes.append(lane)
        return lane

    async def run_in(self, lane: Lane, work: Callable[[], R]) -> R:
        if self._closed:
            raise RuntimeError("the compute thread has ended")
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), loop, self._now_s)
        lane.jobs.append(job)
        self._wake.put(True)
        return await job.done  # type: ignore[no-any-return]

    def others_due(self, lane: Lane) -> bool:
        now_s = self._now_s + time.perf_counter() - self._began
        return any(other.jobs and other.due_s < now_s for other in self.lanes if other is not lane)

    async def close(self) -> None:
        self._closed = True
        self._wake.put(False)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> ComputeThread:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _compute(self) -> None:
        if self._nice:
            give_way()  # before torch starts its own threads, which inherit it
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while self._wake.get():
            lane = min((lane for lane in self.lanes if lane.jobs), key=lambda lane: lane.due_s)
            start_s, job = lane.due_s, lane.jobs.popleft()
            if self._closed:
                job.loop.call_soon_threadsafe(job.done.cancel)
                continue
            if job.done.cancelled():
                continue
            self._now_s, self._began = start_s, time.perf_counter()
            result, error = None, None
            try:
                result = job.work()
            except BaseException as raised:  # noqa: BLE001 - the caller's, whatever it is
                error = raised
            lane.spent_s = start_s + time.perf_counter() - self._began
            job.loop.call_soon_threadsafe(_settle, job.done, result, error)
            del job, result, error  # or they would live until the next one comes


def give_way() -> None:
    """This thread, and those that it starts, run when the processor would idle: the system's class for that, else the
    lowest priority. The event loop's thread stays as it is: heartbeats are cheap and must be on time."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)
