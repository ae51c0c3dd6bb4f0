"""What came of a simulation: counted while it runs, then told in figures.

Owns the figures' meaning. Times in seconds. Everything but `Planning.ms_...` is the same for the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

BUCKETS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What plans over `peers` peers took, on average: peers looked at, moves between them that the search tried, and
    milliseconds if a clock was there (the median and the 99th of a hundred)."""

    peers: int
    plans: int
    candidates: float
    relaxations: float
    ms_p50: float | None = None
    ms_p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Percentiles are (median, 90th, 99th, greatest) unless said otherwise; of nothing they are zeros.

    A stall is a time in which an answer that had begun stood still because of a loss or a move. `fairness` is Jain's
    index (Jain, Chiu and Hawe 1984): 1 where all have the same, 1/n where one of n has everything.
    """

    name: str
    seed: int
    seconds: float
    peers: int
    clients: int
    started: int
    finished: int
    failed: int
    failed_while_covered: int  # every block had a living peer that served it, all the time that a route was sought
    running: int
    tokens: int
    tokens_per_s: float  # of all together
    rates: tuple[float, float, float]  # tokens a second of an answer, after its first: 10th, 50th and 90th of a hundred
    first_token_s: tuple[float, float, float, float]
    stalls: int
    stall_s: tuple[float, float, float, float]
    stalls_by_cause: dict[str, int]
    gap_s: tuple[float, float, float, float]  # the longest time between two tokens of an answer
    losses: int  # an answer lost a hop
    moves: int  # to a cheaper route
    handed_over: int  # a hop left in good order, and nobody waited
    joined: int
    left: int
    died: int
    faults: int
    rebalanced: int  # peers that went to serve other blocks
    fairness_clients: float  # of tokens a second while a client waits for an answer
    fairness_peers: float  # of work a second while a peer serves
    least_coverage: int
    uncovered_s: float
    planning: Planning
    growth: tuple[Planning, ...] = ()
    tokens_over_time: tuple[float, ...] = ()  # tokens a second, in `BUCKETS` equal parts of the time
    stalls_over_time: tuple[float, ...] = ()  # the longest stall that ended in each

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Tally:
    """Counts. Mutable; what is still running is for the one who has it to say."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.started = self.failed = self.failed_while_covered = self.done = 0
        self.lost_hops = self.moved = self.handed_over = 0
        self.joined = self.left = self.died = self.faults = self.rebalanced = 0
        self.tokens = 0.0
        self.uncovered_s = 0.0
        self.least_coverage = -1
        self._bare_since: float | None = None
        self._serving = False
        self._rates: list[float] = []
        self._first_tokens: list[float] = []
        self._stalls: list[float] = []
        self._gaps: list[float] = []
        self._causes: dict[str, int] = {}
        self._tokens_at = [0.0] * BUCKETS
        self._stalls_at = [0.0] * BUCKETS
        self._candidates = self._relaxations = 0
        self._plans = 0
        self._plan_s: list[float] = []

    def gave_up(self, covered: bool) -> None:
        self.failed += 1
        self.failed_while_covered += covered

    def finished(self, tokens: int, seconds: float) -> None:
        self.done += 1
        self._rates.append((tokens - 1) / max(seconds, 1e-9))

    def first_token(self, seconds: float) -> None:
        self._first_tokens.append(seconds)

    def stalled(self, now: float, seconds: float, cause: str) -> None:
        self._stalls.append(seconds)
        self._causes[cause] = self._causes.get(cause, 0) + 1
        part = self._part(now)
        self._stalls_at[part] = max(self._stalls_at[part], seconds)

    def had_gap(self, seconds: float) -> None:
        """An answer's longest, at its end or at that of the simulation."""
        self._gaps.append(seconds)

    def produced(self, begin: float, end: float, tokens: float) -> None:
        """Evenly between two moments."""
        self.tokens += tokens
        first, last = self._part(begin), self._part(end)
        if first == last:
            self._tokens_at[first] += tokens
            return
        width = self.seconds / BUCKETS
        for part in range(first, last + 1):
            share = min(end, (part + 1) * width) - max(begin, part * width)
            self._tokens_at[part] += tokens * max(0.0, share) / (end - begin)

    def planned(self, candidates: int, relaxations: int, seconds: float | None) -> None:
        self._plans += 1
        self._candidates += candidates
        self._relaxations += relaxations
        if seconds is not None:
            self._plan_s.append(seconds)

    def begins(self, least: int) -> None:
        """All of the first peers serve: from here on coverage counts."""
        self._serving = True
        self.coverage(0.0, least)

    def coverage(self, now: float, least: int) -> None:
        if not self._serving:
            return
        self.least_coverage = least if self.least_coverage < 0 else min(self.least_coverage, least)
        if self._bare_since is not None:
            self.uncovered_s += now - self._bare_since
        self._bare_since = now if least == 0 else None

    def planning(self, peers: int) -> Planning:
        timed = bool(self._plan_s)
        return Planning(
            peers=peers,
            plans=self._plans,
            candidates=round(self._candidates / max(1, self._plans), 1),
            relaxations=round(self._relaxations / max(1, self._plans), 1),
            ms_p50=1e3 * percentile(self._plan_s, 50) if timed else None,
            ms_p99=1e3 * percentile(self._plan_s, 99) if timed else None,
        )

    def report(
        self,
        name: str,
        seed: int,
        peers: int,
        rates: Sequence[float],
        work: Sequence[float],
        growth: Sequence[Planning],
    ) -> Report:
        """`rates`: of each client; `work`: of each peer, a second of serving."""
        self.coverage(self.seconds, 1 if self._bare_since is None else 0)
        width = self.seconds / BUCKETS
        return Report(
            name=name, seed=seed, seconds=self.seconds, peers=peers, clients=len(rates),
            started=self.started, finished=self.done, failed=self.failed,
            failed_while_covered=self.failed_while_covered, running=self.started - self.done - self.failed,
            tokens=round(self.tokens), tokens_per_s=self.tokens / self.seconds,
            rates=(percentile(self._rates, 10), percentile(self._rates, 50), percentile(self._rates, 90)),
            first_token_s=_percentiles(self._first_tokens),
            stalls=len(self._stalls), stall_s=_percentiles(self._stalls),
            stalls_by_cause=dict(sorted(self._causes.items())), gap_s=_percentiles(self._gaps),
            losses=self.lost_hops, moves=self.moved, handed_over=self.handed_over,
            joined=self.joined, left=self.left, died=self.died, faults=self.faults,
            rebalanced=self.rebalanced,
            fairness_clients=jain([rate for rate in rates if rate > 0]), fairness_peers=jain(work),
            least_coverage=max(0, self.least_coverage), uncovered_s=self.uncovered_s,
            planning=self.planning(peers), growth=tuple(growth),
            tokens_over_time=tuple(tokens / width for tokens in self._tokens_at),
            stalls_over_time=tuple(self._stalls_at),
        )  # fmt: skip

    def _part(self, when: float) -> int:
        return min(BUCKETS - 1, int(when * BUCKETS / self.seconds))


def percentile(values: Sequence[float], of_hundred: float) -> float:
    """The least value that so many of a hundred do not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(of_hundred / 100 * len(ordered)) - 1)]


def _percentiles(values: Sequence[float]) -> tuple[float, float, float, float]:
    return percentile(values, 50), percentile(values, 90), percentile(values, 99), max(values, default=0.0)


def jain(values: Sequence[float]) -> float:
    """Jain's fairness index; 1 of none."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
