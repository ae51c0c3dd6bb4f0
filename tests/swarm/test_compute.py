"""The compute thread gives way if it is to, and the event loop beside it does not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from swarm.compute import ComputeThread


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
