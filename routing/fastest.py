"""How long one token takes through the fastest chain of a swarm, with one more peer here or there. Pure arithmetic.

Owns a stand-in for the planner's cost that suffices to compare places: computing, and for each hop one way that is as
long as any other. The way back to the client is in none of it, since each chain has it. From the least time up to each
block and the least time after it, one more peer costs as much to look at as its span is long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from routing.types import Span


class Fastest:
    def __init__(self, n_blocks: int, spans: Iterable[tuple[Span, float]], way_s: float):
        """`spans` with the rates of their peers, in blocks of one token a second; `way_s`: one hop's."""
        self._way_s = way_s
        best: dict[tuple[int, int], float] = {}  # of peers with the same span only the quickest counts
        for span, rate in spans:
            ends = span.start, span.end
            best[ends] = max(rate, best.get(ends, 0.0))
        stays = [(start, end, 1 / rate) for (start, end), rate in best.items()]
        self._up_to = _least_s(n_blocks, stays, way_s)
        mirrored = [(n_blocks - end, n_blocks - start, block_s) for start, end, block_s in stays]
        self._after = _least_s(n_blocks, mirrored, way_s)[::-1]

    def with_one(self, span: Span, block_s: float) -> float:
        """Seconds, with one that takes `block_s` for a block at `span`, to which a chain comes once; infinite: there is
        no chain."""
        least_s = self._up_to[-1]
        arrived_s = math.inf  # there, less what it would have taken from its first block on
        for done in range(span.end - span.start):
            arrived_s = min(arrived_s, self._up_to[span.start + done] + self._way_s - done * block_s)
            least_s = min(least_s, arrived_s + (done + 1) * block_s + self._after[span.start + done + 1])
        return least_s


def _least_s(n_blocks: int, stays: list[tuple[int, int, float]], way_s: float) -> list[float]:
    """Of a chain through the first 0, 1, ... blocks."""
    begins: list[list[tuple[int, float]]] = [[] for _ in range(n_blocks)]
    for start, end, block_s in stays:
        begins[start].append((end, block_s))
    least_s = [0.0] + [math.inf] * n_blocks
    here: list[tuple[float, int, float]] = []  # of who serves this block: when it is done with those before, if at all
    for block in range(n_blocks):
        here += [(math.inf, end, block_s) for end, block_s in begins[block]]
        come_s = least_s[block] + way_s
        here = [(min(done_s, come_s) + block_s, end, block_s) for done_s, end, block_s in here]
        least_s[block + 1] = min((done_s for done_s, _, _ in here), default=math.inf)
        here = [each for each in here if each[1] > block + 1]
    return least_s
