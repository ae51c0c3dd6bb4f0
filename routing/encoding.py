"""Which of several ways to write hidden states pays on a link: its bytes against the time and the loss it costs.

A pure function of what was measured. Does not know what the encodings are, or how anything was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from routing.types import PeerId

LOSS_S = 100e-6
"""What a loss of any size must save, a position: text that is another computer's last digits costs that much."""

ERROR_S = 0.5
"""Seconds a position that a mean KL of 1 nat is worth; 8 bits' 2.4e-4 count as 120 us, 0.12 s for a prompt of 1,000."""

HYSTERESIS = 0.2
"""Another encoding than the present one must save this share: two sessions with other codecs share nothing well."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """`number` is the codec's. `row_s`: writing and reading one row. `error`: mean KL of the next token against what it
    is without, in nats; 0 for one that loses nothing. `name`: for people."""

    number: int
    row_bytes: int
    row_s: float = 0.0
    error: float = 0.0
    name: str = ""

    def price_s(self, bytes_per_s: float) -> float:
        """Of one position."""
        loss_s = LOSS_S + ERROR_S * self.error if self.error else 0.0
        return self.row_bytes / bytes_per_s + self.row_s + loss_s


def cheapest(encodings: Sequence[Encoding], bytes_per_s: float, present: int | None = None) -> Encoding:
    """Of several, the first of which loses nothing. `bytes_per_s`: what the way takes; 0: not known, and then nothing
    is lost. `present`: the number of the one in use, which is left only for one that is clearly cheaper."""
    if bytes_per_s <= 0:
        return encodings[0]
    best = min(encodings, key=lambda encoding: encoding.price_s(bytes_per_s))
    held = next((encoding for encoding in encodings if encoding.number == present), best)
    if best.price_s(bytes_per_s) < (1 - HYSTERESIS) * held.price_s(bytes_per_s):
        return best
    return held


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What a session's rows may be written in. `encodings`: the first is taken where nothing is known of a way.
    `present`: by its two ends, the number of the one that a way was given last. `settled`: by block, that of what comes
    into it, for as long as the session lives. `row_s`: by peer or client, what writing and reading one row takes there,
    in those that take any, where it is known. `results`: the name of the one in which rows come back."""

    encodings: Sequence[Encoding]
    results: str = ""
    present: Mapping[tuple[PeerId, PeerId], int] = field(default_factory=dict)
    settled: Mapping[int, int] = field(default_factory=dict)
    row_s: Mapping[PeerId, float] = field(default_factory=dict)

    def choose(self, a: PeerId, b: PeerId, bytes_per_s: float, block: int | None = None) -> Encoding:
        """For what goes from `a` to `b`, and there into `block`, if that is known. `bytes_per_s` as in `cheapest`."""
        encodings = self.encodings
        if a in self.row_s or b in self.row_s:
            encodings = [self._between(a, b, encoding) for encoding in encodings]
        if block is not None and (number := self.settled.get(block)) is not None:
            for encoding in encodings:
                if encoding.number == number:
                    return encoding
        return cheapest(encodings, bytes_per_s, self.present.get((a, b)))

    def _between(self, a: PeerId, b: PeerId, encoding: Encoding) -> Encoding:
        """With half of what each end takes for both: one writes, the other reads."""
        usual_s = encoding.row_s
        if not usual_s:
            return encoding
        return replace(encoding, row_s=(self.row_s.get(a, usual_s) + self.row_s.get(b, usual_s)) / 2)


def both_ways(wire_in: str, wire_out: str) -> str:
    """Of a hop, for people: `fp32`, or `fp32>int8` where it sends otherwise than it is sent. Empty: not known."""
    return wire_in if wire_in == wire_out else f"{wire_in}>{wire_out}"
