"""Which node is asked for the changes of each block, and what it has told already.

Owns the choice and how long it holds. Pure: time and chance are arguments; asking is the directory's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from routing.types import PeerId

HOLDERS = 5  # nodes store a block's records; all are asked the first time, lest one that has just joined hides some
NEAREST = 3  # one of these is asked afterwards: it is still among the five when others have joined
KEEP_S = 30.0
JITTER = (0.8, 1.2)  # not all blocks, and not all clients, change at once
SHUN_S = 60.0


@dataclass(slots=True)
class Source:
    """The node that is asked for a block; `version` 0: it has told nothing yet."""

    peer_id: PeerId
    until: float
    version: int = 0
    others: tuple[PeerId, ...] = ()  # asked as well, once: nobody has told of this block before


class Sources:
    """One node for each block, another one after a while: what one withholds, the next one tells."""

    def __init__(self, n_blocks: int, chance: random.Random | None = None):
        self._n_blocks, self._chance = n_blocks, chance or random.Random()
        self._sources: dict[int, Source] = {}
        self._runs: dict[PeerId, bytes] = {}
        self._shunned: dict[PeerId, float] = {}

    def due(self, now: float) -> list[int]:
        """The blocks for which a node is to be chosen."""
        kept = {block for block, source in self._sources.items() if source.until > now}
        return [block for block in range(self._n_blocks) if block not in kept]

    def choose(self, holders: Mapping[int, Sequence[PeerId]], now: float) -> None:
        """Take one of each block's `holders` (nearest first), rather not the last one, and few for all together."""
        self._shunned = {peer_id: until for peer_id, until in self._shunned.items() if until > now}
        some = sorted({peer_id for each in holders.values() for peer_id in each} - self._shunned.keys())
        self._chance.shuffle(some)
        rank = {peer_id: place for place, peer_id in enumerate(some)}
        for block, each in holders.items():
            before = self._sources.pop(block, None)
            living = [peer_id for peer_id in each if peer_id in rank]
            able = sorted(living[:NEAREST], key=rank.__getitem__)
            if before is not None and len(able) > 1 and before.peer_id in able:
                able.remove(before.peer_id)
            if before is not None and not able:
                self._sources[block] = before
            elif able:
                until = now + KEEP_S * self._chance.uniform(*JITTER)
                others = [peer_id for peer_id in living if peer_id != able[0]] if before is None else []
                self._sources[block] = Source(able[0], until, others=tuple(others))
        used = {source.peer_id for source in self._sources.values()}
        self._runs = {peer_id: run for peer_id, run in self._runs.items() if peer_id in used}

    def questions(self) -> dict[PeerId, dict[int, int]]:
        """Whom to ask: block -> the version after which we want to know."""
        asked: dict[PeerId, dict[int, int]] = {}
        for block, source in self._sources.items():
            asked.setdefault(source.peer_id, {})[block] = source.version
            for peer_id in source.others:
                asked.setdefault(peer_id, {})[block] = 0
        return asked

    def run(self, peer_id: PeerId) -> bytes:
        """The run of a node to which its versions belong."""
        return self._runs.get(peer_id, b"")

    def told(self, peer_id: PeerId, blocks: Iterable[int], run: bytes, version: int) -> None:
        """A node answered for `blocks`."""
        self._runs[peer_id] = run
        for block in blocks:
            source = self._sources.get(block)
            if source is not None and source.peer_id == peer_id:
                source.version, source.others = version, ()

    def failed(self, peer_id: PeerId, now: float) -> None:
        """A node did not answer: it is not asked again for a while."""
        self._shunned[peer_id] = now + SHUN_S
        self._runs.pop(peer_id, None)
        for block in [block for block, source in self._sources.items() if source.peer_id == peer_id]:
            del self._sources[block]
