"""When a session that runs leaves its route for a cheaper one: soon when a hop has become slow, never for noise.

Owns the last steps' times and the decision. Knows no peer, no link and no clock: durations, plans and `now` come in;
how a session moves is its own affair.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from routing.planner import Plan
from routing.retry import Rng
from routing.types import PeerId, Route

LOOK_S, LOOK_AGAIN_S = 2.0, 0.25  # for a cheaper route: usually, and while one seems to be there
REMEMBERED_S, HARDER = 600.0, 0.5  # a move makes the next one harder for so long, by this share of the margin

LAST = 5  # steps whose median is the pace now: two late ones do not change it
SPREAD_OF = 24  # steps that tell how much they vary
LEAST_MARGIN = 0.1
SURE = 3.5  # standard deviations of a running mean
_OF_MEAN = 0.378  # its deviation over that of a step, at the weight 0.25 of `CostSettings`: (w / (2 - w)) ** 0.5
_OF_DIFFERENCE = 0.954  # the median difference of two in a row, in standard deviations of one, where they are normal
SLOWED = 1.5
BIG_GAIN, SOME = 2.0, 0.5
TOKENS_OF_STALL = 4  # a move may hold the text up for what it saves over so many tokens; else it is made ready first


class Pace:
    """Of one session on one route. Seconds."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=SPREAD_OF)

    def add(self, step_s: float) -> None:
        """A decode step took so long."""
        self._steps.append(step_s)

    @property
    def known(self) -> bool:
        return len(self._steps) >= LAST

    @property
    def now_s(self) -> float:
        """The median of the last few."""
        return median(list(self._steps)[-LAST:])

    @property
    def slowed(self) -> bool:
        """Whether the last step took much longer than those before."""
        return self.known and self._steps[-1] > SLOWED * median(self._steps)

    @property
    def margin(self) -> float:
        """The share by which another route must be better, so that noise does not make it seem so. Told by what differs
        between steps in a row: a hop that became slow for good changes that once."""
        if not self.known:
            return LEAST_MARGIN
        deviation = median(abs(b - a) for a, b in pairwise(self._steps)) / _OF_DIFFERENCE
        return max(LEAST_MARGIN, SURE * _OF_MEAN * deviation / max(median(self._steps), 1e-9))


class Mover:
    """Of one session. The running means (a plan is made of them) and the pace must both say that another route is
    better, twice in a row."""

    def __init__(self, rng: Rng):
        self.pace = Pace()
        self._rng = rng
        self._look_at = 0.0
        self._seemed = False  # at the last look
        self._moves: deque[float] = deque(maxlen=64)

    def step(self, seconds: float, now: float) -> None:
        """A decode step took so long on the present route."""
        self.pace.add(seconds)
        if self.pace.slowed:
            self._look_at = min(self._look_at, now + LOOK_AGAIN_S)

    def rerouted(self) -> None:
        self.pace, self._seemed = Pace(), False

    def is_due(self, now: float) -> bool:
        return now >= self._look_at and self.pace.known

    def look(self, now: float, find: Callable[[float], Plan | None]) -> Plan | None:
        """The route to move to, if it is time. `find` plans with the route in use as `prefer` and what it is given as
        `hysteresis`."""
        recent = sum(now - at < REMEMBERED_S for at in self._moves)
        margin = self.pace.margin * (1 + HARDER * recent)
        plan = find(margin)
        if plan is not None and (plan.kept or plan.cost_s * (1 + margin) > self.pace.now_s):
            plan = None
        again, self._seemed = self._seemed, plan is not None
        self._look_at = now + (LOOK_AGAIN_S if self._seemed else LOOK_S)
        return plan if again else None

    def moves(self, now: float) -> None:
        """The session does what the last look said."""
        self._moves.append(now)
        self._seemed = False

    def our_turn(self, here: int, there: int, gain: float) -> bool:
        """Sessions that crowd a peer see the same better one at the same moment. Of `here` only so many go as make both
        equal (Berenbrink et al., "Distributed selfish load balancing", SIAM J. Computing 2007). Where the crowds are no
        reason, only for a route that takes a half, or less: `gain` is the pace over what the other would take."""
        if here <= 1:
            return True
        if here - there >= 2:
            return self._rng.random() < (here - there) / (2 * here)
        return gain >= BIG_GAIN and self._rng.random() < SOME


def crowds(route: Route, other: Route, sessions: Callable[[PeerId], int]) -> tuple[int, int]:
    """Most sessions of a peer that a session would leave, and of one where it would go."""

    def most(peers: frozenset[PeerId]) -> int:
        return max(map(sessions, peers), default=0)

    return most(route.peers - other.peers), most(other.peers - route.peers)


def is_made_ready_first(route: Route, other: Route, stall_s: float, saved_s: float) -> bool:
    """Whether peers of `other` are made ready while the text goes on, which takes the same boundaries: a move at once
    would hold it up for `stall_s`, and saves `saved_s` a token."""
    spans = {(hop.entry, hop.exit) for hop in route}
    return stall_s > TOKENS_OF_STALL * saved_s and all((hop.entry, hop.exit) in spans for hop in other)
