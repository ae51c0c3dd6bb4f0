"""What a route is wanted for, and what an end, a link and a stay cost for it, in seconds.

Owns the request and those terms. Does not know chains' sums, nor how one is found: that is `planner.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from routing.constraints import Constraints
from routing.cost import CLIENT, LONGEST_S, Costs
from routing.errors import BadInput
from routing.types import Objective, PeerId, PeerRecord, Route

Edge = tuple[PeerId, PeerId]
EdgePrice = Callable[[int, int], float]

CHUNK = 64
"""Positions of prefill that make the price of one, and rows, at least, that make a pass where throughput is wanted."""

REPAID_OVER = 64
"""A context that is computed anew pays off only over tokens to come: so many are expected."""

EDGE_WEIGHT = 4
"""A broken edge is avoided like so many peers: who failed earlier may well work again, two that cannot reach each other
will not."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a route is wanted for. Raises BadInput.

    `objective`: what is least in the chain taken, once it avoids what it can: its latency; the longest stage of a pass
    of `pass_rows`, all of which go on to the next hop and from the last one back; or the number of hops.
    `avoid_peers` and directed `avoid_edges` (`CLIENT` may be an end) are soft: they are used only when no chain
    exists without them, and then as few as possible, an edge counting as `EDGE_WEIGHT` peers. `penalties` are
    seconds added for each hop on a peer. Peers that are not in `held` compute a context of `context` positions anew,
    which counts as if it were paid back over `REPAID_OVER` tokens. `constraints` are hard. `prefer`, the route in use,
    is kept unless another saves more than the share `hysteresis` of its cost.
    """

    n_blocks: int
    tokens: int = 1  # 1: a decode step; more: a prefill chunk
    row_bytes: int = 0  # of one token's hidden state on the wire; 0: transfer costs nothing
    avoid_peers: frozenset[PeerId] = frozenset()
    avoid_edges: frozenset[Edge] = frozenset()
    penalties: Mapping[PeerId, float] = field(default_factory=dict)
    held: frozenset[PeerId] = frozenset()
    context: int = 0
    constraints: Constraints = field(default_factory=Constraints)
    objective: Objective = Objective.LATENCY
    prefer: Route | None = None
    hysteresis: float = 0.1

    def __post_init__(self) -> None:
        if self.n_blocks < 1 or self.tokens < 1 or self.row_bytes < 0:
            raise BadInput("a request needs at least one block and one token, and row_bytes not negative")
        if not 0 <= self.hysteresis < math.inf:
            raise BadInput(f"hysteresis must be finite and not negative, not {self.hysteresis}")
        if not all(0 <= penalty < math.inf for penalty in self.penalties.values()):
            raise BadInput("penalties must be finite and not negative")

    @property
    def pass_rows(self) -> int:
        return max(self.tokens, CHUNK)

    def replay_s(self, costs: Costs, record: PeerRecord) -> float:
        """What computing the context anew adds to a token, a block of a peer."""
        if not self.context or record.peer_id in self.held:
            return 0.0
        return self.context * costs.block_s(record, CHUNK) / CHUNK / REPAID_OVER

    def penalty_s(self, peer: PeerId) -> float:
        return min(self.penalties.get(peer, 0.0), LONGEST_S)

    def uses_avoided(self, route: Route) -> int:
        """How many hops of a route are on avoided peers, and `EDGE_WEIGHT` for each avoided edge that it crosses."""
        crossed = EDGE_WEIGHT * sum(edge in self.avoid_edges for edge in edges(route))
        return crossed + sum(hop.peer_id in self.avoid_peers for hop in route)


def edges(route: Route) -> Iterator[Edge]:
    """From the client through the hops and back: one more than there are hops."""
    ends = [CLIENT, *(hop.peer_id for hop in route), CLIENT]
    return pairwise(ends)


def edge_s(costs: Costs, request: Request, a: PeerId, b: PeerId) -> float:
    """One way between two ends, with what is sent over it: all rows; back to the client only the last."""
    rows = 1 if b == CLIENT else request.tokens
    link_s = costs.link_s(a, b)
    return link_s + costs.transfer_s(a, b, rows * request.row_bytes, link_s)


def edges_s(
    costs: Costs, request: Request, ends: Sequence[PeerId], *, broken_s: float
) -> tuple[EdgePrice, EdgePrice]:
    """`edge_s` for many pairs at one moment, ends told by their number: of those towards a peer, and of those back to
    the client. An edge to be avoided costs `broken_s` more."""
    onward, back = (costs.between(ends, rows * request.row_bytes) for rows in (request.tokens, 1))
    if not request.avoid_edges:
        return onward, back

    def extra_s(a: int, b: int) -> float:
        return broken_s if (ends[a], ends[b]) in request.avoid_edges else 0.0

    return lambda a, b: onward(a, b) + extra_s(a, b), lambda a, b: back(a, b) + extra_s(a, b)


def toll_s(costs: Costs, request: Request, record: PeerRecord) -> float:
    return costs.queue_s(record) + request.penalty_s(record.peer_id)
