"""When a serving peer moves to other blocks, and who goes first where several would.

Owns the patience of one peer, and the rule of leases. A lease is one peer's word that it will soon serve other blocks:
its *region* is what it leaves and what it goes to, and in a region one moves at a time. A newcomer leases all blocks
while it chooses, and newcomers choose one at a time: else those that come together would all see the same gap. Pure:
the view, the leases and the time are arguments. How a lease is stored is in `swarm/leases.py`, how a peer moves in
`peer/rebalancing.py`, how a newcomer waits for its turn in `peer/choosing.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from routing.placement import COUNTED, Move, better_span, moved
from routing.types import PeerId, PeerRecord, PeerState, Span
from routing.view import View

PROVEN = 2  # looks that must say the same; blocks without a peer wait for none
PATIENT = 5  # for a move that makes the fastest chain slower: another peer's may gain as much, and not


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

    def look(
        self, view: View, leases: Iterable[Lease], capacity_blocks: int, now: float, *, rescue: bool = False
    ) -> Move | None:
        """Where to move now, if anywhere. Others that are about to move count where they go. `rescue`: a look out of
        turn, for blocks without peers alone; it proves nothing else. Where a token would take longer then, more of them
        must be wanted."""
        others = [lease for lease in living(leases, now) if lease.peer_id != self._me]
        move = better_span(with_leases(view, others), self._me, capacity_blocks, now)
        if move is not None and move.slows and not move.rescues and not is_waited_for(view, move.span, now):
            move = None
        if rescue and (move is None or not move.rescues):
            return None
        if move is None:
            self._seen = None
            return None
        looks = self._seen[1] + 1 if self._seen is not None and self._seen[0] == move.span else 1
        self._seen = move.span, looks
        if not move.rescues and looks < (PATIENT if move.slows else PROVEN):
            return None
        mine = Lease(peer_id=self._me, span=move.span, since=now, expires_at=now)
        return None if any(overlap(view, mine, other) for other in others) else move


def is_waited_for(view: View, span: Span, now: float) -> bool:
    """Whether steps wait longer than a whole pass for a peer that serves some of these blocks: only then would more
    tokens a second be of use to anybody."""
    return any(
        record.queue_s > len(record.span) * record.decode_s > 0
        for record in view.alive(now, PeerState.SERVING)
        if record.span.start < span.end and span.start < record.span.end
    )


def living(leases: Iterable[Lease], now: float) -> list[Lease]:
    return [lease for lease in leases if lease.since <= now + 1.0 and lease.expires_at >= now]


def with_leases(view: View, leases: Iterable[Lease]) -> View:
    """As if all had moved; newcomers that have chosen are JOINING, those that still choose are not there yet."""
    chosen = [lease for lease in leases if not chooses(lease, view.n_blocks)]
    new = {
        lease.peer_id: PeerRecord(
            peer_id=lease.peer_id, span=lease.span, state=PeerState.JOINING, expires_at=lease.expires_at
        )
        for lease in chosen
        if lease.span.end <= view.n_blocks and _is_new(view, lease)
    }
    moving = {lease.peer_id: lease.span for lease in chosen if lease.peer_id not in new}
    after = moved(view, moving)
    return replace(after, records={**after.records, **new})


def chooses(lease: Lease, n_blocks: int) -> bool:
    """Whether its holder is a newcomer that does not know yet which blocks it will serve."""
    return len(lease.span) >= n_blocks


def may_choose(mine: Lease, leases: Iterable[Lease], n_blocks: int, now: float) -> bool:
    """Whether a newcomer is next: no other one that still chooses came before. The oldest goes first, then the lowest
    peer id."""
    return not any(
        chooses(other, n_blocks) and (other.since, other.peer_id) < (mine.since, mine.peer_id)
        for other in living(leases, now)
    )


def overlap(view: View, one: Lease, other: Lease) -> bool:
    return any(a.start < b.end and b.start < a.end for a in _region(view, one) for b in _region(view, other))


def goes_first(view: View, mine: Lease, leases: Iterable[Lease], now: float) -> bool:
    """Whether no other living lease of the region came before: the oldest wins, then the lowest peer id."""
    return not any(
        overlap(view, mine, other) and (other.since, other.peer_id) < (mine.since, mine.peer_id)
        for other in living(leases, now)
        if other.peer_id != mine.peer_id
    )


def may_leave(view: View, mine: Lease, leases: Iterable[Lease], now: float, *, drains: bool = False) -> bool:
    """Asked once more before old blocks are given up: whether others serve each of them now, without such as are about
    to move. Those that it will still serve need nobody, unless it `drains` first and serves nothing for a while."""
    record = view.records.get(mine.peer_id)
    if record is None:
        return False
    moving = frozenset(lease.peer_id for lease in living(leases, now))
    others = view.count(now, PeerState.SERVING, without=moving | {mine.peer_id})
    old = range(record.span.start, record.span.end)
    return all(others[block] or (block in mine.span and not drains) for block in old)


def rescue_comes(view: View, me: PeerId, leases: Iterable[Lease], now: float) -> bool:
    """Asked by a peer that leaves and has sessions that nobody can take: whether somebody is about to serve blocks that
    it alone serves. A newcomer that still chooses may take them."""
    record = view.records.get(me)
    if record is None:
        return False
    others = view.count(now, PeerState.SERVING, without=frozenset((me,)))
    coming = [lease.span for lease in living(leases, now) if lease.peer_id != me]
    coming += [other.settled for state in COUNTED for other in view.alive(now, state) if other.peer_id != me]
    alone = [block for block in range(record.span.start, record.span.end) if not others[block]]
    return any(block in span for span in coming for block in alone)


def _is_new(view: View, lease: Lease) -> bool:
    """Whether its holder serves nothing: what it may have said goodbye to before is of an earlier life."""
    record = view.records.get(lease.peer_id)
    return record is None or (record.state is PeerState.LEAVING and record.sequence < 1000 * lease.since)


def _region(view: View, lease: Lease) -> list[Span]:
    record = view.records.get(lease.peer_id)
    return [lease.span] if record is None else [lease.span, record.span]
