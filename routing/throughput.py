"""The chain with the highest pipelined throughput, on plain numbers as in `search.py`: peers are 0, 1, ....

Owns the algorithm. Does not know records, requests, or what a cost means.

Many rows flow through a chain at once, so its pace is that of its slowest stage: a transfer over a link, or a peer with
all that it runs (one that the path comes to twice has the same hands for both). The least slowest stage is a minimax
path over (block, peer); of all as good, the path of least cost is taken. Both are found by dynamic programming over
stays, each taken for itself. Where such a path comes to a peer twice, that bounds its true pace only: then the problem
is parted in two, the peer runs a certain block or does not, and the bounds tell which part to look at (branch and
bound, Land and Doig, 1960). Exact for as many parts as are looked at: in a small swarm more than it ever took, in a
large one few, and there what counts is the path found first, which comes to nobody twice.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, pairwise

END = -1
"""Both ends of a path."""

MOST_WORK = 1000  # peers looked at, each for each of its blocks in each part
SMALL, MOST_PARTS = 64, 1000  # so many parts of a problem with so few peers, each for each of its blocks

Stay = tuple[int, int, int]
"""A peer, the first block that it runs, and the one after the last."""

_Key = tuple[float, float]  # the slowest stage, the cost


@dataclass(kw_only=True)
class Pipeline:
    """A problem and its solution. `servers[block]` are the peers that may run it, at least one."""

    servers: Sequence[Sequence[int]]
    stage_block: Sequence[float]  # per peer: all rows through one block
    stage_toll: Sequence[float]  # per peer: each time the path comes to it
    transfer: Callable[[int, int], float]  # of all rows between two, or from and to END; infinite: no way
    block_cost: Sequence[float]  # from here on as in `Search`: what decides between paths as quick
    toll: Sequence[float]
    link: Callable[[int, int], float]
    _transfers: dict[tuple[int, int], float] = field(default_factory=dict)
    _links: dict[tuple[int, int], float] = field(default_factory=dict)

    def run(self) -> list[Stay]:
        """The path with the least slowest stage, and of those the one of least cost."""
        number = count()
        whole: list[Set[int]] = [frozenset(peers) for peers in self.servers]
        parts = [(*self._bound(whole), next(number))]
        best_key, best = self._once(whole)
        size = sum(map(len, whole))
        for _ in range(MOST_PARTS if size <= SMALL else 1 + MOST_WORK // size):
            if not parts or parts[0][0] >= best_key:
                break
            (slowest, cost), path, servers, _ = heapq.heappop(parts)
            key = _rounded(self.slowest(path)), cost
            if key < best_key:
                best_key, best = key, path
            if key[0] > slowest:
                for part in self._parted(servers, path):
                    heapq.heappush(parts, (*self._bound(part), next(number)))
        return best

    def slowest(self, path: Sequence[Stay]) -> float:
        """The longest stage of a path."""
        ends = [END, *(peer for peer, _, _ in path), END]
        return max(*self._loads(path).values(), *(self._transfer(a, b) for a, b in pairwise(ends)))

    def _loads(self, path: Sequence[Stay]) -> dict[int, float]:
        loads: dict[int, float] = defaultdict(float)
        for peer, start, end in path:
            loads[peer] += self._stage(peer, end - start)
        return loads

    def _stage(self, peer: int, blocks: int) -> float:
        return self.stage_toll[peer] + blocks * self.stage_block[peer]

    def _once(self, servers: list[Set[int]]) -> tuple[_Key, list[Stay]]:
        """A good path that comes to nobody twice."""
        slowest, path = self._path(servers, max, self._transfer, self._stage, once=True)
        if slowest == math.inf:
            return (math.inf, math.inf), []
        cost, cheaper = self._least_cost(servers, slowest, once=True)
        return (_rounded(slowest), cost), cheaper or path

    # -- parts -----------------------------------------------------------------------------------------------

    def _bound(self, servers: list[Set[int]]) -> tuple[_Key, list[Stay], list[Set[int]]]:
        """No path of this part has a lesser key. With a path that has it, if each of its stays is taken for itself."""
        slowest, path = self._path(servers, max, self._transfer, self._stage)
        if slowest == math.inf:
            return (math.inf, math.inf), path, servers
        slowest = max(slowest, *self._must(servers))
        cost, path = self._least_cost(servers, slowest)
        return (_rounded(slowest), cost), path, servers

    def _least_cost(self, servers: list[Set[int]], slowest: float, once: bool = False) -> tuple[float, list[Stay]]:
        """Of paths without a stage that is longer than `slowest`."""
        limit = slowest * (1 + 1e-9)

        def link(a: int, b: int) -> float:
            return self._link(a, b) if self._transfer(a, b) <= limit else math.inf

        def run(peer: int, blocks: int) -> float:
            fits = self._stage(peer, blocks) <= limit
            return self.toll[peer] + blocks * self.block_cost[peer] if fits else math.inf

        return self._path(servers, operator.add, link, run, once)

    def _must(self, servers: list[Set[int]]) -> Iterator[float]:
        """What peers take for the blocks that nobody else has in this part."""
        yield 0.0
        alone: dict[int, list[int]] = defaultdict(list)
        for block, peers in enumerate(servers):
            if len(peers) == 1:
                alone[next(iter(peers))].append(block)
        for peer, blocks in alone.items():
            leaves = sum(any(peer not in servers[block] for block in range(a, b)) for a, b in pairwise(blocks))
            yield (1 + leaves) * self.stage_toll[peer] + len(blocks) * self.stage_block[peer]

    def _parted(self, servers: list[Set[int]], path: Sequence[Stay]) -> Iterator[list[Set[int]]]:
        """Two parts by one block of the busiest peer that the path comes to twice."""
        stays = Counter(peer for peer, _, _ in path)
        peer = max((load, peer) for peer, load in self._loads(path).items() if stays[peer] > 1)[1]
        own = [(start, end) for other, start, end in path if other == peer]
        for block in range(own[0][0], own[-1][1]):
            if peer in servers[block] and len(servers[block]) > 1:
                for peers in (servers[block] - {peer}, frozenset({peer})):
                    yield [*servers[:block], peers, *servers[block + 1 :]]
                return

    # -- one path --------------------------------------------------------------------------------------------

    def _path(
        self,
        servers: Sequence[Set[int]],
        join: Callable[[float, float], float],
        move: Callable[[int, int], float],
        run: Callable[[int, int], float],
        once: bool = False,
    ) -> tuple[float, list[Stay]]:
        """The least value of a path and the path, from moves between peers and stays of so many blocks; infinite: there
        is none. `join` never gives less than what it is given. With `once`, a path that comes to nobody twice, which
        need not be the best of these: for each peer and block only one beginning is kept."""
        last = len(servers)
        # By the block after the last one run, and the peer that ran it: the value, the stay's first block, who was
        # before, and as bits all on the way.
        at: list[dict[int, tuple[float, int, int, int]]] = [{} for _ in range(last + 1)]
        at[0][END] = (0.0, 0, END, 0)
        for start in range(last):
            standing = sorted((value, peer, those) for peer, (value, _, _, those) in at[start].items())
            for peer in sorted(servers[start]):
                arrived, before, on_way, own = math.inf, END, 0, 1 << peer
                for value, other, those in standing:
                    if value >= arrived:
                        break
                    if other == peer or (once and those & own):
                        continue
                    if (found := join(value, move(other, peer))) < arrived:
                        arrived, before, on_way = found, other, those | own
                end = start
                while arrived < math.inf and end < last and peer in servers[end]:
                    end += 1
                    value = join(arrived, run(peer, end - start))
                    if value == math.inf:
                        break
                    if peer not in at[end] or value < at[end][peer][0]:
                        at[end][peer] = (value, start, before, on_way)
        value, peer = min(
            ((join(known[0], move(peer, END)), peer) for peer, known in at[last].items()), default=(math.inf, END)
        )
        if value == math.inf:
            return value, []
        path, end = list[Stay](), last
        while end:
            _, start, before, _ = at[end][peer]
            path.append((peer, start, end))
            peer, end = before, start
        return value, path[::-1]

    def _transfer(self, a: int, b: int) -> float:
        found = self._transfers.get((a, b))
        if found is None:
            found = self._transfers[a, b] = self.transfer(a, b)
        return found

    def _link(self, a: int, b: int) -> float:
        found = self._links.get((a, b))
        if found is None:
            found = self._links[a, b] = self.link(a, b)
        return found


def _rounded(value: float) -> float:
    """Sums in another order are the same."""
    return float(f"{value:.9e}")
