"""What is known of the swarm at a moment: the newest record of each peer, folded from events.

Owns the rule which record is believed. Does not know where records come from (the directory verified them),
how fast peers are, or what time it is: `now` is always the swarm's DHT time in seconds, given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from routing.errors import BadInput
from routing.types import PeerId, PeerRecord, PeerState

TOMBSTONE_S = 600.0
"""How long a removed peer's sequence number is remembered. A record lives five minutes at most, so an old
copy of it that still floats around has expired well before its tombstone goes."""


@dataclass(frozen=True, slots=True)
class RecordsSeen:
    """Verified records were read from the directory, or told by the peers themselves."""

    records: Sequence[PeerRecord]


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer is known to have died at `at`. It comes back only with a newer record.

    For a peer that merely failed once, tell `Health` instead: that is soft and heals by itself.
    """

    peer_id: PeerId
    at: float


@dataclass(frozen=True, slots=True)
class Expired:
    """Time has passed: records that ended before `now` go, and old tombstones with them."""

    now: float


Event = RecordsSeen | PeerGone | Expired


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Records of this peer up to `sequence` are not believed; forgotten after `until`."""

    sequence: int
    until: float


@dataclass(frozen=True)
class View:
    """The newest record of each peer of a swarm of `n_blocks` blocks. Immutable; `apply` makes the next one.

    A record that says LEAVING stays until it expires, as proof that older ones are outdated. Raises BadInput.
    """

    records: Mapping[PeerId, PeerRecord]
    n_blocks: int
    tombstones: Mapping[PeerId, Tombstone] = field(default_factory=dict)
    before: Mapping[PeerId, PeerRecord] | None = field(default=None, compare=False, repr=False)
    changed: frozenset[PeerId] = field(default=frozenset(), compare=False, repr=False)  # since the records `before`

    def __post_init__(self) -> None:
        if self.n_blocks < 1:
            raise BadInput(f"a model has at least one block, not {self.n_blocks}")

    def alive(self, now: float, *states: PeerState) -> Iterator[PeerRecord]:
        """Records in one of `states` (any state if none is named) that have not expired, by peer id."""
        for peer_id in sorted(self.records):
            record = self.records[peer_id]
            if record.expires_at >= now and (not states or record.state in states):
                yield record

    def coverage(self, now: float) -> list[int]:
        """How many peers serve each block: SERVING ones only, `n_blocks` counts."""
        return self.count(now, PeerState.SERVING)

    def draining(self, now: float) -> list[int]:
        """How many DRAINING peers still hold each block: they finish what they have and take nothing new."""
        return self.count(now, PeerState.DRAINING)

    def uncovered(self, now: float) -> tuple[int, ...]:
        """The blocks that no SERVING peer serves."""
        return tuple(block for block, count in enumerate(self.coverage(now)) if count == 0)

    def count(self, now: float, *states: PeerState, without: frozenset[PeerId] = frozenset()) -> list[int]:
        """How many living peers in one of `states`, leaving out `without`, hold each block: `n_blocks`
        counts."""
        changes = [0] * (self.n_blocks + 1)
        for record in self.alive(now, *states):
            if record.peer_id not in without:
                changes[min(record.span.start, self.n_blocks)] += 1
                changes[min(record.span.end, self.n_blocks)] -= 1
        counts, running = [], 0
        for change in changes[:-1]:
            running += change
            counts.append(running)
        return counts


def apply(view: View, event: Event) -> View:
    """The view after one event. Pure; returns `view` itself if the event changes nothing."""
    match event:
        case RecordsSeen(records):
            return _records_seen(view, records)
        case PeerGone(peer_id, at):
            if peer_id not in view.records:
                return view
            return _remove(view, [peer_id], until=at + TOMBSTONE_S)
        case Expired(now):
            stale = [peer_id for peer_id, record in view.records.items() if record.expires_at < now]
            if any(stone.until < now for stone in view.tombstones.values()):
                stones = {peer: stone for peer, stone in view.tombstones.items() if stone.until >= now}
                view = replace(view, tombstones=stones)
            return _remove(view, stale, until=now + TOMBSTONE_S) if stale else view


def forgotten(before: View, after: View) -> frozenset[PeerId]:
    """Peers that have been gone for so long that nothing is remembered of them any more, not even a tombstone."""
    return frozenset(before.tombstones.keys() - after.tombstones.keys() - after.records.keys())


def _records_seen(view: View, seen: Sequence[PeerRecord]) -> View:
    records, news = view.records, dict[PeerId, PeerRecord]()
    for record in seen:
        known = news.get(record.peer_id) or records.get(record.peer_id)
        if record is known:  # most are, each time the directory is read
            continue
        if _is_news(view, record, known):
            news[record.peer_id] = record
    if not news:
        return view
    stones = {peer: each for peer, each in view.tombstones.items() if peer not in news}
    return replace(
        view, records={**records, **news}, tombstones=stones, before=records, changed=frozenset(news)
    )


def _is_news(view: View, record: PeerRecord, known: PeerRecord | None) -> bool:
    # A span outside the model is a record of something else; it must not hide a sensible one.
    if record.span.end > view.n_blocks:
        return False
    if known is not None and (record.sequence, record.expires_at) < (known.sequence, known.expires_at):
        return False
    stone = view.tombstones.get(record.peer_id)
    if stone is not None and record.sequence <= stone.sequence:
        return False
    return record != known


def _remove(view: View, peers: list[PeerId], until: float) -> View:
    records = dict(view.records)
    stones = dict(view.tombstones)
    for peer_id in peers:
        stones[peer_id] = Tombstone(records.pop(peer_id).sequence, until)
    return replace(view, records=records, tombstones=stones, before=view.records, changed=frozenset(peers))
