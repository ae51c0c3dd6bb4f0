"""Owns the figures of planning: at scale, against the exact optimum, and with what a client can know."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from statistics import median

from bench.figures import Figure
from bench.setting import Setting
from routing.candidates import Candidates
from routing.coordinates import Coordinate
from routing.cost import CLIENT, Costs
from routing.encoding import Wire
from routing.moving import Mover
from routing.planner import Plan, plan, route_cost
from routing.request import Request
from routing.trials import Trials
from routing.types import PeerRecord, Span
from routing.view import RecordsSeen, View, apply
from swarm.codec import encodings
from swarm.frames import Codec
from swarm.trial import STEPS
from tests.routing.crowd import EXPIRES, crowd

PEERS, BLOCKS, HIDDEN = 10_000, 80, 576
REPEATS = 15
SWARMS, NOISE = 1000, 0.2


def plans(setting: Setting) -> list[Figure]:
    """A swarm a round: regions on a sphere, unlike machines and spans, everybody's coordinates known. Hidden states may
    go in whatever pays."""
    plan_ms, again_ms, ratios = [], [], []
    wire = Wire(encodings=encodings(Codec.FP32, HIDDEN))
    request = Request(n_blocks=BLOCKS, row_bytes=wire.encodings[0].row_bytes, wire=wire)
    for seed in range(setting.rounds):
        view, costs = crowd(PEERS, BLOCKS, seed)
        candidates = Candidates(BLOCKS, costs, row_bytes=request.row_bytes, wire=wire)
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


def guesses(setting: Setting) -> list[Figure]:
    """Small swarms whose links and speeds are other than anybody says. A client probes all peers every five seconds for
    a minute while a session runs, and tries who seems cheaper, every measurement noisy; what its route then truly
    costs, over the best there is."""
    ratios = [_after_a_minute(random.Random(seed)) for seed in range(SWARMS)]
    worst = sorted(ratios)[round(0.99 * SWARMS)]
    words = f"{SWARMS:,} small swarms, a minute of measuring with {100 * NOISE:g} % noise: true cost over the best's"
    return [
        Figure.of_median(f"{words}: median", "", ratios, f"99 of 100 below {worst:.3f}"),
        Figure.of_median(f"{words}: worst", "", [max(ratios)], f"99 of 100 below {worst:.3f}"),
    ]


def _after_a_minute(rng: random.Random) -> float:
    blocks = 8
    view, known = crowd(rng.randint(4, 8), blocks, rng.randrange(1 << 30), regions=3)
    covering = PeerRecord(peer_id="whole", span=Span(0, blocks), decode_s=0.01, expires_at=EXPIRES)
    view = apply(view, RecordsSeen([covering]))
    known.place("whole", Coordinate(height=0.05, error=0.1))
    ends, true = [CLIENT, *view.records], Costs()
    for a, b in combinations(ends, 2):  # coordinates are right but for what no coordinate can tell
        true.observe_rtt(a, b, 2 * known.link_s(a, b) * rng.lognormvariate(0, 0.15))
    true_block = {peer: record.decode_s * rng.lognormvariate(0, NOISE) for peer, record in view.records.items()}
    true_queue = {peer: record.queue_s * rng.lognormvariate(0, NOISE) for peer, record in view.records.items()}
    for peer in view.records:
        true.observe_decode(peer, true_block[peer])
        true.observe_queue(peer, true_queue[peer])
    request = Request(n_blocks=blocks)

    def noisy(seconds: float) -> float:
        return seconds * max(0.1, rng.gauss(1, NOISE))

    mover, trials, route, now, probe_at = Mover(rng), Trials(), None, 0.0, 0.0
    while now < 60:
        known.advance(now)
        if now >= probe_at:
            probe_at = now + 5
            for peer in view.records:
                known.observe_rtt(CLIENT, peer, noisy(2 * true.link_s(CLIENT, peer)))
        if route is None:
            route = plan(view, known, request, 0.0).route
        elif mover.is_due(now):
            using = replace(request, prefer=route)
            found = mover.look(
                now, lambda margin, using=using: plan(view, known, replace(using, hysteresis=margin), 0.0)
            )
            if found is not None:
                mover.moves(now)
                mover.rerouted()
                route = found.route
            elif hop := trials.choose(route, plan(view, known, replace(using, hysteresis=0), 0.0).route, now):
                peer = hop.peer_id
                block_s = median(noisy(true_block[peer]) for _ in range(STEPS))
                known.observe_decode(peer, block_s, view.records[peer].decode_s)
                known.observe_queue(peer, median(noisy(true_queue[peer]) for _ in range(STEPS)))
        step_s, before = 0.0, None
        for hop in route:
            block_s = noisy(true_block[hop.peer_id])
            known.observe_decode(hop.peer_id, block_s, view.records[hop.peer_id].decode_s)
            queue_s = noisy(true_queue[hop.peer_id])
            known.observe_queue(hop.peer_id, queue_s)
            step_s += queue_s + block_s * (hop.exit - hop.entry)
            if before is not None:
                rtt_s = noisy(2 * true.link_s(before, hop.peer_id))
                known.observe_rtt(before, hop.peer_id, rtt_s)
                step_s += rtt_s / 2
            before = hop.peer_id
        step_s += true.link_s(CLIENT, route[0].peer_id) + true.link_s(route[-1].peer_id, CLIENT)
        now += step_s
        mover.step(step_s, now)
    return route_cost(route, view, true, request).cost_s / plan(view, true, request, 0.0).cost_s


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
