"""What links and peers cost, in seconds: measured first, then claimed or estimated, then a default.

Owns the running means of all measurements. Does not know routes, requests or the clock: durations are
arguments, and `advance(now)` moves the holder's own idea of now. A measurement fades with age towards what
would be believed without it; otherwise a peer that was slow once, and is avoided since, would stay slow in
our books for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

from routing.coordinates import Coordinate
from routing.errors import BadInput
from routing.types import PeerId, PeerRecord

CLIENT: PeerId = "client"
"""Stands for the client at both ends of a chain. Not a possible peer id: base58 has no `l`."""

LONGEST_S = 3600.0
"""No single term is believed to be longer: one absurd claim must not drown the other terms of a sum."""


LEAST_CONFIDENCE = 0.25
"""What counts as measured, where a guess is no help."""


@dataclass(frozen=True, kw_only=True)
class CostSettings:
    """Defaults where nothing is known (seconds, bytes a second), and how fast measurements move and fade."""

    link_s: float = 0.05  # one way
    decode_s: float = 0.005  # one token, one block
    prefill_s: float = 0.0002  # one token of a chunk, one block
    bandwidth: float = 12.5e6  # bytes a second, 100 Mbit/s
    near_s: float = 0.001  # two ends no further apart, one way, are on one machine or one local network
    near_bandwidth: float = 125e6  # there: bytes a second, 1 Gbit/s
    hop_s: float = 0.0  # of any hop, however few blocks it runs: taking the step, packing, handing it on
    weight: float = 0.25  # of a new measurement in the running mean
    link_half_life_s: float = 300.0
    compute_half_life_s: float = 120.0
    queue_half_life_s: float = 10.0
    honesty_half_life_s: float = 3600.0  # of what measurements told about a peer's claims
    honesty_weight: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise BadInput(f"weight must be in (0, 1], not {self.weight}")
        for name in ("bandwidth", "near_bandwidth", "link_half_life_s", "compute_half_life_s", "queue_half_life_s"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.hop_s <= LONGEST_S / 2:
            raise BadInput(f"hop_s must not be negative or absurdly long, not {self.hop_s}")


class Mean:
    """Exponentially weighted running mean whose confidence halves every `half_life_s`."""

    __slots__ = ("at", "half_life_s", "value", "weight")

    def __init__(self, weight: float, half_life_s: float):
        self.weight = weight
        self.half_life_s = half_life_s
        self.value = 0.0
        self.at = -math.inf  # never measured: no confidence at all

    def add(self, value: float, now: float) -> None:
        kept = (1 - self.weight) * self.confidence(now)
        self.value = kept * self.value + (1 - kept) * value
        self.at = now

    def confidence(self, now: float) -> float:
        return 1.0 if now <= self.at else 0.5 ** ((now - self.at) / self.half_life_s)

    def blend(self, prior: float, now: float) -> float:
        """The mean while fresh, `prior` when long ago, in between in between."""
        if now <= self.at:
            return self.value
        confidence = self.confidence(now)
        return confidence * self.value + (1 - confidence) * prior


class Costs:
    """Running means of what was measured. All times in seconds. Mutable; does no I/O and reads no clock.

    A measurement or a claim that is not a number, or is negative, counts as not given: both may come from
    peers.
    """

    def __init__(self, settings: CostSettings | None = None):
        self.settings = settings or CostSettings()
        self.now = 0.0
        self._rtt: dict[PeerId, dict[PeerId, Mean]] = {}  # both directions share one Mean
        self._bandwidth: dict[tuple[PeerId, PeerId], Mean] = {}
        self._decode: dict[PeerId, Mean] = {}
        self._prefill: dict[PeerId, Mean] = {}
        self._queue: dict[PeerId, Mean] = {}
        self._honesty: dict[PeerId, Mean] = {}  # measured over claimed, decode
        self._usual_honesty: float | None = 1.0  # None: to be worked out
        self._places: dict[PeerId, Coordinate] = {}
        self._changed: set[PeerId] = set()  # measured since somebody asked

    def advance(self, now: float) -> None:
        """It is `now` (any clock that only goes forward, the same one always). Older measurements fade."""
        self.now = max(self.now, now)

    def observe_rtt(self, a: PeerId, b: PeerId, rtt_s: float) -> None:
        """A round trip between two ends (peers, or `CLIENT`) was measured."""
        if a != b and _sane(rtt_s) is not None:
            mean = self._rtt.get(a, {}).get(b) or self._mean(self.settings.link_half_life_s)
            self._rtt.setdefault(a, {})[b] = self._rtt.setdefault(b, {})[a] = mean
            mean.add(min(rtt_s, LONGEST_S), self.now)
            self._changed |= {a, b}

    def place(self, end: PeerId, coordinate: Coordinate) -> None:
        """Where an end (a peer, or `CLIENT`) says it is, or we are: for round trips that nobody measured."""
        if self._places.get(end) != coordinate:
            self._places[end] = coordinate
            self._changed.add(end)

    def take_changed(self) -> set[PeerId]:
        """Peers of which something was measured since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def observe_bandwidth(self, a: PeerId, b: PeerId, bytes_per_s: float) -> None:
        """Bytes a second from `a` to `b` (not the other way: uplinks are the narrow side)."""
        if math.isfinite(bytes_per_s) and bytes_per_s > 0:
            mean = self._bandwidth.setdefault((a, b), self._mean(self.settings.link_half_life_s))
            mean.add(bytes_per_s, self.now)

    def observe_decode(self, peer: PeerId, per_block_s: float, claimed_s: float = 0.0) -> None:
        """One token took `per_block_s` through each block. `claimed_s`: what its record says of that. Who claims too
        much is believed the less for an hour, whatever it claims next; and if most do, so is everybody else."""
        self._observe(self._decode, peer, per_block_s, self.settings.compute_half_life_s)
        if claimed_s > 0 and (ratio := _sane(per_block_s / claimed_s)) is not None:
            mean = self._honesty.get(peer)
            if mean is None:
                mean = self._honesty[peer] = Mean(self.settings.honesty_weight, self.settings.honesty_half_life_s)
            mean.add(ratio, self.now)
            self._usual_honesty = None

    def observe_prefill(self, peer: PeerId, per_token_block_s: float) -> None:
        """Each token of a chunk took `per_token_block_s` through each block."""
        self._observe(self._prefill, peer, per_token_block_s, self.settings.compute_half_life_s)

    def observe_queue(self, peer: PeerId, s: float) -> None:
        """A step waited `s` before its pass began."""
        self._observe(self._queue, peer, s, self.settings.queue_half_life_s)

    def forget(self, peer: PeerId) -> None:
        """Drop all that was measured of a peer that is gone for good."""
        for other in self._rtt.pop(peer, {}):
            self._rtt[other].pop(peer, None)
        for pair in [pair for pair in self._bandwidth if peer in pair]:
            del self._bandwidth[pair]
        for known in (self._decode, self._prefill, self._queue, self._honesty, self._places):
            known.pop(peer, None)
        self._usual_honesty = None

    def link_s(self, a: PeerId, b: PeerId) -> float:
        """One way between two ends: half of the measured round trip, else an estimate, else the default.

        The estimate is by their coordinates, or, for two peers that the client has measured, the middle of what the
        triangle inequality allows, [|x - y|, x + y] for one-way times x and y to the client: the greater of the two.
        """
        if a == b:
            return 0.0
        mean = self._rtt.get(a, {}).get(b)
        if mean is not None and self.now <= mean.at:
            return mean.value / 2
        prior = self.settings.link_s
        here, there = self._places.get(a), self._places.get(b)
        if here is not None and there is not None and here.known and there.known:
            prior = here.rtt_s(there) / 2
        elif a != CLIENT and b != CLIENT:
            to_client = self._rtt.get(CLIENT, {})
            if a in to_client and b in to_client:
                prior = max(self.link_s(CLIENT, a), self.link_s(CLIENT, b))
        return prior if mean is None else mean.blend(2 * prior, self.now) / 2

    def between(self, ends: Sequence[PeerId], nbytes: int) -> Callable[[int, int], float]:
        """For many pairs at one moment: `link_s` and `transfer_s` of `nbytes` in one, from an end to another one, both
        told by their number in `ends`. What coordinates say takes no look at the books; most pairs of many peers never
        measured each other."""
        places = [place if (place := self._places.get(end)) is not None and place.known else None for end in ends]
        met, rates, near_s = [self._rtt.get(end, {}) for end in ends], self._bandwidth, self.settings.near_s
        slow, quick = self.settings.bandwidth, self.settings.near_bandwidth
        far_transfer_s, near_transfer_s = (min(max(0, nbytes) / rate, LONGEST_S) for rate in (slow, quick))

        def price(a: int, b: int) -> float:
            here, there = places[a], places[b]
            if here is None or there is None or ends[b] in met[a] or (rates and (ends[a], ends[b]) in rates):
                link_s = self.link_s(ends[a], ends[b])
                return link_s + self.transfer_s(ends[a], ends[b], nbytes, link_s)
            link_s = here.rtt_s(there) / 2
            return link_s + (near_transfer_s if link_s <= near_s else far_transfer_s)

        return price

    def measured(self, a: PeerId, b: PeerId) -> bool:
        """Whether the round trip between two ends was ever measured, or is none."""
        return a == b or b in self._rtt.get(a, {})

    def least_link_s(self, b: PeerId) -> float:
        """A lower bound of `link_s(a, b)` over every other peer `a`: lets a search stop looking early."""
        measured = self._rtt.get(b, {})
        default = self.settings.link_s
        prior = min(default, self.link_s(CLIENT, b)) if CLIENT in measured else default
        if (place := self._places.get(b)) is not None and place.known:
            prior = min(prior, place.height / 2)
        if not measured:
            return prior
        means = [mean for end, mean in measured.items() if end != CLIENT]
        shortest = min((mean.value for mean in means), default=math.inf) / 2
        if shortest >= prior:
            return prior
        # A short measured link grows towards the estimate as it fades: none has faded less than the newest.
        newest = max(means, key=lambda mean: mean.at)
        return newest.confidence(self.now) * shortest + (1 - newest.confidence(self.now)) * prior

    def transfer_s(self, a: PeerId, b: PeerId, nbytes: int, link_s: float | None = None) -> float:
        """How much longer than an empty frame `nbytes` take from `a` to `b`. `link_s`: that of the two, if at hand."""
        if nbytes <= 0 or a == b:
            return 0.0
        mean = self._bandwidth.get((a, b))
        near = (self.link_s(a, b) if link_s is None else link_s) <= self.settings.near_s
        prior = self.settings.near_bandwidth if near else self.settings.bandwidth
        rate = prior if mean is None else mean.blend(prior, self.now)
        return min(nbytes / rate, LONGEST_S)

    def bandwidth(self, a: PeerId, b: PeerId) -> float:
        """Bytes a second from `a` to `b` as they were measured; 0 where nobody did, or two half-lives ago."""
        mean = self._bandwidth.get((a, b))
        return mean.value if mean is not None and mean.confidence(self.now) > LEAST_CONFIDENCE else 0.0

    def queue_s(self, record: PeerRecord) -> float:
        """How long a step is held up at a peer: its wait, measured or else claimed, and what any hop takes."""
        claimed = _sane(record.queue_s) or 0.0
        return self.settings.hop_s + self._known(self._queue, record.peer_id, claimed)

    def block_s(self, record: PeerRecord, tokens: int) -> float:
        """Time of `tokens` tokens through one block of a peer: measured, else claimed, else the default.

        One token is a decode step; more are a prefill chunk, of which each token costs the same.
        """
        peer = record.peer_id
        if tokens == 1:
            claimed = _sane(record.decode_s)
            prior = claimed * self._known(self._honesty, peer, self._usual()) if claimed else self.settings.decode_s
            return min(self._known(self._decode, peer, prior), LONGEST_S)
        claimed = _sane(record.prefill_s) or self.settings.prefill_s
        return min(tokens * self._known(self._prefill, peer, claimed), LONGEST_S)

    def _usual(self) -> float:
        """How many times as long as claimed it takes: the median, in which one vote says that claims are true."""
        if self._usual_honesty is None:
            self._usual_honesty = median_low([1.0, *(mean.value for mean in self._honesty.values())])
        return self._usual_honesty

    def _mean(self, half_life_s: float) -> Mean:
        return Mean(self.settings.weight, half_life_s)

    def _observe(self, means: dict[PeerId, Mean], peer: PeerId, value: float, half_life_s: float) -> None:
        sane = _sane(value)
        if sane is not None:
            means.setdefault(peer, self._mean(half_life_s)).add(sane, self.now)
            self._changed.add(peer)

    def _known(self, means: dict[PeerId, Mean], peer: PeerId, prior: float) -> float:
        mean = means.get(peer)
        return prior if mean is None else mean.blend(prior, self.now)


def _sane(seconds: float) -> float | None:
    """`seconds` if it is a duration, cut at `LONGEST_S`; else None."""
    return min(seconds, LONGEST_S) if 0 <= seconds < math.inf else None
