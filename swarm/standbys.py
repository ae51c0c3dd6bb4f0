"""Who stands by for the hops of a session's route, and the route with them in the place of what was lost.

A standby is sent what its hop is sent. It keeps it, so that after a loss nothing has to be sent again ("inputs"), or
also computes it when it has time, so that a loss costs a few round trips however long the text is ("warm"). See
`docs/wire.md`, "Standby".
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise
from typing import TYPE_CHECKING

from routing.constraints import Constraints
from routing.cost import CLIENT
from routing.types import Hop, PeerId, Route

if TYPE_CHECKING:
    from swarm.client import SwarmClient

Edge = tuple[PeerId, PeerId]

MODES = ("none", "inputs", "warm")
LOOK_EVERY_S = 2.0  # for one, while a hop has none
REST_S = 5.0  # before one that failed may stand by again


class Standbys:
    """Of one session. Time is an argument, on the monotonic clock."""

    def __init__(self, client: SwarmClient, mode: str, constraints: Constraints):
        """`mode`: one of MODES."""
        self._client, self._mode, self._constraints = client, mode, constraints
        self._look_at = 0.0
        self._resting: dict[PeerId, float] = {}
        self.targets: dict[tuple[int, int], PeerId] = {}  # of blocks: who is to take them as soon as it is warm

    def wants(self, hop: Hop) -> bool:
        """Whether there should be one for that hop: the session asked for it, or the hop is to move."""
        return self._mode != "none" or self.moves(hop)

    def moves(self, hop: Hop) -> bool:
        """Its peer leaves, or another one is better for what comes now."""
        return hop.peer_id in self._client.leaving or hop.peer_id != self._target(hop)

    def _target(self, hop: Hop) -> PeerId:
        return self.targets.get((hop.entry, hop.exit), hop.peer_id)

    def moving(self, route: Route) -> bool:
        """Whether a move is under way."""
        return any(self.moves(hop) for hop in route)

    def lazy(self, route: Route, standing: Sequence[Hop]) -> frozenset[Hop]:
        """Those that need not compute what they are sent."""
        if self._mode == "warm":
            return frozenset()
        moving = {(hop.entry, hop.exit) for hop in route if self.moves(hop)}
        return frozenset(hop for hop in standing if (hop.entry, hop.exit) not in moving)

    def is_due(self, route: Route, now: float) -> bool:
        """Whether it is time to look for some."""
        return now >= self._look_at and any(self.wants(hop) for hop in route)

    def failed(self, peer_id: PeerId, now: float, rest_s: float = REST_S) -> None:
        self._resting[peer_id] = now + rest_s
        self.targets = {span: target for span, target in self.targets.items() if target != peer_id}
        self.look_soon()

    def leaves(self, peer_id: PeerId) -> None:
        """It takes nothing any more: where a move went there, the plan was another swarm's."""
        if peer_id in self.targets.values():
            self.targets = {}

    def look_soon(self) -> None:
        self._look_at = 0.0

    def choose(
        self,
        route: Route,
        standing: Sequence[Hop],
        avoided: Set[PeerId],
        excluded: Set[PeerId],
        edges: Set[Edge],
        now: float,
    ) -> tuple[Hop, ...]:
        """For each hop that wants one, if there is one that is connected: who stands by already, else the fastest that
        has not failed here, another one for each hop if that can be. Never one of those `excluded`."""
        spares = {hop: self._client.spares(hop, route.peers | excluded, self._constraints) for hop in route}
        if any(self._target(hop) not in (hop.peer_id, *spares[hop]) for hop in route):
            self.targets = {}  # who was to take some of the blocks serves others now
        chosen: list[Hop] = []
        wanting = [self.wants(hop) for hop in route]
        for index, hop in enumerate(route):
            if not wanting[index]:
                continue
            before = route[index - 1].peer_id if index else CLIENT
            old = {other.peer_id for other in standing if (other.entry, other.exit) == (hop.entry, hop.exit)}
            taken = {other.peer_id for other in chosen}
            able = [
                peer_id
                for peer_id in spares[hop]
                if self._client.link(peer_id) is not None
                and self._resting.get(peer_id, 0.0) <= now
                and (before, peer_id) not in edges
            ]
            target = self._target(hop)
            order = {peer_id: (peer_id != target, peer_id not in old, peer_id in avoided) for peer_id in able}
            able.sort(key=lambda peer_id: (*order[peer_id], peer_id in taken))
            if able:
                chosen.append(Hop(able[0], hop.entry, hop.exit))
        self._look_at = now + LOOK_EVERY_S if len(chosen) < sum(wanting) else float("inf")
        return tuple(chosen)

    def replaced(self, route: Route, standing: Sequence[Hop], lost: Set[PeerId], edges: Set[Edge]) -> Route | None:
        """The route with standbys for what was lost, or None if that takes more than they can do."""
        able = {
            (hop.entry, hop.exit): hop
            for hop in standing
            if hop.peer_id not in lost and self._client.link(hop.peer_id) is not None
        }
        hops: list[Hop] = []
        for hop in route:
            before = hops[-1].peer_id if hops else CLIENT
            stand_in = able.get((hop.entry, hop.exit))
            if hop.peer_id not in lost and (before, hop.peer_id) not in edges:
                hops.append(hop)
            elif stand_in is not None:
                hops.append(stand_in)
            else:
                return None
        ends = [CLIENT, *(hop.peer_id for hop in hops), CLIENT]
        if hops == list(route) or edges & set(pairwise(ends)):
            return None
        return Route(tuple(hops)) if all(self._client.link(hop.peer_id) for hop in hops) else None
