"""`python -m tests.whole.failing_device` is `swarm serve` on a device, the last one of several, that fails for good at
SIGUSR1."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence

import torch

from peer import devices
from peer.__main__ import main
from peer.executor import Executor, Pass, PassItem

GONE = "CUDA error: unspecified launch failure"

gone = threading.Event()
ends: set[int] = set()  # of what each device has
begin, computes = Executor.begin, devices.computes


def fails(self: Executor, items: Sequence[PassItem]) -> Pass:
    ends.add(self.blocks.span.end)
    if gone.is_set() and self.blocks.span.end == max(ends):
        raise torch.AcceleratorError(f"{GONE}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.")
    return begin(self, items)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: gone.set())
    Executor.begin = fails  # type: ignore[method-assign]
    devices.computes = lambda device: not gone.is_set() and computes(device)
    main()
