"""The shortest path of the planner, on plain numbers: peers are 0, 1, ..., costs are floats.

Owns the algorithm and its counting. Does not know records, requests, links' sources, or what a cost means.

After a block the path stands on the peer that ran it. It runs the next block there too, or moves: the link to
another peer, and that peer's toll, once a stay. Exact for any non-negative links, also where a detour is
shorter than the direct way. Dynamic programming over blocks, kept small by two facts:
- the cost between a pair does not depend on the block: each is asked for at most once, and only if needed;
- a move is tried from the cheapest standing place on, until even the shortest link into the peer would lose.
Where many may run a block, a third one saves more than the look at each of them for each block that it takes:
- with that shortest link in place of the true one, what is still to come is a sum backwards over the blocks,
  alike for all who move; it bounds the rest of every path from below (the A* idea of Hart, Nilsson and
  Raphael, 1968), so that all are dropped that cannot beat the better of two chains: found by going ahead
  greedily, or the one in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MANY = 48
"""So many peers a block, on average, make the bound worth its time."""


@dataclass(kw_only=True)
class Search:
    """A problem and its solution. `servers[block]` are the peers that may run it, ascending, at least one."""

    servers: Sequence[Sequence[int]]
    block_cost: Sequence[float]  # per peer: one block
    toll: Sequence[float]  # per peer: each time the path comes to it
    enter: Sequence[float]  # per peer: from the start
    leave: Sequence[float]  # per peer: to the end
    shortest: Sequence[float]  # per peer: no link into it is shorter
    link: Callable[[int, int], float]
    known: Sequence[int] = ()  # a path, the peer for each block, that the cheapest is not to exceed: in use already
    many: int = MANY
    relaxations: int = 0  # moves looked at
    _into: list[dict[int, float]] = field(default_factory=list)  # links by target, then source, once asked

    def __post_init__(self) -> None:
        # To come to a peer again from itself pays another toll: never below staying.
        self._into = [{peer: math.inf} for peer in range(len(self.toll))]

    def run(self) -> list[int]:
        """The peer for each block. Of equal paths: stay rather than move, then the smaller number before."""
        most = self._most()
        at: dict[int, float] = {}
        for peer in self.servers[0]:
            cost = self.enter[peer] + self.toll[peer] + self.block_cost[peer]
            if cost <= most[0][peer]:
                at[peer] = cost
        came_from: list[dict[int, int]] = []
        for block in range(1, len(self.servers)):
            at, sources = self._advance(block, at, most[block])
            came_from.append(sources)
        path = [min(at, key=lambda peer: (at[peer] + self.leave[peer], peer))]
        for sources in reversed(came_from):
            path.append(sources.get(path[-1], path[-1]))
        return path[::-1]

    def _advance(
        self, block: int, at: Mapping[int, float], most: Mapping[int, float] | Sequence[float]
    ) -> tuple[dict[int, float], dict[int, int]]:
        """Run `block`: for each peer where that costs not more than `most`, the least cost of having done so, and who
        ran the one before if it was another one."""
        assert at, "the chain that gave the limit is itself within it"
        standing = sorted(zip(at.values(), at, strict=True))
        cheapest, tried = standing[0][0], 0
        after: dict[int, float] = {}
        sources: dict[int, int] = {}
        for peer in self.servers[block]:
            stay = at.get(peer, math.inf)
            toll, shortest, cost_here = self.toll[peer], self.shortest[peer], self.block_cost[peer]
            # What a move may cost before the toll: less than staying, and no more than the limit leaves.
            allowed = most[peer] - cost_here
            best, source = (stay if stay < allowed else allowed) - toll, peer
            if cheapest < best - shortest:
                into = self._into[peer]
                for cost, other in standing:
                    if cost >= best - shortest:
                        break
                    tried += 1
                    link = into.get(other)
                    if link is None:
                        link = into[other] = self.link(other, peer)
                    if cost + link < best:
                        best, source = cost + link, other
            if source != peer:
                after[peer], sources[peer] = best + toll + cost_here, source
            elif stay <= allowed:
                after[peer] = stay + cost_here
        self.relaxations += tried
        return after, sources

    def _most(self) -> Sequence[Mapping[int, float] | Sequence[float]]:
        """For each block, per peer: what a path may cost once it has been run there."""
        if sum(map(len, self.servers)) < self.many * len(self.servers):
            return [[math.inf] * len(self.toll)] * len(self.servers)
        to_go = self._to_go(self.shortest)  # no more than it will truly be
        # A path in use is seldom far from the best, which makes the second guess not worth its time.
        other_cost = self._path_cost(self.known) if self.known else self._one_good_chain(self._to_go(self._usual()))
        chain_cost = min(self._one_good_chain(to_go), other_cost)
        # Room for rounding: the bound and the path's own cost are summed in another order.
        limit = chain_cost + 1e-9 + 1e-12 * chain_cost
        return [{peer: limit - rest for peer, rest in each.items()} for each in to_go]

    def _usual(self) -> list[float]:
        """Per peer: what a link into it tends to cost, the middle of a few. A guess, and no bound."""
        peers = range(len(self.toll))
        usual = []
        for peer in peers:
            some = sorted(
                self._link(other, peer) for other in peers[:: max(1, len(peers) // 5)] if other != peer
            )
            usual.append(some[len(some) // 2] if some else 0.0)
        return usual

    def _to_go(self, link_into: Sequence[float]) -> list[dict[int, float]]:
        """For each block and each of its servers: the cost of all after running it there, if links cost
        that."""
        last = len(self.servers) - 1
        result: list[dict[int, float]] = [{} for _ in self.servers]
        result[last] = {peer: self.leave[peer] for peer in self.servers[last]}
        for block in range(last, 0, -1):
            after = result[block]
            run = {peer: self.block_cost[peer] + rest for peer, rest in after.items()}
            move = min(link_into[peer] + self.toll[peer] + cost for peer, cost in run.items())
            result[block - 1] = {peer: min(run.get(peer, move), move) for peer in self.servers[block - 1]}
        return result

    def _one_good_chain(self, to_go: list[dict[int, float]]) -> float:
        """The cost of the chain that takes, block by block, what looks best if the rest costs `to_go`."""
        cost, place, best = 0.0, -1, math.inf
        for peer in self.servers[0]:
            here = self.enter[peer] + self.toll[peer] + self.block_cost[peer]
            if here + to_go[0][peer] < best:
                cost, place, best = here, peer, here + to_go[0][peer]
        for block in range(1, len(self.servers)):
            rest = to_go[block]
            step, target = math.inf, -1
            if place in rest:
                step, target = self.block_cost[place], place
            best = step + rest.get(place, 0.0)
            for peer in self.servers[block]:
                run = self.toll[peer] + self.block_cost[peer]
                if peer != place and self.shortest[peer] + run + rest[peer] < best:
                    run += self._link(place, peer)
                    if run + rest[peer] < best:
                        step, target, best = run, peer, run + rest[peer]
            cost, place = cost + step, target
        return cost + self.leave[place]

    def _path_cost(self, path: Sequence[int]) -> float:
        cost = self.enter[path[0]] + self.toll[path[0]] + self.block_cost[path[0]]
        for before, peer in pairwise(path):
            cost += self.block_cost[peer]
            if peer != before:
                cost += self._link(before, peer) + self.toll[peer]
        return cost + self.leave[path[-1]]

    def _link(self, a: int, b: int) -> float:
        self.relaxations += 1
        link = self._into[b].get(a)
        if link is None:
            link = self._into[b][a] = self.link(a, b)
        return link
