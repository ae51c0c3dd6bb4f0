"""Which few peers a peer measures its way to before any session comes: probable neighbours in a chain, and some others.

Owns that choice alone. Chance is an argument: peers that join together must not all ask the same few.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from routing.types import PeerId, PeerRecord, PeerState, Span
from routing.view import View

MOST = 4  # a place in the network has as many numbers: three axes and a height

T = TypeVar("T")


class Choice(Protocol):
    """What is needed of a `random.Random`."""

    def sample(self, population: Sequence[T], k: int) -> list[T]: ...


def neighbours(
    view: View, me: PeerId, span: Span, now: float, rng: Choice, most: int = MOST
) -> list[PeerRecord]:
    """At most so many of those that serve: one that serves the block before `span`, one that serves the block after it,
    then any, first such as know where they are: of others one learns less."""
    serving = [record for record in view.alive(now, PeerState.SERVING) if record.peer_id != me]
    before = [record for record in serving if span.start - 1 in record.span]
    after = [record for record in serving if span.end in record.span]
    placed = [record for record in serving if record.place is not None]
    chosen: dict[PeerId, PeerRecord] = {}
    for group, count in ((before, 1), (after, 1), (placed, most), (serving, most)):
        new = [record for record in group if record.peer_id not in chosen]
        picked = rng.sample(new, min(count, len(new), most - len(chosen)))
        chosen.update((record.peer_id, record) for record in picked)
    return list(chosen.values())
