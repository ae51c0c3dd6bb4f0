"""Which blocks a peer should serve: a newcomer fills the weakest place, and one that serves moves for a proven gain.

Owns both choices; `rates.py` says how strong a place is, `fastest.py` how long one token takes. Pure: a function of a
view and `now`. Does not know what fits in a machine (the caller says how many blocks), how a peer gets from one span to
another, or who else wants to. A peer takes as many blocks as fit: a longer span never lowers the throughput. That comes
first, and there links do not count: tokens of many sessions are under way at once, so a way costs time and no
throughput. Where it is nearly the same, one session's token decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low

from routing.cost import CostSettings
from routing.errors import BadInput
from routing.fastest import Fastest
from routing.rates import Rates
from routing.types import PeerId, PeerRecord, PeerState, Span
from routing.view import View

COUNTED = (PeerState.SERVING, PeerState.JOINING)
GAIN = 1.2  # measured speeds are some percent off, and loading costs
MOST_TIMES = 100.0  # as fast, or as slow, as the median peer: nobody is believed to be further off
LOOKED_AT = 8  # windows that are worked out in full: the weakest ones
DIGITS = 9  # of a level count; behind them is what sums of floats differ by
NEAR = 0.05  # of the throughput, and of what a peer adds to it if all goes well: what differs by less is as good
SLOWER = 1.01  # times as long for a token: what differs by less is as fast
PLACES = 64  # looked at, to know how far peers are from each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What a serving peer should do. `rescues`: some of the blocks have nobody, or only such as are about to go.
    `slows`: the fastest chain of the swarm takes longer for a token then."""

    span: Span
    rescues: bool
    tokens_per_s: float  # of the swarm, then
    before: float  # and now
    slows: bool = False


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
    lowest start. One with which the throughput is nearly as high is better if the fastest chain takes less time for a
    token then. `decode_s`: what the newcomer takes for one token through one block; 0, here as in a record: not known,
    and taken to be the median. SERVING and JOINING peers count, so that two newcomers one after the other do not fill
    the same gap; DRAINING and LEAVING ones do not, since their blocks are about to be missing. Raises BadInput.
    """
    if capacity_blocks < 1:
        raise BadInput(f"a peer serves at least one block, not {capacity_blocks}")
    if n_blocks != view.n_blocks:
        raise BadInput(f"the view is of a model of {view.n_blocks} blocks, not {n_blocks}")
    if capacity_blocks >= n_blocks:
        return Span(0, n_blocks)
    swarm = _Swarm(view, now, without)
    rate = swarm.rate(decode_s)
    return swarm.best(swarm.choices(capacity_blocks, rate), rate).span


def better_span(view: View, me: PeerId, capacity_blocks: int, now: float, *, gain: float = GAIN) -> Move | None:
    """Where the serving peer `me` should move, if it should. Never if a block would be left without a peer by it.

    To rescue blocks without peers; else where the swarm's throughput grows to `gain` times what it is, or (in a crowd,
    where one peer is a small part of it) where the weakest block is so weak that those it leaves have `gain` times as
    much even without it, and the fastest chain is as fast as before. Raises BadInput.
    """
    record = view.records.get(me)
    if record is None or record.state is not PeerState.SERVING or record.expires_at < now:
        return None
    swarm = _Swarm(view, now, frozenset((me,)))
    rate = swarm.rate(record.decode_s)
    levels = swarm.rates.and_also(record.span, rate).levels()
    order, bare, token_s = _order(levels), _bare(levels), swarm.token_s(record.span, rate)
    capacity = min(capacity_blocks, view.n_blocks)
    found = [choice for choice in swarm.choices(capacity, rate) if choice.span != record.span]
    found = [choice for choice in found if _bare(choice.levels) <= bare and _order(choice.levels) > order]
    if not found:
        return None
    best = swarm.best(found, rate)
    after, before = min(best.levels), min(levels)
    rescues = _bare(best.levels) < bare
    slows = best.token_s > SLOWER * token_s
    left = min(swarm.levels[record.span.start : record.span.end])
    in_crowd = not slows and left >= gain * min(levels[best.span.start : best.span.end])
    if rescues or after >= gain * before > 0 or in_crowd:
        return Move(span=best.span, rescues=rescues, tokens_per_s=after, before=before, slows=slows)
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
    token_s: float
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
        self._fastest = Fastest(view.n_blocks, spans, _way_s(records))

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
            yield _Choice(span, then, self.token_s(span, rate), (_order(then), _order(share), -start))

    def best(self, choices: Iterable[_Choice], rate: float) -> _Choice:
        """For one of `rate`: of those that are nearly as good as the first in order, the fastest; of some that are as
        fast, again the first."""
        choices = list(choices)
        first = max(choices, key=lambda choice: choice.order)
        most = min(first.levels)
        if most <= 0:
            return first  # there is no chain yet
        enough = most - NEAR * min(most, rate / self.n_blocks)
        good = [choice for choice in choices if min(choice.levels) >= enough]
        fast_s = SLOWER * min(choice.token_s for choice in good)
        return max((choice for choice in good if choice.token_s <= fast_s), key=lambda choice: choice.order)

    def token_s(self, span: Span, rate: float) -> float:
        """Of the fastest chain, with one of `rate` at `span`, in seconds; infinite: some block has nobody."""
        return self._fastest.with_one(span, 1 / rate)


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


def _way_s(records: Sequence[PeerRecord]) -> float:
    """From one peer to the next, by where some of them say they are."""
    places = [record.place for record in records if record.place is not None and record.place.known]
    some = places[:: 1 + len(places) // PLACES]
    ways_s = [a.rtt_s(b) / 2 for a, b in pairwise(some)]
    return median_low(ways_s) if ways_s else CostSettings().link_s


def _rounded(level: float) -> float:
    return float(f"{level:.{DIGITS}g}")
