"""When a serving peer moves to other blocks, and who goes first where several would.

Owns the patience of one peer, and the rule of leases. A lease is one peer's word that it will soon serve other blocks:
its *region* is what it leaves and what it goes to, and in a region one moves at a time. Pure: the view, the leases and
the time are arguments. How a lease is stored is in `swarm/discovery.py`, how a peer moves in `peer/rebalancing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from routing.placement import Move, better_span, keeps_covered, moved
from routing.types import PeerId, Span
from routing.view import View

PROVEN = 2  # looks that must say the same; blocks without a peer wait for none


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`peer_id` is to serve `span`. `since` and `expires_at` in DHT time, seconds."""

    peer_id: PeerId
    span: Span
    since: float
    expires_at: float


class Rebalancer:
    """One peer's patience. Mutable."""

    def __init__(self, me: PeerId):
        self._me = me
        self._seen: tuple[Span, int] | None = None  # what the last looks said, and how many of them

    def look(self, view: View, leases: Iterable[Lease], capacity_blocks: int, now: float) -> Move | None:
        """Where to move now, if anywhere. Others that are about to move count where they go."""
        others = [lease for lease in living(leases, now) if lease.peer_id != self._me]
        move = better_span(with_leases(view, others), self._me, capacity_blocks, now)
        if move is None:
            self._seen = None
            return None
        looks = self._seen[1] + 1 if self._seen is not None and self._seen[0] == move.span else 1
        self._seen = move.span, looks
        if not move.rescues and looks < PROVEN:
            return None
        mine = Lease(peer_id=self._me, span=move.span, since=now, expires_at=now)
        return None if any(overlap(view, mine, other) for other in others) else move


def living(leases: Iterable[Lease], now: float) -> list[Lease]:
    return [lease for lease in leases if lease.since <= now + 1.0 and lease.expires_at >= now]


def with_leases(view: View, leases: Iterable[Lease]) -> View:
    """As if all had moved."""
    return moved(view, {lease.peer_id: lease.span for lease in leases})


def overlap(view: View, one: Lease, other: Lease) -> bool:
    return any(a.start < b.end and b.start < a.end for a in _region(view, one) for b in _region(view, other))


def goes_first(view: View, mine: Lease, leases: Iterable[Lease], now: float) -> bool:
    """Whether no other living lease of the region came before: the oldest wins, then the lowest peer id."""
    return not any(
        overlap(view, mine, other) and (other.since, other.peer_id) < (mine.since, mine.peer_id)
        for other in living(leases, now)
        if other.peer_id != mine.peer_id
    )


def may_leave(view: View, mine: Lease, leases: Iterable[Lease], now: float) -> bool:
    """Asked once more before old blocks are given up: whether each of them still has somebody else."""
    others = [lease for lease in living(leases, now) if lease.peer_id != mine.peer_id]
    return keeps_covered(with_leases(view, others), mine.peer_id, mine.span, now)


def _region(view: View, lease: Lease) -> list[Span]:
    record = view.records.get(lease.peer_id)
    return [lease.span] if record is None else [lease.span, record.span]
