"""Network coordinates: round trips between ends that never measured each other, from a few that each measured.

Vivaldi with height (Dabek, Cox, Kaashoek and Morris, "Vivaldi: a decentralized network coordinate system", SIGCOMM
2004, sections 4 and 5.4): each end moves towards where its own measurements put it, the less it is moved the surer it
is and the less sure the other. The height is the way through the access link, which no place in the plane explains.
Pure: round trips and other ends' coordinates come in, nothing goes out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from routing.errors import BadInput

DIMENSIONS = 3
LEAST_HEIGHT_S = 1e-5
LONGEST_S = 10.0  # of a coordinate's place or height: what others claim is not believed beyond
REPEATED = 8
_SURE = 0.05  # how fast the error follows in the end (c_e); at first it is the mean of all measurements, about
_WARM_UP = 4
_STEP = 0.25  # how far one measurement moves at most (c_c)
_KNOWN = 0.5  # an error below: the coordinate says something


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Where an end is, in seconds of round trip, and the relative error that it expects of its predictions."""

    place: tuple[float, ...] = (0.0,) * DIMENSIONS
    height: float = LEAST_HEIGHT_S
    error: float = 1.0

    def __post_init__(self) -> None:
        if len(self.place) != DIMENSIONS or not all(abs(axis) <= LONGEST_S for axis in self.place):
            raise BadInput(f"a coordinate has {DIMENSIONS} axes within {LONGEST_S:g} s")
        if not (0 <= self.height <= LONGEST_S and 0 <= self.error < math.inf):
            raise BadInput("a coordinate's height and error are finite and not negative")

    @classmethod
    def parse(cls, numbers: Sequence[float]) -> Coordinate | None:
        """Of `numbers`; None for what is no coordinate: others' claims are not believed blindly."""
        try:
            *place, height, error = numbers
            return cls(place=tuple(place), height=height, error=error)
        except (BadInput, ValueError, TypeError):
            return None

    @property
    def numbers(self) -> tuple[float, ...]:
        """As it is told to others: the place's axes, the height, the error."""
        return (*self.place, self.height, self.error)

    @property
    def known(self) -> bool:
        """Whether it has settled enough to be used."""
        return self.error < _KNOWN

    def rtt_s(self, other: Coordinate) -> float:
        """The predicted round trip."""
        return math.dist(self.place, other.place) + self.height + other.height


class Vivaldi:
    """One end's own coordinate, moved by each of its measurements."""

    def __init__(self, coordinate: Coordinate | None = None):
        self.coordinate = coordinate or Coordinate()
        self._measured = 0
        self._last: deque[tuple[Coordinate, float]] = deque(maxlen=REPEATED)

    def observe(self, other: Coordinate, rtt_s: float, direction: tuple[float, ...]) -> None:
        """A round trip to an end that says it is at `other`. `direction`: any vector, random for example; two ends at
        the same place are moved apart along it. The last few measurements are taken into account once more: they cost
        nothing, and a peer that measures every few seconds knows sooner where it is."""
        if not 0 < rtt_s <= LONGEST_S:
            return
        self._measured += 1
        for place, seconds in self._last:
            self._move(place, seconds, direction)
        self._move(other, rtt_s, direction)
        self._last.append((other, rtt_s))

    def _move(self, other: Coordinate, rtt_s: float, direction: tuple[float, ...]) -> None:
        own = self.coordinate
        predicted = own.rtt_s(other)
        weight = own.error / max(own.error + other.error, 1e-9)
        error = abs(predicted - rtt_s) / rtt_s
        pull = _STEP * weight * (rtt_s - predicted)
        sure = weight * max(_SURE, 1 / (1 + self._measured / _WARM_UP))
        away = [mine - its for mine, its in zip(own.place, other.place, strict=True)]
        if not any(away):
            away = list(direction)
        length = math.hypot(*away) or 1.0
        # In the space with height the two heights add up to one more component of the way between.
        flat, up = math.dist(own.place, other.place), own.height + other.height
        share = 1.0 if flat + up == 0 else flat / (flat + up)
        share = max(share, 0.8) if not own.known else share  # first the plane, then what is left over
        moved = [mine + pull * share * axis / length for mine, axis in zip(own.place, away, strict=True)]
        self.coordinate = Coordinate(
            place=tuple(max(-LONGEST_S, min(LONGEST_S, axis)) for axis in moved),
            height=min(LONGEST_S, max(LEAST_HEIGHT_S, own.height + pull * (1 - share))),
            error=min(1.0, error * sure + own.error * (1 - sure)),
        )
