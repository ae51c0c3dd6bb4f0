"""`swarm route`: the way that a token would take now, as someone here sees it, and why."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from routing.constraints import Constraints
from routing.cost import CLIENT, Costs, CostSettings
from routing.encoding import Encoding, Wire
from routing.errors import BadInput
from routing.explain import Explanation, explain
from routing.planner import Plan
from routing.request import Request
from routing.types import Hop, Objective
from routing.view import RecordsSeen, View, apply
from swarm.client import HOP_S
from swarm.codec import COMPUTE_DTYPES, lossless_codec, name_of
from swarm.joincode import JoinCode
from swarm.records import DTYPES
from swarm.render import HopTimes, explanation_tables, route_table
from swarm.status import Snapshot, look
from swarm.terminal import Console

EVERYBODY = Constraints()


async def route(console: Console, join: str, *, why: bool, constraints: Constraints, objective: Objective) -> None:
    """`why`: with the runner-up and who was left out. Raises NoRoute, JoinError and its kin, DaemonFailed, TimedOut."""
    code = JoinCode.parse(join)
    if constraints.exact not in (None, *DTYPES.values()):
        raise BadInput(f"dtype is one of {', '.join(DTYPES.values())}, not {constraints.exact!r}")
    with console.progress("joining the swarm") as progress:
        snapshot = await look(code, progress=progress)
    explanation = explained(snapshot, constraints, objective)
    console.say(f"{snapshot.about.model}: a token takes {explanation.chosen.cost_s * 1e3:.1f} ms from here")
    if why:
        console.show(explanation_tables(explanation))
    else:
        console.show(route_table([_times(explanation.chosen, index) for index in range(len(explanation.chosen.route))]))
    console.event(_facts(explanation))


def explained(
    snapshot: Snapshot, constraints: Constraints = EVERYBODY, objective: Objective = Objective.LATENCY
) -> Explanation:
    """Of what each peer says of its speed, and the round trips measured from here. How many bytes a row has is not
    known: transfers cost nothing. Nor is any bandwidth: hidden states go as they are. Raises NoRoute."""
    costs = Costs(CostSettings(hop_s=HOP_S))
    silent = {}
    for peer in snapshot.peers:
        if peer.rtt_s is None:
            silent[peer.record.peer_id] = "it does not answer"
        else:
            costs.observe_rtt(CLIENT, peer.record.peer_id, peer.rtt_s)
    n_blocks = snapshot.about.n_blocks
    view = apply(View({}, n_blocks), RecordsSeen([peer.record for peer in snapshot.peers]))
    exact = name_of(lossless_codec(COMPUTE_DTYPES[constraints.exact or "float32"]))
    wire = Wire(encodings=(Encoding(0, row_bytes=0, name=exact),), results=exact)
    request = Request(n_blocks=n_blocks, constraints=constraints, objective=objective, wire=wire)
    return explain(view, costs, request, 0.0, without=silent)


def _times(plan: Plan, index: int) -> HopTimes:
    term = plan.terms[index]
    parts = {"network_s": term.network_s, "queue_s": term.queue_s, "compute_s": term.compute_s}
    return HopTimes(hop=term.hop, **parts, wire_in=term.wire_in, wire_out=term.wire_out)


def _facts(explanation: Explanation) -> dict[str, Any]:
    """For JSON. Times in milliseconds."""
    runner_up = explanation.runner_up
    return {
        "route": _plan_facts(explanation.chosen, explanation.estimated),
        "runner_up": None if runner_up is None else _plan_facts(runner_up, explanation.estimated),
        "left_out": dict(explanation.left_out),
        "left_out_by": {name: list(peers) for name, peers in explanation.forbidden.items()},
    }


def _plan_facts(plan: Plan, estimated: frozenset[Hop]) -> dict[str, Any]:
    hops = []
    for term in plan.terms:
        times = {
            f"{name.removesuffix('_s')}_ms": round(value * 1e3, 3)
            for name, value in asdict(term).items() if name.endswith("_s")
        }  # fmt: skip
        blocks = f"{term.hop.entry}:{term.hop.exit}"
        wire = {"wire_in": term.wire_in or None, "wire_out": term.wire_out or None}
        facts = {"peer": term.hop.peer_id, "blocks": blocks, **times, **wire, "estimated": term.hop in estimated}
        hops.append(facts)
    return {
        "ms": round(plan.cost_s * 1e3, 3),
        "rows_per_s": round(plan.rows_per_s, 1) or None,
        "hops": hops,
    }
