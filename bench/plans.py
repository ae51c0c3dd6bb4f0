"""Owns the figures of planning at scale: ten thousand peers, eighty blocks, against the exact optimum."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from statistics import median

from bench.figures import Figure
from bench.setting import Setting
from routing.candidates import Candidates
from routing.planner import Plan, Request, plan
from routing.types import PeerRecord
from routing.view import RecordsSeen, View, apply
from tests.routing.crowd import crowd

PEERS, BLOCKS = 10_000, 80
REPEATS = 15


def plans(setting: Setting) -> list[Figure]:
    """A swarm a round: regions on a sphere, unlike machines and spans, everybody's coordinates known."""
    plan_ms, again_ms, ratios = [], [], []
    request = Request(n_blocks=BLOCKS, row_bytes=2304)
    for seed in range(setting.rounds):
        view, costs = crowd(PEERS, BLOCKS, seed)
        candidates = Candidates(BLOCKS, costs, row_bytes=request.row_bytes)
        candidates.short_view(view, 0.0, request)  # as a client has it before the first prompt

        def once(seen: View, request: Request = request, candidates=candidates, costs=costs) -> Plan:
            return plan(candidates.short_view(seen, 0.0, request), costs, request, 0.0)

        found = once(view)
        plan_ms.append(median(_ms(lambda view=view: once(view)) for _ in range(REPEATS)))
        changed, times = view, []
        route = found.route
        moving = replace(request, prefer=route)
        for turn in range(REPEATS):
            record: PeerRecord = changed.records[route[turn % len(route)].peer_id]
            new = replace(record, sequence=record.sequence + 1, queue_s=0.01 * turn)
            changed = apply(changed, RecordsSeen([new]))
            times.append(_ms(lambda changed=changed, moving=moving: once(changed, moving)))
        again_ms.append(median(times))
        ratios.append(found.cost_s / plan(view, costs, request, 0.0).cost_s)
    words = f"{PEERS:,} peers, {BLOCKS} blocks"
    return [
        Figure.of_median(f"{words}: a plan", "ms", plan_ms, f"median of {REPEATS} a swarm"),
        Figure.of_median(f"{words}: a plan after one record changed", "ms", again_ms, f"median of {REPEATS} a swarm"),
        Figure.of_median(f"{words}: its cost over the exact optimum", "", ratios, "every pair of peers searched"),
        Figure.of_median(f"{words}: memory of the view, the costs and the candidates", "MB", [_memory_mb(request)]),
    ]


def _ms(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


def _memory_mb(request: Request) -> float:
    tracemalloc.start()
    try:
        view, costs = crowd(PEERS, BLOCKS, 0)
        candidates = Candidates(BLOCKS, costs)
        for tokens in (1, 32, 512):  # all kinds of request
            candidates.short_view(view, 0.0, replace(request, tokens=tokens))
        return tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
