"""The compute thread gives way if it is to, and the event loop beside it does not; lanes share its time."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
import torch

from swarm.compute import ComputeThread, Lane


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the system has no such class")
async def test_a_nice_peer_computes_when_the_processor_would_idle() -> None:
    def policies() -> tuple[int, set[int]]:
        before = set(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).add_(1)  # on torch's own threads, too
        own = {str(threading.get_native_id()), *(set(os.listdir("/proc/self/task")) - before)}
        return len(own), {os.sched_getscheduler(int(task)) for task in own if Path(f"/proc/self/task/{task}").exists()}

    async with ComputeThread(threads=2, nice=True) as thread:
        count, found = await thread.run(policies)
    assert count > 1 and found == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    async with ComputeThread(threads=2) as thread:
        assert await thread.run(lambda: os.sched_getscheduler(0)) == os.SCHED_OTHER


class Clock:
    """Time passes by working alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 0.0
        monkeypatch.setattr("swarm.compute.time.perf_counter", lambda: self.now_s)

    def work(self, seconds: float) -> None:
        self.now_s += seconds


async def test_lanes_get_equal_shares_however_long_their_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next work of a lane comes only when it has heard of the end of the last one, as with a service."""
    clock = Clock(monkeypatch)

    async with ComputeThread() as thread:
        spent = {thread.lane(): seconds for seconds in (0.0, 0.0, 0.0)}

        def work(mine: Lane, seconds: float) -> None:
            # It takes long enough for the others to hand in theirs.
            while clock.now_s < 1.0 and not all(lane.jobs for lane in spent if lane is not mine):
                threading.Event().wait(0.0001)
            clock.work(seconds)
            spent[mine] += seconds

        async def keep_busy(lane: Lane, seconds: float) -> None:
            while clock.now_s < 1.0:
                await lane.run(work, lane, seconds)

        await asyncio.gather(*map(keep_busy, spent, (0.01, 0.01, 0.03)))
    assert all(abs(seconds - 1 / 3) <= 0.04 for seconds in spent.values()), spent.values()


async def test_who_was_idle_is_due_next_and_has_not_saved_up_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(monkeypatch), []

    def work(name: str) -> None:
        order.append(name)
        clock.work(0.1)

    async with ComputeThread() as thread:
        busy, idle = thread.lane(), thread.lane()
        for _ in range(10):
            await busy.run(work, "busy")
        begun, go = threading.Event(), threading.Event()
        first = asyncio.create_task(busy.run(lambda: (begun.set(), go.wait(), work("busy"))))
        await asyncio.to_thread(begun.wait)
        rest = [asyncio.create_task(lane.run(work, name)) for lane, name in [(busy, "busy"), (idle, "idle")] * 8]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, *rest)
    # Three and a half works behind, 0.25 s of it from before.
    assert order[11:] == ["idle"] * 4 + ["busy", "idle"] * 4 + ["busy"] * 4


async def test_work_learns_that_others_are_due_once_it_had_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), []

    async with ComputeThread() as thread:
        long, other = thread.lane(), thread.lane()
        begun, go = threading.Event(), threading.Event()

        def prefill() -> None:
            told.append(long.gives_way)
            begun.set()
            go.wait()
            told.append(long.gives_way)  # it has only begun
            clock.work(1.0)
            told.append(long.gives_way)

        running = asyncio.create_task(long.run(prefill))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.create_task(other.run(clock.work, 1.0))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(running, waiting)
    assert told == [False, False, True]
