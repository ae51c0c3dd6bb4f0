"""Newcomers that choose their blocks at the same moment: whose choice stands, and who chooses again.

Each announces what it chose (JOINING), and looks once more when all who chose with it can be read. Whoever was known
when one chose counts for that choice, and so does whoever serves; of the others, who came before. In each round one
more choice stands, since one of those that look comes first. Pure: records are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

from routing.types import PeerId, PeerRecord, PeerState, Span

Known = frozenset[tuple[PeerId, Span]]


def known(records: Iterable[PeerRecord]) -> Known:
    """What a newcomer remembers of the records that it chose by. A peer that has chosen anew since is news."""
    return frozenset((record.peer_id, record.span) for record in records)


def going_first(records: Iterable[PeerRecord], mine: PeerRecord, before: Known) -> list[PeerRecord]:
    """The others that count for what `mine` is to be: the oldest newcomer goes first, then the lowest peer id."""
    return [
        record
        for record in records
        if record.peer_id != mine.peer_id
        and (
            (record.peer_id, record.span) in before
            or record.state is not PeerState.JOINING
            or (record.sequence, record.peer_id) < (mine.sequence, mine.peer_id)
        )
    ]


def must_choose_again(records: Iterable[PeerRecord], mine: PeerRecord, before: Known) -> bool:
    """Whether somebody that goes first has taken some of the same blocks meanwhile."""
    return any(
        (record.peer_id, record.span) not in before
        and record.state in (PeerState.JOINING, PeerState.SERVING)
        and record.span.start < mine.span.end
        and mine.span.start < record.span.end
        for record in going_first(records, mine, before)
    )
