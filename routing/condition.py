"""How a peer fares, and why it is not simply serving: one word for people, and the reason.

Owns the words, which of several counts, and when a peer is slow or full. Does not know how the answers were got, nor
what time it is: `now` is the swarm's DHT time in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from routing.types import PeerId, PeerRecord, PeerState, Span

SLOW_TIMES = 3.0  # as long for a token and block as the median of the others that serve the same blocks
LEAST_FREE = 16  # positions: a cache gives room in pages, and with less than one a session cannot begin


class Condition(StrEnum):
    SERVING = "serving"
    SLOW = "slow"
    FULL = "full"
    JOINING = "joining"
    DRAINING = "draining"
    LEAVING = "leaving"
    NO_ANSWER = "no answer"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Judgement:
    """`reason` says more than the word; empty for a peer that simply serves."""

    condition: Condition
    reason: str = ""


_STATES = {
    PeerState.DRAINING: Judgement(Condition.DRAINING, "finishes the sessions that it has, takes no new ones"),
    PeerState.JOINING: Judgement(Condition.JOINING, "does not serve yet"),
}


def judge(records: Sequence[PeerRecord], silent: Mapping[PeerId, str], now: float) -> dict[PeerId, Judgement]:
    """Each peer's condition. `silent`: those that did not answer, and what became of the attempt.

    What makes a peer useless stands before what makes it worse: expired, leaving, joining, no answer, draining, full,
    slow.
    """
    busy = [record for record in records if _serves(record, silent, now)]
    return {record.peer_id: _judge(record, silent, now, busy) for record in records}


def _serves(record: PeerRecord, silent: Mapping[PeerId, str], now: float) -> bool:
    return record.state is PeerState.SERVING and record.peer_id not in silent and record.expires_at >= now


def _judge(
    record: PeerRecord, silent: Mapping[PeerId, str], now: float, busy: Sequence[PeerRecord]
) -> Judgement:
    if record.expires_at < now:
        return Judgement(Condition.EXPIRED, f"not renewed, ended {now - record.expires_at:.0f} s ago")
    if record.state is PeerState.LEAVING:
        return Judgement(Condition.LEAVING, "has said goodbye")
    if record.state is PeerState.JOINING:  # it listens nowhere yet
        return _STATES[record.state]
    if record.peer_id in silent:
        return Judgement(Condition.NO_ANSWER, silent[record.peer_id])
    if record.state in _STATES:
        return _STATES[record.state]
    if record.cache_total and record.cache_free < LEAST_FREE:
        return Judgement(Condition.FULL, f"{record.cache_free} of {record.cache_total:,} positions are free")
    others_s = [
        other.decode_s for other in busy
        if other.decode_s and other.peer_id != record.peer_id and _overlap(other.span, record.span)
    ]  # fmt: skip
    if others_s and record.decode_s > SLOW_TIMES * median(others_s):
        times = record.decode_s / median(others_s)
        return Judgement(Condition.SLOW, f"{times:.1f} times as long for a token as others with these blocks")
    return Judgement(Condition.SERVING)


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end
