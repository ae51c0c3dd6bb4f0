"""Why a route and no other: the chain, the runner-up, each term of both, and who was left out and why.

Owns the comparison. What a route costs is in `planner.py`; how it looks in a terminal or a notebook, in
`swarm/render.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from routing.cost import Costs
from routing.errors import NoRoute
from routing.planner import Plan, plan, route_cost
from routing.request import Request, edges
from routing.types import Hop, PeerId, PeerState, Route
from routing.view import View

NAMED = 3  # of those that a constraint leaves out


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`chosen`: the route in use, or the one that would be taken. `runner_up`: the best one that does without one of
    its peers; None: there is none. `left_out`: peers that neither takes, and why. `estimated`: hops of either whose
    way from the hop before, or back, nobody measured. `forbidden`: whom the session does not allow at all, by the name
    of the constraint."""

    chosen: Plan
    runner_up: Plan | None
    left_out: Mapping[PeerId, str] = field(default_factory=dict)
    estimated: frozenset[Hop] = frozenset()
    forbidden: Mapping[str, tuple[PeerId, ...]] = field(default_factory=dict)

    @property
    def forbidden_lines(self) -> list[str]:
        """How many each constraint leaves out, and a few of them."""
        lines = []
        for name, peers in self.forbidden.items():
            few = ", ".join(peer_id[-6:] for peer_id in peers[:NAMED]) + (", ..." if len(peers) > NAMED else "")
            lines.append(f"left out by {name}: {len(peers)} peer{'s' if len(peers) > 1 else ''} ({few})")
        return lines

    def __str__(self) -> str:
        lines = [self.chosen.explain()]
        if self.runner_up is None:
            lines.append("no other route: each of its peers is needed")
        else:
            more_s = self.runner_up.cost_s - self.chosen.cost_s
            comparison = f"{abs(more_s) * 1e3:.1f} ms {'more' if more_s >= 0 else 'less'}"
            lines += [f"runner-up, {comparison}:", self.runner_up.explain()]
        lines += [f"left out: {peer_id[-6:]}, {why}" for peer_id, why in sorted(self.left_out.items())]
        return "\n".join(lines + self.forbidden_lines)


def explain(
    view: View,
    costs: Costs,
    request: Request,
    now: float,
    *,
    route: Route | None = None,
    without: Mapping[PeerId, str] | None = None,
    avoided: Mapping[PeerId, str] | None = None,
    swarm: View | None = None,
) -> Explanation:
    """`route`: the one in use, priced as it is now; None: the one that a plan finds. `without`: peers that are never to
    be used, and why; `avoided`: the reasons for `avoid_peers` of the request. `swarm`: all peers, where `view` has only
    those that a plan needs to look at. Raises NoRoute."""
    without = without or {}
    allowed = View({peer: record for peer, record in view.records.items() if peer not in without}, view.n_blocks)
    chosen = plan(allowed, costs, request, now) if route is None else route_cost(route, view, costs, request)
    runner_up: Plan | None = None
    for peer_id in sorted(chosen.route.peers):
        others = {peer: record for peer, record in allowed.records.items() if peer != peer_id}
        try:
            found = plan(View(others, view.n_blocks), costs, request, now)
        except NoRoute:
            continue
        if runner_up is None or found.rank < runner_up.rank:
            runner_up = found
    shown = [found.route for found in (chosen, runner_up) if found is not None]
    used = frozenset().union(*(each.peers for each in shown))
    reasons = {**(avoided or {}), **without}
    for record in view.records.values():
        if record.expires_at < now:
            reasons.setdefault(record.peer_id, "its record has expired")
        elif record.state is not PeerState.SERVING:
            reasons.setdefault(record.peer_id, f"it is {record.state.name.lower()}")
    return Explanation(
        chosen=chosen,
        runner_up=runner_up,
        left_out={peer: why for peer, why in reasons.items() if peer not in used},
        estimated=frozenset().union(*(_estimated(each, costs) for each in shown)),
        forbidden=request.constraints.left_out((swarm or view).alive(now)),
    )


def _estimated(route: Route, costs: Costs) -> set[Hop]:
    ways = list(edges(route))
    hops = {hop for hop, way in zip(route, ways[:-1], strict=True) if not costs.measured(*way)}
    return hops if costs.measured(*ways[-1]) else hops | {route[-1]}
