"""How long sessions that share a peer wait there for each other: steps in a closed loop, in passes that pack them.

Owns this sum. Knows no peer. A session has one step under way, so `n` sessions bring a peer at most `n` steps. Each
spends `elsewhere_s` on the way and on other hops, then waits for the pass under way to end, and is taken with others
that wait. Nothing here is random, so as long as the peer can serve all one by one, nobody waits: the sessions keep out
of each other's way. Beyond that the peer never idles. Where a prompt is computed beside them, it has its share after
each pass, and is left at the next end of a block: as `peer/service.py` does it.

Within 15 % of a loop run step by step (`tests/routing/test_queueing.py`), but for chains of one hop that is far away:
there sessions stay in lumps, and a step is up to a third shorter than this says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

ROUNDS = 2  # of passes that depend on each other's length
PREFILL_SHARE = 0.5  # of a decode pass: what a prompt has between two of them at least


class Stop(NamedTuple):
    """A hop as a step finds it: what its pass takes alone, how many sessions decode there, how many steps a pass takes,
    and what a prompt has after each pass."""

    alone_s: float
    sessions: int
    most: int
    beside_s: float = 0.0


def beside_s(alone_s: float, block_s: float) -> float:
    """What a prompt has after each pass."""
    return max(PREFILL_SHARE * alone_s, block_s)


def prompt_rate(alone_s: float, sessions: int, elsewhere_s: float, beside_s: float) -> float:
    """How fast a prompt is computed where so many sessions decode: over how fast it is where none does."""
    round_s = max(elsewhere_s + alone_s, sessions * (alone_s + beside_s))
    return 1 - sessions * alone_s / round_s


def through(ways_s: float, stops: Sequence[Stop], slope: float) -> list[tuple[float, float]]:
    """For each hop of a chain what a pass takes and what a step waits for it. The hop at which a round takes longest
    makes all wait; at the others they come one by one then. Where several are as slow they share that wait."""
    found = [(stop.alone_s, 0.0) for stop in stops]
    for _ in range(ROUNDS):
        passes_s = ways_s + sum(pass_s for pass_s, _ in found)
        found = [
            shared(stop.alone_s, stop.sessions, slope, passes_s - pass_s, stop.most, stop.beside_s)
            for stop, (pass_s, _) in zip(stops, found, strict=True)
        ]
    whole_s = max((wait_s for _, wait_s in found), default=0.0)
    all_s = sum(wait_s for _, wait_s in found) or 1.0
    return [(pass_s, whole_s * wait_s / all_s) for pass_s, wait_s in found]


def longest_wait_s(stops: Sequence[Stop], times: Sequence[tuple[float, float]]) -> float:
    """Of one step through them, in all. `times` (of `through`) are what it comes to on average. Where each has a pass
    of its own they take turns, and all wait alike; where some go together, no two wait alike, and at times a step waits
    for a whole pass at each such hop."""
    alike_s = sum(wait_s for _, wait_s in times)
    unlike_s = sum(
        max(wait_s, pass_s + stop.beside_s)
        for stop, (pass_s, wait_s) in zip(stops, times, strict=True)
        if wait_s and (pass_s > stop.alone_s * (1 + 1e-6) or stop.beside_s)
    )
    return max(alike_s, unlike_s)


def shared(
    alone_s: float, sessions: int, slope: float, elsewhere_s: float, most: int, beside_s: float = 0.0
) -> tuple[float, float]:
    """What a pass takes, and what a step waits for it, in seconds. `alone_s`: a pass with one step; each further one
    adds `slope` of that; `most` steps in a pass; `beside_s` of something else follows each pass.

    With m steps a pass takes p = alone_s (1 + slope (m - 1)) + beside_s, and n steps take n p / m: that is a round. Who
    comes while a pass is under way waits for its end, and a pass takes as many as came during the one before: n p / m =
    elsewhere_s + 2 p, which is quadratic in m.
    """
    if sessions * (alone_s + beside_s) <= elsewhere_s + alone_s:
        return alone_s, beside_s / 2
    base_s, more_s = alone_s * (1 - slope) + beside_s, alone_s * slope
    linear = elsewhere_s + 2 * base_s - sessions * more_s
    root = math.sqrt(linear * linear + 8 * more_s * sessions * base_s)
    together = (root - linear) / (4 * more_s) if more_s else sessions * base_s / linear
    together = min(max(1.0, together), most)
    turn_s = base_s + more_s * together
    pass_s = turn_s - beside_s
    return pass_s, max(0.0, sessions * turn_s / together - elsewhere_s - pass_s)
