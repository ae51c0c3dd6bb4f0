"""Which blocks a peer should serve: a newcomer fills the weakest place, and one that serves moves for a proven gain.

Owns both choices; `throughput.py` says how strong a place is. Pure: a function of a view and `now`. Does not know what
fits in a machine (the caller says how many blocks), how a peer gets from one span to another, or who else wants to.
A peer takes as many blocks as fit: a longer span never lowers the throughput. Links do not count: tokens of many
sessions are under way at once, so a way costs time and no throughput.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from routing.errors import BadInput
from routing.rates import Rates
from routing.types import PeerId, PeerRecord, PeerState, Span
from routing.view import View

COUNTED = (PeerState.SERVING, PeerState.JOINING)
GAIN = 1.2  # measured speeds are some percent off, and loading costs
MOST_TIMES = 100.0  # as fast, or as slow, as the median peer: nobody is believed to be further off
LOOKED_AT = 8  # windows that are worked out in full: the weakest ones
DIGITS = 9  # of a level count; behind them is what sums of floats differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a serving peer should do. `rescues`: some of the blocks have nobody, or only such as are about to go."""

    span: Span
    rescues: bool
    tokens_per_s: float  # of the swarm, then
    before: float  # and now


def best_span(
    view: View,
    n_blocks: int,
    capacity_blocks: int,
    now: float,
    *,
    decode_s: float = 0.0,
    without: frozenset[PeerId] = frozenset(),
) -> Span:
    """The window of `capacity_blocks` consecutive blocks (all, if that many fit) that a newcomer should serve.

    The one with which the levels of all blocks, sorted, are highest from the lowest on: blocks without peers first,
    then the weakest. Of equal ones that where the peers' rates, divided evenly over their spans, are lowest; then the
    lowest start. `decode_s`: what the newcomer takes for one token through one block; 0, here as in a record: not
    known, and taken to be the median. SERVING and JOINING peers count, so that two newcomers one after the other do not
    fill the same gap; DRAINING and LEAVING ones do not, since their blocks are about to be missing. Raises BadInput.
    """
    if capacity_blocks < 1:
        raise BadInput(f"a peer serves at least one block, not {capacity_blocks}")
    if n_blocks != view.n_blocks:
        raise BadInput(f"the view is of a model of {view.n_blocks} blocks, not {n_blocks}")
    if capacity_blocks >= n_blocks:
        return Span(0, n_blocks)
    swarm = _Swarm(view, now, without)
    rate = swarm.rate(decode_s)
    return max(swarm.choices(capacity_blocks, rate), key=lambda choice: choice.order).span


def better_span(view: View, me: PeerId, capacity_blocks: int, now: float, *, gain: float = GAIN) -> Move | None:
    """Where the serving peer `me` should move, if it should. Never if a block would be left without a peer by it.

    To rescue blocks without peers; else where the swarm's throughput grows to `gain` times what it is, or (in a crowd,
    where one peer is a small part of it) where the weakest block is so weak that those it leaves have `gain` times as
    much even without it. Raises BadInput.
    """
    record = view.records.get(me)
    if record is None or record.state is not PeerState.SERVING or record.expires_at < now:
        return None
    swarm = _Swarm(view, now, frozenset((me,)))
    rate = swarm.rate(record.decode_s)
    levels = swarm.rates.and_also(record.span, rate).levels()
    order, bare = _order(levels), _bare(levels)
    capacity = min(capacity_blocks, view.n_blocks)
    found = [choice for choice in swarm.choices(capacity, rate) if choice.span != record.span]
    found = [choice for choice in found if _bare(choice.levels) <= bare and _order(choice.levels) > order]
    if not found:
        return None
    best = max(found, key=lambda choice: choice.order)
    after, before = min(best.levels), min(levels)
    rescues = _bare(best.levels) < bare
    left = min(swarm.levels[record.span.start : record.span.end])
    if rescues or after >= gain * before > 0 or left >= gain * min(levels[best.span.start : best.span.end]):
        return Move(span=best.span, rescues=rescues, tokens_per_s=after, before=before)
    return None


def throughput(view: View, now: float) -> float:
    """Tokens a second that the serving and the joining peers can give, all sessions together."""
    return min(_Swarm(view, now, frozenset()).levels)


def moved(view: View, targets: Mapping[PeerId, Span]) -> View:
    """The view once those that are about to move have done so."""
    records = dict(view.records)
    for peer_id, span in targets.items():
        if peer_id in records and span.end <= view.n_blocks:
            records[peer_id] = replace(records[peer_id], span=span, loads=None)
    return replace(view, records=records)


@dataclass(frozen=True, slots=True)
class _Choice:
    span: Span
    levels: list[float]
    order: tuple[list[float], list[float], int]


class _Swarm:
    """The spans that count, and how strong they make each block."""

    def __init__(self, view: View, now: float, without: frozenset[PeerId]):
        records = [
            record
            for record in view.records.values()
            if record.expires_at >= now and record.state in COUNTED
        ]
        self._median_s = _median_s(records)  # of all: what one is believed does not change as it moves
        spans = [(each.settled, self.rate(each.decode_s)) for each in records if each.peer_id not in without]
        self.n_blocks = view.n_blocks
        self.rates = Rates(view.n_blocks, spans)
        self.levels = self.rates.levels()
        self._even = _even(view.n_blocks, spans)

    def rate(self, decode_s: float) -> float:
        """Blocks of one token a second."""
        usual_s = self._median_s
        return 1 / min(max(decode_s, usual_s / MOST_TIMES), usual_s * MOST_TIMES) if decode_s > 0 else 1 / usual_s

    def choices(self, capacity: int, rate: float) -> Iterator[_Choice]:
        """The windows where one of `rate` may help most."""
        levels, even = [_rounded(level) for level in self.levels], self._even

        def weakness(start: int) -> tuple[list[float], list[float]]:
            return sorted(levels[start : start + capacity]), sorted(even[start : start + capacity])

        for start in sorted(range(self.n_blocks - capacity + 1), key=weakness)[:LOOKED_AT]:
            span = Span(start, start + capacity)
            then = self.rates.and_also(span, rate).levels()
            share = [each + rate / capacity * (block in span) for block, each in enumerate(even)]
            yield _Choice(span, then, (_order(then), _order(share), -start))


def _median_s(records: Iterable[PeerRecord]) -> float:
    stated = [record.decode_s for record in records if record.decode_s > 0]
    return median_low(stated) if stated else 1.0  # any will do: all count as the same


def _even(n_blocks: int, spans: Iterable[tuple[Span, float]]) -> list[float]:
    """The rate at each block if every peer gave each of its blocks as much."""
    changes = [0.0] * (n_blocks + 1)
    for span, rate in spans:
        changes[span.start] += rate / len(span)
        changes[span.end] -= rate / len(span)
    shares, running = [], 0.0
    for change in changes[:-1]:
        running += change
        shares.append(running)
    return shares


def _bare(levels: list[float]) -> frozenset[int]:
    return frozenset(block for block, level in enumerate(levels) if level <= 0)


def _order(levels: list[float]) -> list[float]:
    return sorted(map(_rounded, levels))


def _rounded(level: float) -> float:
    return float(f"{level:.{DIGITS}g}")
