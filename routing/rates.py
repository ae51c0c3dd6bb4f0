"""How many tokens a second a set of spans can give, and how strong each block is in it. Pure arithmetic.

A peer of rate `r` (blocks of one token a second: 1 / decode_s) divides its time among the blocks of its span as it is
used; sessions enter and leave a span at any block. So `T` tokens a second flow if and only if each block gets `T`
and no peer gives more than its rate: a transportation problem. By max-flow min-cut

    T = min over sets of blocks B of f(B) / |B|,    f(B): the sum of the rates of all peers that serve a block of B.

One block alone is not the bound in general, and neither are consecutive ones: who serves 0 and 2 has to do both, though
1 may have plenty. A longer span never lowers T, since nobody must use all of it. The level of a block is its share when
the weakest get as much as possible, then the next weakest, and so on: the lexicographically optimal base of the
polymatroid f, found by Fujishige's decomposition (Mathematics of Operations Research 5, 1980). T is the lowest level.

Spans are intervals, so f is the total less what lies in the gaps between the blocks of B, and the set that is weakest
is a longest path over pairs of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import add

from routing.types import Span

NOISE = 1e-9  # relative: what sums of floats differ by


class Rates:
    """Sums of the rates of spans, as `levels` needs them. Mutable: spans come and go."""

    def __init__(self, n_blocks: int, spans: Iterable[tuple[Span, float]] = ()):
        self.n_blocks = n_blocks
        # Of spans that end at `end` or before and begin at `start` or later: self._within[end][start].
        exact = [[0.0] * (n_blocks + 1) for _ in range(n_blocks + 1)]
        for span, rate in spans:
            exact[span.end][span.start] += rate
        before = [0.0] * (n_blocks + 1)
        self._within: list[list[float]] = []
        for row in exact:
            total = 0.0
            for start in range(n_blocks, -1, -1):
                total += row[start]
                row[start] = before[start] + total
            self._within.append(row)
            before = row

    def and_also(self, span: Span, rate: float) -> Rates:
        """With one more span; a negative rate takes one away."""
        more = Rates.__new__(Rates)
        more.n_blocks = self.n_blocks
        begins = span.start + 1
        more._within = [
            row if end < span.end else [each + rate for each in row[:begins]] + row[begins:]
            for end, row in enumerate(self._within)
        ]
        return more

    def levels(self) -> list[float]:
        """Of each block, in tokens a second."""
        found = [0.0] * self.n_blocks
        nothing = NOISE * self._within[self.n_blocks][0]
        parts = [(list(range(self.n_blocks)), 0, self.n_blocks)]
        while parts:
            blocks, low, high = parts.pop()
            total = self._rate_of(blocks, low, high)
            level = total / len(blocks) if total > nothing else 0.0
            weakest = self._weakest(blocks, low, high, level)
            if len(weakest) == len(blocks):
                for block in blocks:
                    found[block] = level
                continue
            parts.append((weakest, low, high))
            for start, end in _gaps(weakest, low, high):
                if rest := [block for block in blocks if start <= block < end]:
                    parts.append((rest, start, end))
        return found

    def _rate_of(self, blocks: list[int], low: int, high: int) -> float:
        """Of the peers within [low, high) that serve one of `blocks`."""
        within = self._within
        return within[high][low] - sum(within[end][start] for start, end in _gaps(blocks, low, high))

    def _weakest(self, blocks: list[int], low: int, high: int, level: float) -> list[int]:
        """Those of `blocks` that together lack most of `level` each; all, if none lack anything."""
        within, starts = self._within, [low]  # where a gap may begin: behind the block before
        best, previous = [0.0], [-1]  # with each of `starts` as the last gap's begin
        for at, block in enumerate([*blocks, high]):
            row = within[block]
            gaps = row[low : block + 1] if len(starts) == block + 1 - low else map(row.__getitem__, starts)
            reach = list(map(add, best, gaps))
            most = max(reach)
            previous.append(reach.index(most))
            if at < len(blocks):
                best.append(most + level)
                starts.append(block + 1)
        lack = most - within[high][low]  # of `level` for each, less what there is
        if lack <= NOISE * max(within[high][low], level):
            return blocks
        chosen, at = [], previous[-1]
        while at > 0:
            chosen.append(blocks[at - 1])
            at = previous[at]
        return chosen[::-1]


def _gaps(blocks: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """Between neighbours, before the first and behind the last."""
    ends = [low - 1, *blocks, high]
    return [(before + 1, after) for before, after in pairwise(ends) if after > before + 1]


def throughput(n_blocks: int, spans: Iterable[tuple[Span, float]]) -> float:
    """Tokens a second through all blocks, all sessions together; 0 if some block has nobody."""
    return min(Rates(n_blocks, spans).levels())
