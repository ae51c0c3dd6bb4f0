"""Which few of many peers a client is connected with beforehand: those that its plans are likely to use, and others.

Owns that choice alone. What a peer costs it asks of `Costs`, and who is worth a search of `Candidates`. Chance is an
argument: clients that know nothing yet must not all take the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from routing.candidates import Candidates
from routing.cost import CLIENT, Costs
from routing.request import Request
from routing.types import PeerId, PeerRecord, PeerState
from routing.view import View

T = TypeVar("T")

STRANGERS = 8  # one in so many, at least, is taken blindly: what nobody expects is found out so
JITTER = 0.5  # of an estimated cost, at most: estimates are rough, and alike for all who have measured nothing


class Choice(Protocol):
    """What is needed of a `random.Random`."""

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...

    def uniform(self, a: float, b: float) -> float: ...


class Probes:
    """Of one client. Who was chosen stays so while it is worth a search, or, as a stranger, while it serves."""

    def __init__(self, candidates: Candidates, costs: Costs, rng: Choice):
        self._candidates, self._costs, self._rng = candidates, costs, rng
        self._likely: dict[PeerId, None] = {}
        self._strangers: list[PeerId] = []

    def choose(self, view: View, now: float, most: int) -> list[PeerId]:
        """At most so many of those that serve, some for each block."""
        serving = {record.peer_id: record for record in view.alive(now, PeerState.SERVING)}
        if len(serving) <= most:
            return list(serving)
        short = self._candidates.short_view(view, now, Request(n_blocks=view.n_blocks)).records
        worth = {peer_id: record for peer_id, record in serving.items() if peer_id in short}
        kept = [worth[peer_id] for peer_id in self._likely if peer_id in worth]
        new = sorted((record for peer_id, record in worth.items() if peer_id not in self._likely), key=self._score)
        self._likely = _spread(kept, new, view.n_blocks, most - most // STRANGERS)
        room = most - len(self._likely)
        others = serving.keys() - self._likely
        strangers = [peer_id for peer_id in self._strangers if peer_id in others][:room]
        new_ones = sorted(others.difference(strangers))
        self._strangers = strangers + self._rng.sample(new_ones, room - len(strangers))
        return [*self._likely, *self._strangers]

    def _score(self, record: PeerRecord) -> float:
        """Seconds a block, about, if this peer were the whole way there and back."""
        blocks = len(record.span)
        there_s = 2 * self._costs.link_s(CLIENT, record.peer_id)
        cost_s = self._costs.block_s(record, 1) + (self._costs.queue_s(record) + there_s) / blocks
        return cost_s * self._rng.uniform(1.0, 1.0 + JITTER)


def _spread(kept: Sequence[PeerRecord], new: Sequence[PeerRecord], n_blocks: int, most: int) -> dict[PeerId, None]:
    """Those kept, and of the others first those that serve a block of which the fewest are chosen."""
    chosen: dict[PeerId, None] = {}
    have = [0] * n_blocks

    def choose(record: PeerRecord) -> None:
        chosen[record.peer_id] = None
        for block in range(record.span.start, record.span.end):
            have[block] += 1

    for record in kept[:most]:
        choose(record)
    left, wanted = list(new), 0
    while left and len(chosen) < most:
        wanted += 1
        passed: list[PeerRecord] = []
        for record in left:
            if len(chosen) < most and min(have[record.span.start : record.span.end]) < wanted:
                choose(record)
            else:
                passed.append(record)
        left = passed
    return chosen
