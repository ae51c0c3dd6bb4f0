"""`python -m bench.unlike MODEL ...`: a peer (`python -m peer`) that is slow with prompts: it sleeps after each chunk.

BENCH_PREFILL says how many times as long a chunk takes here as it does in truth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

from bench.setting import PREFILL
from peer import node
from peer.__main__ import main
from peer.blocks import Blocks
from peer.capacity import Speed
from peer.executor import Pass

CHUNK = 9  # positions: from here on it is a prompt's


def slow(times: float) -> None:
    advance = Pass.advance

    def slow_advance(self: Pass, enough: Callable[[float], bool] = lambda seconds: False) -> bool:
        begun = time.perf_counter()
        ended = advance(self, enough)
        if sum(item.hidden.shape[0] for item in self._items) >= CHUNK:
            slept = (times - 1) * (time.perf_counter() - begun)
            time.sleep(slept)
            if self.result is not None:
                self.result = replace(self.result, seconds=self.result.seconds * times)
        return ended

    def slow_measure(blocks: Blocks) -> Speed:
        speed = node.measure(blocks)
        return replace(speed, prefill={tokens: s * times for tokens, s in speed.prefill.items()})

    Pass.advance = slow_advance  # type: ignore[method-assign]
    node.measured = lambda blocks, *_: slow_measure(blocks)  # nor kept: it is not this machine's


if __name__ == "__main__":
    slow(float(os.environ[PREFILL]))
    main()
