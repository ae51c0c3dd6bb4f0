"""Owns the arithmetic of the benchmark and the shape of its results. Starts nothing, reads no clock.

Machines are shared and noisy, so the yardstick and the subject take turns: a ratio is taken within each round, and
the figure is the median of the ratios, not the ratio of two medians from different minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One result. `runs` are the single values, in the order in which they were measured."""

    figure: str
    value: float
    unit: str
    runs: tuple[float, ...]
    note: str = ""  # what was done; for the table only

    @classmethod
    def of_median(cls, figure: str, unit: str, runs: Sequence[float], note: str = "") -> Figure:
        return cls(figure=figure, value=median(runs), unit=unit, runs=tuple(runs), note=note)

    @classmethod
    def of_sum(cls, figure: str, unit: str, runs: Sequence[float], note: str = "") -> Figure:
        return cls(figure=figure, value=sum(runs), unit=unit, runs=tuple(runs), note=note)

    def facts(self) -> dict[str, Any]:
        """As it goes to bench.json."""
        return {
            "figure": self.figure,
            "value": _rounded(self.value),
            "unit": self.unit,
            "runs": [_rounded(value) for value in self.runs],
        }


def as_json(figures: Sequence[Figure]) -> str:
    return json.dumps([figure.facts() for figure in figures], indent=1) + "\n"


@dataclass(frozen=True, kw_only=True)
class Rounds(Generic[T]):
    """What yardstick and subject gave, round by round."""

    yardstick: tuple[T, ...]
    subject: tuple[T, ...]

    def ratios(self, of: Callable[[T], float]) -> list[float]:
        """Subject over yardstick, within each round."""
        pairs = zip(self.yardstick, self.subject, strict=True)
        return [of(subject) / of(yardstick) for yardstick, subject in pairs]


def take_turns(count: int, yardstick: Callable[[int], T], subject: Callable[[int], T]) -> Rounds[T]:
    """Both once a round; who goes first changes from round to round, so that a drift favours neither."""
    ours: list[T] = []
    theirs: list[T] = []
    for index in range(count):
        if index % 2 == 0:
            theirs.append(yardstick(index))
            ours.append(subject(index))
        else:
            ours.append(subject(index))
            theirs.append(yardstick(index))
    return Rounds(yardstick=tuple(theirs), subject=tuple(ours))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One generation. Times in seconds on one monotonic clock, which all processes of a machine share."""

    began: float
    ids: tuple[int, ...]
    times: tuple[float, ...]  # of each token

    def __post_init__(self) -> None:
        if not self.ids or len(self.ids) != len(self.times):
            raise ValueError(f"{len(self.ids)} tokens with {len(self.times)} times")


def decode_rate(run: Run) -> float:
    """Tokens/s from the first token to the last: prefill left out."""
    return (len(run.times) - 1) / (run.times[-1] - run.times[0])


def first_token_s(run: Run) -> float:
    return run.times[0] - run.began


def gaps_s(run: Run) -> list[float]:
    """Times between two tokens."""
    return [after - before for before, after in pairwise(run.times)]


def longest_gap_s(run: Run) -> float:
    return max(gaps_s(run))


def total_rate(runs: Sequence[Run]) -> float:
    """Tokens/s of runs side by side, from the first begin to the last token: prefill included."""
    tokens = sum(len(run.ids) for run in runs)
    return tokens / (max(run.times[-1] for run in runs) - min(run.began for run in runs))


def together_rate(runs: Sequence[Run]) -> float:
    """Tokens/s of runs side by side, from the first of all first tokens to the last of all: what came between them."""
    tokens = sum(len(run.times) - 1 for run in runs)
    return tokens / (max(run.times[-1] for run in runs) - min(run.times[0] for run in runs))


def _rounded(value: float) -> float:
    """Six significant digits: more is noise."""
    return float(f"{value:.6g}")
