"""The cheapest chain of peers for a request: a shortest path over (block, peer), entry and exit at any block.

Owns which peers may take a route and what a route costs, term by term. Does not know how costs were measured,
who is banned or why, the clock, or sessions: a plan is a function of a view, costs, a request and `now`. A
hop is a maximal run of blocks on one peer. It costs the link to it, the peer's queue and penalty, and its
blocks; the last hop also pays the way back to the client. `search.py` finds the least sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from routing.constraints import Constraints
from routing.cost import CLIENT, LONGEST_S, Costs
from routing.errors import BadInput, NoRoute
from routing.search import Search
from routing.types import Hop, PeerId, PeerRecord, PeerState, Route
from routing.view import View

Edge = tuple[PeerId, PeerId]

FAULT_PER_BLOCK = 2.0**16
"""Times the blocks, a use of something avoided outweighs any sum of times: the terms of a block (link,
transfer, queue, penalty, compute) are at most `LONGEST_S` each, the way back adds two, and 7 x 3600 <
2^16."""


SPLIT_GAIN = 0.2
"""Of the time of a prompt and its answer: two chains instead of one must save so much, which noise does not."""

CHUNK = 64
"""Positions of prefill that make the price of one."""

REPAID_OVER = 64
"""A context that is computed anew pays off only over tokens to come: so many are expected."""

EDGE_WEIGHT = 4
"""A broken edge is avoided like so many peers: who failed earlier may well work again, two that cannot reach each other
will not."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a route is wanted for. Raises BadInput.

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
    prefer: Route | None = None
    hysteresis: float = 0.1

    def __post_init__(self) -> None:
        if self.n_blocks < 1 or self.tokens < 1 or self.row_bytes < 0:
            raise BadInput("a request needs at least one block and one token, and row_bytes not negative")
        if not 0 <= self.hysteresis < math.inf:
            raise BadInput(f"hysteresis must be finite and not negative, not {self.hysteresis}")
        if not all(0 <= penalty < math.inf for penalty in self.penalties.values()):
            raise BadInput("penalties must be finite and not negative")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class HopCost:
    """What one hop adds, in seconds. The way back to the client is in the last hop's `network_s`."""

    hop: Hop
    network_s: float
    queue_s: float
    compute_s: float
    penalty_s: float = 0.0
    replay_s: float = 0.0  # this token's share of a context that is computed anew

    @property
    def total_s(self) -> float:
        return self.network_s + self.queue_s + self.compute_s + self.penalty_s + self.replay_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A route, what it costs (seconds, the sum of its terms), and why it was taken."""

    route: Route
    cost_s: float
    terms: tuple[HopCost, ...]
    avoided: int = 0  # uses of what the request wanted avoided
    kept: bool = False  # it is the request's `prefer`
    fastest_s: float | None = None  # the best chain found; None: no search was made
    relaxations: int = 0  # moves between peers that the search looked at

    def explain(self) -> str:
        """Why this route, and what each hop costs in milliseconds: a line for the route, one for each hop."""
        why = "fastest chain" if self.fastest_s is not None else "as given"
        if self.kept and self.fastest_s is not None:
            why = f"kept: another chain takes {self.fastest_s * 1e3:.1f} ms, too little gained by moving"
            if self.fastest_s == self.cost_s:
                why = "kept: no chain is faster"
        if self.avoided:
            why += "; nothing covers the model without peers that failed or edges that broke"
        lines = [f"{self.cost_s * 1e3:.1f} ms ({why})"]
        for term in self.terms:
            line = (
                f"{term.hop}: {term.total_s * 1e3:.1f} ms = network {term.network_s * 1e3:.1f}"
                f" + queue {term.queue_s * 1e3:.1f} + compute {term.compute_s * 1e3:.1f}"
            )
            line += f" + replay {term.replay_s * 1e3:.1f}" if term.replay_s else ""
            lines.append(line + (f" + penalty {term.penalty_s * 1e3:.1f}" if term.penalty_s else ""))
        return "\n".join(lines)


def plan(view: View, costs: Costs, request: Request, now: float) -> Plan:
    """The cheapest chain for a request, or `request.prefer` where the gain is not worth a move.

    Only SERVING peers that have not expired take a route. A DRAINING peer does so for blocks that nobody else
    serves, if it is in `prefer` already. Equal costs: staying on a peer goes before moving, then the smaller
    peer id. Raises NoRoute, naming the blocks that nobody serves.
    """
    servers = _servers(view, request, now)
    missing = [block for block, peers in enumerate(servers) if not peers]
    if missing:
        who = "no peer that this session allows" if request.constraints.any else "nobody"
        raise NoRoute(f"{who} serves {_ranges(missing)} of {request.n_blocks} blocks", blocks=missing)
    route, relaxations = _search(view, costs, request, servers)
    best = replace(route_cost(route, view, costs, request), relaxations=relaxations)
    prefer = request.prefer
    if prefer is None or not _is_valid(prefer, servers):
        return replace(best, fastest_s=best.cost_s)
    kept = route_cost(prefer, view, costs, request)
    gain_s = kept.cost_s - best.cost_s
    if kept.avoided > best.avoided or gain_s > request.hysteresis * kept.cost_s:
        return replace(best, fastest_s=best.cost_s)
    return replace(kept, kept=True, fastest_s=min(kept.cost_s, best.cost_s), relaxations=relaxations)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A prompt on one chain and what follows on another, with the same boundaries."""

    prefill: Plan
    decode: Plan
    cost_s: float  # of the prompt, the move and the tokens that are expected


def split_plan(
    view: View,
    costs: Costs,
    request: Request,
    prefill: Request,
    now: float,
    *,
    tokens: int,
    move_s: Callable[[Route, Route], float],
) -> Plan | Split:
    """The chain that takes the prompt of `prefill` and `tokens` more, each as `request` says, in the least time, or
    two chains if the second saves `SPLIT_GAIN` of it. `move_s(before, after)` is how long moving takes, while the first
    goes on. Raises NoRoute.
    """
    quick = plan(view, costs, request, now)
    strong = plan(view, costs, prefill, now)

    def total_s(route: Route) -> float:
        return route_cost(route, view, costs, prefill).cost_s + tokens * route_cost(route, view, costs, request).cost_s

    best = min((quick, strong), key=lambda found: total_s(found.route))
    single = best if best is quick else route_cost(strong.route, view, costs, request)
    after = _within(strong.route, view, costs, request, now)
    if after == strong.route:
        return single
    before_s, after_s = (route_cost(route, view, costs, request).cost_s for route in (strong.route, after))
    while_moving = min(tokens, move_s(strong.route, after) / max(before_s, 1e-6))
    cost_s = strong.cost_s + while_moving * before_s + (tokens - while_moving) * after_s
    if cost_s >= (1 - SPLIT_GAIN) * total_s(best.route):
        return single
    return Split(prefill=strong, decode=route_cost(after, view, costs, request), cost_s=cost_s)


def _within(route: Route, view: View, costs: Costs, request: Request, now: float) -> Route:
    """The cheapest chain with the boundaries of `route`: the shortest path over its hops and who can take each."""
    servers = _servers(view, request, now)
    ways: dict[PeerId, tuple[float, tuple[Hop, ...]]] = {CLIENT: (0.0, ())}
    for hop in route:
        able = set(servers[hop.entry]).intersection(*servers[hop.entry + 1 : hop.exit]) - request.avoid_peers
        blocks = hop.exit - hop.entry
        ways = {
            peer: min(
                (
                    cost + _edge_s(costs, request, end, peer) + costs.queue_s(view.records[peer])
                    + blocks * costs.block_s(view.records[peer], request.tokens) + request.penalty_s(peer),
                    (*hops, Hop(peer, hop.entry, hop.exit)),
                )
                for end, (cost, hops) in ways.items()
            )
            for peer in sorted(able | {hop.peer_id})
        }  # fmt: skip
    _, hops = min((cost + _edge_s(costs, request, end, CLIENT), hops) for end, (cost, hops) in ways.items())
    return Route(hops)


def route_cost(route: Route, view: View, costs: Costs, request: Request) -> Plan:
    """What a given route costs, whatever the state of its peers. Raises NoRoute if the view lacks one."""
    lost = [block for hop in route if hop.peer_id not in view.records for block in range(hop.entry, hop.exit)]
    if lost:
        raise NoRoute(f"no record of the peers for {_ranges(lost)} in {route}", blocks=lost)
    ways = list(edges(route))
    terms = []
    for index, hop in enumerate(route):
        record = view.records[hop.peer_id]
        network_s = _edge_s(costs, request, *ways[index])
        if index == len(route) - 1:
            network_s += _edge_s(costs, request, *ways[-1])
        terms.append(
            HopCost(
                hop=hop,
                network_s=network_s,
                queue_s=costs.queue_s(record),
                compute_s=costs.block_s(record, request.tokens) * (hop.exit - hop.entry),
                penalty_s=request.penalty_s(hop.peer_id),
                replay_s=request.replay_s(costs, record) * (hop.exit - hop.entry),
            )
        )
    return Plan(
        route=route,
        cost_s=sum(term.total_s for term in terms),
        terms=tuple(terms),
        avoided=request.uses_avoided(route),
    )


def _search(view: View, costs: Costs, request: Request, servers: list[list[PeerId]]) -> tuple[Route, int]:
    """The cheapest chain, and how many moves were looked at. Avoided things cost a fault each, not a time."""
    peers = sorted({peer for those in servers for peer in those})
    number = {peer: index for index, peer in enumerate(peers)}
    records = [view.records[peer] for peer in peers]
    fault = FAULT_PER_BLOCK * request.n_blocks

    def edge(a: PeerId, b: PeerId) -> float:
        cost = _edge_s(costs, request, a, b)
        return cost + EDGE_WEIGHT * fault if (a, b) in request.avoid_edges else cost

    prefer = request.prefer
    known: list[int] = []
    if prefer is not None and _is_valid(prefer, servers):
        known = [number[hop.peer_id] for hop in prefer for _ in range(hop.entry, hop.exit)]
    search = Search(
        servers=[[number[peer] for peer in those] for those in servers],
        block_cost=[costs.block_s(record, request.tokens) + request.replay_s(costs, record) for record in records],
        toll=[
            costs.queue_s(record)
            + request.penalty_s(record.peer_id)
            + (fault if record.peer_id in request.avoid_peers else 0.0)
            for record in records
        ],
        enter=[edge(CLIENT, peer) for peer in peers],
        leave=[edge(peer, CLIENT) for peer in peers],
        shortest=[costs.least_link_s(peer) for peer in peers],
        link=lambda a, b: edge(peers[a], peers[b]),
        known=known,
    )
    hops: list[Hop] = []
    for block, index in enumerate(search.run()):
        if hops and hops[-1].peer_id == peers[index]:
            hops[-1] = Hop(peers[index], hops[-1].entry, block + 1)
        else:
            hops.append(Hop(peers[index], block, block + 1))
    return Route(tuple(hops)), search.relaxations


def _servers(view: View, request: Request, now: float) -> list[list[PeerId]]:
    """For each block, the peers that may take it, in order of their ids."""
    servers: list[list[PeerId]] = [[] for _ in range(request.n_blocks)]
    allows = request.constraints.allows if request.constraints.any else None
    for record in view.alive(now, PeerState.SERVING):
        for block in range(record.span.start, min(record.span.end, request.n_blocks)):
            if allows is None or allows(record.peer_id, block, request.n_blocks):
                servers[block].append(record.peer_id)
    if request.prefer is not None and not all(servers):
        bare = {block for block, peers in enumerate(servers) if not peers}
        for record in view.alive(now, PeerState.DRAINING):
            if record.peer_id in request.prefer.peers:
                for block in bare.intersection(range(record.span.start, record.span.end)):
                    if allows is None or allows(record.peer_id, block, request.n_blocks):
                        servers[block].append(record.peer_id)
    return servers


def _is_valid(route: Route, servers: list[list[PeerId]]) -> bool:
    """May each peer of a route take each of its blocks, and are those all blocks?"""
    if not route.hops or route.hops[-1].exit != len(servers):
        return False
    return all(hop.peer_id in servers[block] for hop in route for block in range(hop.entry, hop.exit))


def edges(route: Route) -> Iterator[Edge]:
    """From the client through the hops and back: one more than there are hops."""
    ends = [CLIENT, *(hop.peer_id for hop in route), CLIENT]
    return pairwise(ends)


def _edge_s(costs: Costs, request: Request, a: PeerId, b: PeerId) -> float:
    """One way between two ends, with what is sent over it: all rows; back to the client only the last."""
    rows = 1 if b == CLIENT else request.tokens
    link_s = costs.link_s(a, b)
    return link_s + costs.transfer_s(a, b, rows * request.row_bytes, link_s)


def _ranges(blocks: Iterable[int]) -> str:
    """`[3, 4, 5, 8]` as `3:6, 8:9`: spans as everywhere else."""
    spans: list[list[int]] = []
    for block in sorted(blocks):
        if spans and spans[-1][1] == block:
            spans[-1][1] += 1
        else:
            spans.append([block, block + 1])
    return ", ".join(f"{start}:{end}" for start, end in spans)
