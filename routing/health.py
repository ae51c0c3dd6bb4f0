"""Who failed lately, and how much a route should pay to avoid them. Bans decay; nothing is banned for ever.

Owns one number a peer: failures add to it, time and successes take from it. Does not know why a peer failed,
nor routes: the planner takes `penalties` as seconds and `banned_peers` as peers to avoid while another choice
exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from routing.errors import BadInput
from routing.types import PeerId


@dataclass(frozen=True, kw_only=True)
class HealthPolicy:
    """A failure counts 1. Seconds where the name ends in `_s`."""

    half_life_s: float = 30.0
    ban_at: float = 0.5  # one failure bans for one half-life
    cap: float = 8.0  # however often it failed
    penalty_s: float = 1.0  # for each failure still remembered
    forget_below: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.half_life_s < math.inf:
            raise BadInput(
                f"half_life_s must be above 0 and finite, not {self.half_life_s}: bans have to end"
            )
        if not 0 < self.forget_below <= self.ban_at <= self.cap < math.inf:
            raise BadInput("a health policy needs 0 < forget_below <= ban_at <= cap, all finite")
        if not 0 <= self.penalty_s < math.inf:
            raise BadInput(f"penalty_s must be finite and not negative, not {self.penalty_s}")

    @property
    def longest_ban_s(self) -> float:
        """After this long without another failure no peer is banned, whatever it did before."""
        return self.half_life_s * math.log2(self.cap / self.ban_at)


@dataclass(slots=True)
class _Score:
    value: float
    at: float


class Health:
    """Failures remembered for each peer, halved every `half_life_s`. `now`: any one clock that goes
    forward."""

    def __init__(self, policy: HealthPolicy | None = None):
        self.policy = policy or HealthPolicy()
        self._scores: dict[PeerId, _Score] = {}

    def failed(self, peer: PeerId, now: float, weight: float = 1.0) -> None:
        """A peer failed; `weight` says how sure we are that the fault was its own. Raises BadInput."""
        if not 0 < weight < math.inf:
            raise BadInput(f"the weight of a failure must be above 0 and finite, not {weight}")
        value = min(self.score(peer, now) + weight, self.policy.cap)
        self._scores[peer] = _Score(value, now)

    def worked(self, peer: PeerId, now: float) -> None:
        """A peer did its work: what is remembered against it halves, and is forgotten if that ends the
        ban."""
        value = self.score(peer, now) / 2
        if value < self.policy.ban_at:
            self._scores.pop(peer, None)
        else:
            self._scores[peer] = _Score(value, now)

    def score(self, peer: PeerId, now: float) -> float:
        """Failures still remembered, in [0, cap]."""
        known = self._scores.get(peer)
        if known is None:
            return 0.0
        value = known.value * 0.5 ** (max(0.0, now - known.at) / self.policy.half_life_s)
        return value if value >= self.policy.forget_below else 0.0

    def penalty_s(self, peer: PeerId, now: float) -> float:
        """Seconds that a route pays for each hop on this peer."""
        return self.score(peer, now) * self.policy.penalty_s

    def banned(self, peer: PeerId, now: float) -> bool:
        """Should this peer be left alone while another choice exists?"""
        return self.score(peer, now) >= self.policy.ban_at

    def banned_peers(self, now: float) -> frozenset[PeerId]:
        """All banned peers: `avoid_peers` of a request, where avoiding is soft."""
        return frozenset(peer for peer in self._scores if self.banned(peer, now))

    def penalties(self, now: float) -> dict[PeerId, float]:
        """Seconds for each peer that has any; peers whose failures have faded away are forgotten here."""
        self._scores = {peer: known for peer, known in self._scores.items() if self.score(peer, now) > 0}
        return {peer: self.penalty_s(peer, now) for peer in self._scores}
