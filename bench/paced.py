"""`python -m bench.paced MODEL ...`: a peer (`python -m peer`) whose passes take as long as it is told, on any machine.

It computes them in truth, and sleeps for what is left of their time. BENCH_PACE names a file that says how long that is
(`Pace` as JSON); it is read for each pass, so a peer can become slower while it runs. What it measures of itself is
this pace, so it is neither kept for other peers nor taken from them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.setting import PACE
from peer import node
from peer.__main__ import main
from peer.executor import Executor, Pass, PassItem
from peer.scheduler import SchedulerConfig


@dataclass(frozen=True, kw_only=True)
class Pace:
    """As a `routing.simulation.Scenario` says it. Seconds."""

    block_s: float  # one token through one block, alone
    prefill_share: float  # of that: one token of a chunk
    slope: float  # of that: what one more step in the pass adds

    def pass_s(self, items: Sequence[PassItem]) -> float:
        """Through one block. No pass takes less than a step alone."""
        rows = [item.hidden.shape[0] for item in items]
        if max(rows) <= SchedulerConfig().decode_most:
            return self.block_s * (1 + self.slope * (len(items) - 1))
        return self.block_s * max(1.0, self.prefill_share * sum(rows))


def pace(file: Path) -> None:
    begin = Executor.begin

    def begin_paced(self: Executor, items: Sequence[PassItem]) -> Pass:
        packed = begin(self, items)
        block_s = Pace(**json.loads(file.read_text())).pass_s(items)
        blocks = max(item.exit for item in items) - min(item.entry for item in items)
        packed._steps = _paced(packed._steps, block_s, blocks)
        return packed

    Executor.begin = begin_paced  # type: ignore[method-assign]
    node.measured = lambda blocks, *_: node.measure(blocks)


def _paced(steps: Iterator[None], block_s: float, blocks: int) -> Iterator[None]:
    """All is computed at once; then come the blocks, after each of which a chunk can be left. What runs in between
    is not part of the pass's time."""
    due_s = -time.perf_counter()
    for _ in steps:
        pass
    due_s += time.perf_counter()  # ahead of the pace by so much
    for _ in range(blocks):
        begun = time.perf_counter()
        time.sleep(max(0.0, block_s - due_s))
        due_s += time.perf_counter() - begun - block_s
        yield


if __name__ == "__main__":
    pace(Path(os.environ[PACE]))
    main()
