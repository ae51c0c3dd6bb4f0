"""How much this machine can take: memory that may be used (a container's limit too), and how fast its blocks run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from peer.blocks import Blocks
from peer.devices import failure
from peer.executor import Executor, PassItem
from routing.errors import NotEnoughMemory
from routing.types import Span
from swarm.codec import int8_value_s

RESERVE_BYTES = 1 << 30  # for the interpreter, p2pd and everybody else on the machine
LEAST_CACHE_BYTES = 1 << 20
CACHE_SHARE = 0.5  # of the memory that is left once the blocks are loaded
DECODE_ROWS = (1, 4, 16)
PREFILL_TOKENS = (64, 256)
PREFILL_BLOCKS = 4  # a chunk is bound by computing, so a few blocks tell what all would
MOST_RUNS, ENOUGH_S = 3, 0.5  # of one batch size


def free_memory(device: str = "cpu") -> int:
    """Bytes that may still be used: the device's, and of this machine's own what is left of the control group's limit
    if that is less. Raises DeviceLost."""
    if torch.device(device).type == "cuda":
        try:
            return torch.cuda.mem_get_info(device)[0]
        except RuntimeError as error:
            raise failure(error, device) or error from error
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What weights and cache may take together."""

    free_bytes: int  # on all devices
    by_device: tuple[int, ...] = ()  # the same on each, where there are several
    limit_bytes: int | None = None  # the owner's own (--max-memory)
    cache_bytes: int | None = None  # the owner's wish; None: as much as is right
    models: int = 1  # that are to have equal parts of it

    def blocks_that_fit(self, block_bytes: int) -> int:
        """How many blocks fit beside their cache: the wished one, else as much again as the blocks. Something is left
        for the rest of the machine. Raises NotEnoughMemory if not even one does."""
        rooms = [max(0, free - RESERVE_BYTES) for free in self.by_device or (self.free_bytes,)]
        room = self._within_limit(sum(rooms))
        if self.cache_bytes is None:
            count = room // self.models // (2 * block_bytes)
        else:
            count = (room - self.cache_bytes) // self.models // block_bytes
        while self.by_device and count > 0 and sum(each // self._taken(count, block_bytes) for each in rooms) < count:
            count -= 1  # a block lies on one device with its cache
        if count < 1:
            raise self._too_little(f"one block takes {_mib(block_bytes)}")
        return count

    def check(self, span: Span, block_bytes: int) -> None:
        """Whether blocks that the owner chose fit at all. Raises NotEnoughMemory."""
        weights, cache = len(span) * block_bytes, self.cache_bytes or LEAST_CACHE_BYTES
        if weights + cache > self._within_limit(self.free_bytes):
            raise self._too_little(f"blocks {span} take {_mib(weights)}")
        if self.by_device:
            self.shares(len(span), block_bytes)

    def shares(self, count: int, block_bytes: int) -> tuple[int, ...]:
        """How many of `count` blocks each device gets, by what fits on it. Raises NotEnoughMemory."""
        each = block_bytes + -(-(self.cache_bytes or 0) // count)
        most = [max(0, free - LEAST_CACHE_BYTES) // each for free in self.by_device or (self.free_bytes,)]
        if sum(most) < count:
            raise self._too_little(f"a block takes {_mib(block_bytes)}, and these devices have no room for {count}")
        return proportional(count, most)

    def for_cache(self, weights_bytes: int) -> int:
        """Bytes for the cache, once the weights are loaded. Raises NotEnoughMemory."""
        most = self.cache_bytes or int(CACHE_SHARE * self.free_bytes)
        if self.limit_bytes is not None:
            most = min(most, self.limit_bytes - weights_bytes)
        if most < LEAST_CACHE_BYTES:
            raise self._too_little(f"the weights take {_mib(weights_bytes)}, and nothing is left for the cache")
        return most

    def _taken(self, count: int, block_bytes: int) -> int:
        """What each of so many blocks takes of the room, with those of other models to come and all their caches."""
        weights = self.models * block_bytes
        return 2 * weights if self.cache_bytes is None else weights + -(-self.cache_bytes // count)

    def _within_limit(self, free_bytes: int) -> int:
        return max(0, free_bytes if self.limit_bytes is None else min(free_bytes, self.limit_bytes))

    def _too_little(self, what: str) -> NotEnoughMemory:
        cache = f" beside {_mib(self.cache_bytes)} of cache" if self.cache_bytes else ""
        limit = f", and --max-memory allows {_mib(self.limit_bytes)}" if self.limit_bytes is not None else ""
        where = f" on {len(self.by_device)} devices together" if self.by_device else ""
        return NotEnoughMemory(
            f"{what}{cache}; {_mib(self.free_bytes)} are free{where}{limit}",
            advice="Free some memory, serve fewer blocks (--blocks A:B), or use --dtype bfloat16 or --quantize int4.",
        )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def proportional(count: int, most: Sequence[int]) -> tuple[int, ...]:
    """`count`, which is no more than the sum of `most`, in parts as near to the proportions of `most` as whole numbers
    are, none above its own (largest remainders, Hamilton)."""
    total = sum(most)
    assert 0 <= count <= total
    parts = [count * each // total for each in most] if total else [0 for _ in most]
    by_remainder = sorted(range(len(most)), key=lambda index: -(count * most[index] % total) if total else 0)
    for index in by_remainder[: count - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds that one block takes: for a decode pass by its rows, for a prefill chunk by its tokens. `int8_value_s`:
    that writing and reading one value of a hidden state in 8 bits takes; 0: not measured."""

    decode: dict[int, float]
    prefill: dict[int, float]
    int8_value_s: float = 0.0

    @property
    def decode_s(self) -> float:
        """One token alone."""
        return self.decode[min(self.decode)]

    @property
    def prefill_s(self) -> float:
        """One token of a short chunk."""
        tokens = min(self.prefill)
        return self.prefill[tokens] / tokens


def mean_speed(parts: Sequence[tuple[int, Speed]]) -> Speed:
    """Of a block of a span whose parts (blocks, speed) have unlike speeds: what a token spends in all of them, by their
    number."""
    total = sum(blocks for blocks, _ in parts)

    def mean(of: Callable[[Speed], dict[int, float]]) -> dict[int, float]:
        sizes = of(parts[0][1])
        return {size: sum(blocks * of(speed)[size] for blocks, speed in parts) / total for size in sizes}

    return Speed(
        decode=mean(lambda speed: speed.decode),
        prefill=mean(lambda speed: speed.prefill),
        int8_value_s=parts[0][1].int8_value_s,
    )


def measure(blocks: Blocks) -> Speed:
    """Passes of random rows, after one that counts for nothing. Takes seconds for a large span."""
    executor, span = Executor(blocks), blocks.span

    def run(sessions: int, tokens: int, end: int) -> None:
        rows = torch.randn(tokens, blocks.shape.hidden).to(blocks.shape.dtype)
        executor.run([PassItem(blocks.seat(span.start, end), rows) for _ in range(sessions)])

    run(1, 1, span.end)
    few = min(span.end, span.start + PREFILL_BLOCKS)
    return Speed(
        decode={n: _quickest(partial(run, n, 1, span.end)) / len(span) for n in DECODE_ROWS},
        prefill={n: _quickest(partial(run, 1, n, few)) / (few - span.start) for n in PREFILL_TOKENS},
        int8_value_s=int8_value_s(blocks.shape.hidden),
    )


def _quickest(work: Callable[[], None]) -> float:
    """Seconds of the quickest of some runs; what takes long is not repeated."""
    runs: list[float] = []
    while len(runs) < MOST_RUNS and sum(runs) < ENOUGH_S:
        begun = time.perf_counter()
        work()
        runs.append(time.perf_counter() - begun)
    return min(runs)
