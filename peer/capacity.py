"""How much this machine can take: memory that may be used (a container's limit too), and how fast its blocks run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from peer.blocks import Blocks
from peer.executor import Executor, PassItem
from routing.errors import NotEnoughMemory

RESERVE_BYTES = 1 << 30  # for the interpreter, p2pd and everybody else on the machine
PREFILL_TOKENS = 64


def free_memory() -> int:
    """Bytes that may still be used: the machine's, or what is left of the control group's limit if that is less."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
    return free


def blocks_that_fit(block_bytes: int, free_bytes: int) -> int:
    """How many blocks fit with as much again left for the cache. Raises NotEnoughMemory if not even one does."""
    count = int(max(0, free_bytes - RESERVE_BYTES) // (2 * block_bytes))
    if count < 1:
        raise NotEnoughMemory(
            f"one block takes {block_bytes / 2**20:.0f} MiB, and {free_bytes / 2**20:.0f} MiB are free",
            advice="Free some memory, or use --dtype bfloat16 or --quantize int4.",
        )
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds for one block: one token of a decode step, one token of a prefill chunk."""

    decode_s: float
    prefill_s: float


def measure(blocks: Blocks) -> Speed:
    """A few passes of random rows; also brings the weights into memory. Takes a few tenths of a second."""
    executor, span = Executor(blocks), blocks.span
    seat = blocks.seat(span.start, span.end)

    def seconds(tokens: int) -> float:
        rows = torch.randn(tokens, blocks.shape.hidden).to(blocks.shape.dtype)
        begun = time.perf_counter()
        executor.run([PassItem(seat, rows)])
        return time.perf_counter() - begun

    seconds(1)
    decode = min(seconds(1) for _ in range(3))
    prefill = seconds(PREFILL_TOKENS)
    return Speed(decode_s=decode / len(span), prefill_s=prefill / PREFILL_TOKENS / len(span))
