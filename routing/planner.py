"""The cheapest chain of peers for a request: a shortest path over (block, peer), entry and exit at any block.

Owns which peers may take a route and what a route costs, term by term. Does not know how costs were measured,
who is banned or why, the clock, or sessions: a plan is a function of a view, costs, a request and `now`. A
hop is a maximal run of blocks on one peer. It costs the link to it, the peer's queue and penalty, and its
blocks; the last hop also pays the way back to the client. `search.py` finds the least sum, `throughput.py` the least
slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from routing.cost import CLIENT, Costs
from routing.errors import NoRoute
from routing.objectives import pipelined, slowest_s
from routing.request import EDGE_WEIGHT, Request, edge_s, edges, edges_s, toll_s
from routing.search import Search
from routing.types import Hop, Objective, PeerId, PeerState, Route
from routing.view import View

FAULT_PER_BLOCK = 2.0**16
"""Times the blocks, a use of something avoided outweighs any sum of times: the terms of a block (link,
transfer, queue, penalty, compute) are at most `LONGEST_S` each, the way back adds two, and 7 x 3600 <
2^16."""

SPLIT_GAIN = 0.2
"""Of the time of a prompt and its answer: two chains instead of one must save so much, which noise does not."""


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
    """A route, what it costs (seconds, the sum of its terms), and why it was taken. `slowest_s`: the longest stage of a
    pass, where throughput is wanted."""

    route: Route
    cost_s: float
    terms: tuple[HopCost, ...]
    avoided: int = 0  # uses of what the request wanted avoided
    kept: bool = False  # it is the request's `prefer`
    fastest_s: float | None = None  # the best chain found; None: no search was made
    relaxations: int = 0  # moves between peers that the search looked at
    objective: Objective = Objective.LATENCY
    slowest_s: float = 0.0
    rows_per_s: float = 0.0  # that stage's

    @property
    def rank(self) -> tuple[int, float, float]:
        """The less, the better, among plans for one request."""
        aim = len(self.route) if self.objective is Objective.HOPS else self.slowest_s
        return self.avoided, aim, self.cost_s

    def explain(self) -> str:
        """Why this route, and what each hop costs in milliseconds: a line for the route, one for each hop."""
        why = _WHY[self.objective] if self.fastest_s is not None else "as given"
        if self.kept and self.objective is not Objective.LATENCY:
            why = "kept: too little gained by moving"
        elif self.kept and self.fastest_s is not None:
            why = f"kept: another chain takes {self.fastest_s * 1e3:.1f} ms, too little gained by moving"
            if self.fastest_s == self.cost_s:
                why = "kept: no chain is faster"
        if self.avoided:
            why += "; nothing covers the model without peers that failed or edges that broke"
        if self.slowest_s:
            why += f"; {self.rows_per_s:.0f} rows a second, the slowest stage {self.slowest_s * 1e3:.1f} ms a pass"
        lines = [f"{self.cost_s * 1e3:.1f} ms ({why})"]
        for term in self.terms:
            line = (
                f"{term.hop}: {term.total_s * 1e3:.1f} ms = network {term.network_s * 1e3:.1f}"
                f" + queue {term.queue_s * 1e3:.1f} + compute {term.compute_s * 1e3:.1f}"
            )
            line += f" + replay {term.replay_s * 1e3:.1f}" if term.replay_s else ""
            lines.append(line + (f" + penalty {term.penalty_s * 1e3:.1f}" if term.penalty_s else ""))
        return "\n".join(lines)


_WHY = {
    Objective.LATENCY: "fastest chain",
    Objective.THROUGHPUT: "chain of highest throughput",
    Objective.HOPS: "chain of fewest hops",
}


def plan(view: View, costs: Costs, request: Request, now: float) -> Plan:
    """The best chain for a request, or `request.prefer` where the gain is not worth a move.

    Only SERVING peers that have not expired take a route. A DRAINING peer does so for blocks that nobody else
    serves, if it is in `prefer` already. Equal costs: staying on a peer goes before moving, then the smaller
    peer id. Raises NoRoute, naming the blocks that nobody serves.
    """
    servers = _servers(view, request, now)
    missing = [block for block, peers in enumerate(servers) if not peers]
    if missing:
        raise _nobody(view, request, now, missing)
    route, relaxations = _search(view, costs, request, servers)
    best = replace(route_cost(route, view, costs, request), relaxations=relaxations)
    prefer = request.prefer
    if prefer is None or not _is_valid(prefer, servers):
        return replace(best, fastest_s=best.cost_s)
    kept = best if best.route == prefer else route_cost(prefer, view, costs, request)
    if kept.avoided > best.avoided or _gains(kept, best, request):
        return replace(best, fastest_s=best.cost_s)
    return replace(kept, kept=True, fastest_s=min(kept.cost_s, best.cost_s), relaxations=relaxations)


def _gains(kept: Plan, best: Plan, request: Request) -> bool:
    """Whether the best chain is worth a move: by what is wanted, or as good in that and of less latency."""
    if request.objective is Objective.HOPS and len(best.route) < len(kept.route):
        return True
    if kept.slowest_s - best.slowest_s > request.hysteresis * kept.slowest_s:
        return True
    return kept.cost_s - best.cost_s > request.hysteresis * kept.cost_s


def _nobody(view: View, request: Request, now: float, missing: list[int]) -> NoRoute:
    """With the constraints that leave out who serves those blocks."""
    text, limits = f"serves {_ranges(missing)} of {request.n_blocks} blocks", request.constraints
    forbidden = limits.forbidden(view.alive(now, PeerState.SERVING), missing, request.n_blocks)
    if not forbidden:
        return NoRoute(f"nobody {text}", blocks=missing)
    why = ", ".join(f"{name} ({len(peers)} peer{'s' if len(peers) > 1 else ''})" for name, peers in forbidden.items())
    return NoRoute(
        f"no peer that this session allows {text}; left out by {why}",
        blocks=missing,
        advice="Allow more peers, or start one that may take part.",
    )


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
                    cost + edge_s(costs, request, end, peer) + costs.queue_s(view.records[peer])
                    + blocks * costs.block_s(view.records[peer], request.tokens) + request.penalty_s(peer),
                    (*hops, Hop(peer, hop.entry, hop.exit)),
                )
                for end, (cost, hops) in ways.items()
            )
            for peer in sorted(able | {hop.peer_id})
        }  # fmt: skip
    _, hops = min((cost + edge_s(costs, request, end, CLIENT), hops) for end, (cost, hops) in ways.items())
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
        network_s = edge_s(costs, request, *ways[index])
        if index == len(route) - 1:
            network_s += edge_s(costs, request, *ways[-1])
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
    longest_s = slowest_s(route, view, costs, request) if request.objective is Objective.THROUGHPUT else 0.0
    return Plan(
        route=route,
        cost_s=sum(term.total_s for term in terms),
        terms=tuple(terms),
        avoided=request.uses_avoided(route),
        objective=request.objective,
        slowest_s=longest_s,
        rows_per_s=request.pass_rows / longest_s if longest_s else 0.0,
    )


def _search(view: View, costs: Costs, request: Request, servers: list[list[PeerId]]) -> tuple[Route, int]:
    """The best chain, and how many moves were looked at."""
    if request.objective is not Objective.THROUGHPUT:
        return _cheapest(view, costs, request, servers)
    if not (request.avoid_peers or request.avoid_edges):
        return pipelined(view, costs, request, servers, frozenset()), 0
    # What has to be avoided is told by the cheapest chain: the search goes on among those that need no more.
    least, relaxations = _cheapest(view, costs, request, servers)
    spared = request.avoid_peers - least.peers
    servers = [[peer for peer in those if peer not in spared] for those in servers]
    found = pipelined(view, costs, request, servers, request.avoid_edges - set(edges(least)))
    return (least if request.uses_avoided(found) > request.uses_avoided(least) else found), relaxations


def _cheapest(view: View, costs: Costs, request: Request, servers: list[list[PeerId]]) -> tuple[Route, int]:
    """By the sum of costs, and how many moves were looked at. Avoided things cost a fault each, not a time; so do hops
    where these are to be few, a fault then outweighing all hops."""
    peers = sorted({peer for those in servers for peer in those})
    number = {peer: index for index, peer in enumerate(peers)}
    records = [view.records[peer] for peer in peers]
    fault, hop = FAULT_PER_BLOCK * request.n_blocks, 0.0
    if request.objective is Objective.HOPS:
        fault, hop = fault * (request.n_blocks + 1), fault

    client = len(peers)
    onward, back = edges_s(costs, request, [*peers, CLIENT], broken_s=EDGE_WEIGHT * fault)
    prefer = request.prefer
    known: list[int] = []
    if prefer is not None and _is_valid(prefer, servers):
        known = [number[hop.peer_id] for hop in prefer for _ in range(hop.entry, hop.exit)]
    search = Search(
        servers=[[number[peer] for peer in those] for those in servers],
        block_cost=[costs.block_s(record, request.tokens) + request.replay_s(costs, record) for record in records],
        toll=[
            hop
            + toll_s(costs, request, record)
            + (fault if record.peer_id in request.avoid_peers else 0.0)
            for record in records
        ],
        enter=[onward(client, peer) for peer in range(client)],
        leave=[back(peer, client) for peer in range(client)],
        shortest=[costs.least_link_s(peer) for peer in peers],
        link=onward,
        known=known,
    )
    hops: list[Hop] = []
    for index, blocks in groupby(search.run()):
        entry = hops[-1].exit if hops else 0
        hops.append(Hop(peers[index], entry, entry + sum(1 for _ in blocks)))
    return Route(tuple(hops)), search.relaxations


def _servers(view: View, request: Request, now: float) -> list[list[PeerId]]:
    """For each block, the peers that may take it, in order of their ids."""
    servers: list[list[PeerId]] = [[] for _ in range(request.n_blocks)]
    forbids = request.constraints.forbids_block if request.constraints.any else None
    for record in view.alive(now, PeerState.SERVING):
        for block in range(record.span.start, min(record.span.end, request.n_blocks)):
            if forbids is None or not forbids(record, block, request.n_blocks):
                servers[block].append(record.peer_id)
    if request.prefer is not None and not all(servers):
        bare = {block for block, peers in enumerate(servers) if not peers}
        for record in view.alive(now, PeerState.DRAINING):
            if record.peer_id in request.prefer.peers:
                for block in bare.intersection(range(record.span.start, record.span.end)):
                    if forbids is None or not forbids(record, block, request.n_blocks):
                        servers[block].append(record.peer_id)
    return servers


def _is_valid(route: Route, servers: list[list[PeerId]]) -> bool:
    """May each peer of a route take each of its blocks, and are those all blocks?"""
    if not route.hops or route.hops[-1].exit != len(servers):
        return False
    return all(hop.peer_id in servers[block] for hop in route for block in range(hop.entry, hop.exit))


def _ranges(blocks: Iterable[int]) -> str:
    """`[3, 4, 5, 8]` as `3:6, 8:9`: spans as everywhere else."""
    spans: list[list[int]] = []
    for block in sorted(blocks):
        if spans and spans[-1][1] == block:
            spans[-1][1] += 1
        else:
            spans.append([block, block + 1])
    return ", ".join(f"{start}:{end}" for start, end in spans)
