"""Owns the figures of placement: against the best there is, among many unlike peers, after a loss, and how quick."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from bench.figures import Figure
from bench.setting import Setting
from routing.placement import best_span, better_span, moved, throughput
from routing.simulation import Scenario
from routing.simulation.agenda import Agenda
from routing.simulation.report import Tally
from routing.simulation.world import World
from routing.types import PeerRecord, Span
from routing.view import View
from swarm import simulation

SWARMS = 500
PEERS, BLOCKS = 1000, 80
CAPACITIES = (4, 8, 8, 12)
RATE, SPREAD = 5.0, 0.5  # of a machine's rate, lognormal: the mean and the deviation of its logarithm
TIMED = 50
# As in the bound, a pass takes as long as its steps one by one. Each client reads one answer, which does not end. To
# load a thousand peers it takes thousands of clients, and those ten minutes of computing.
SATURATED = Scenario(
    name="saturated", n_blocks=24, peers=100, capacity=CAPACITIES, block_s=math.exp(-RATE), speed_spread=SPREAD,
    slope=1.0, clients=400, answers=1, start_within_s=10.0, prompt_tokens=1, prompt_spread=0.0,
    answer_tokens=1_000_000, answer_spread=0.0, standby="none", look_s=10.0, seconds=90.0,
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    capacity: int
    rate: float  # blocks of one token a second


def placement(setting: Setting) -> list[Figure]:
    tight = [_small(random.Random(seed), most=3) for seed in range(SWARMS)]
    roomy = [_small(random.Random(seed), most=5) for seed in range(SWARMS)]
    rounds = range(setting.rounds)
    crowds = [_crowd(random.Random(seed), PEERS) for seed in rounds]
    lost = [_after_loss(random.Random(seed), crowd) for seed, crowd in enumerate(crowds)]
    choice_ms = {size: [_choice_ms(random.Random(seed), size) for seed in rounds] for size in (1000, 10_000)}
    words = f"{SWARMS} small swarms, one peer after the other, then moves: throughput over the best placement's"
    return [
        _of_mean(f"{words}, 1 to 5 blocks a peer: mean", roomy, f"of every placement; worst {min(roomy):.2f}"),
        _of_mean(f"{words}, 1 to 3 blocks a peer: mean", tight, f"of every placement; worst {min(tight):.2f}"),
        Figure.of_median(
            f"{PEERS:,} unlike peers one after the other: throughput over all rates through all blocks", "",
            [_share(crowd) for crowd in crowds], f"{BLOCKS} blocks; the bound that no placement passes",
        ),
        Figure.of_median(
            "and after half of those at a third of the blocks were lost, and moves", "", lost, "of what is left"
        ),
        Figure.of_median(
            f"{SATURATED.peers} unlike peers, {SATURATED.clients} clients simulated: tokens/s over the bound", "",
            [_saturated(0)], f"{SATURATED.n_blocks} blocks; its queues may give a tenth too much",
        ),
        *(
            Figure.of_median(f"{size:,} peers, {BLOCKS} blocks: a newcomer's choice", "ms", times)
            for size, times in choice_ms.items()
        ),
    ]  # fmt: skip


def _of_mean(figure: str, runs: list[float], note: str) -> Figure:
    return Figure(figure=figure, value=mean(runs), unit="", runs=tuple(runs), note=note)


def _record(number: int, span: Span, rate: float) -> PeerRecord:
    return PeerRecord(peer_id=f"{number:05}", span=span, decode_s=1 / rate, expires_at=1.0)


def _joined(view: View, number: int, machine: Machine) -> View:
    span = best_span(view, view.n_blocks, machine.capacity, 0.0, decode_s=1 / machine.rate)
    record = _record(number, span, machine.rate)
    return View({**view.records, record.peer_id: record}, view.n_blocks)


def _until_nobody_moves(view: View, capacities: dict[str, int]) -> View:
    """One at a time, each for a proven gain."""
    while True:
        before = view
        for peer, capacity in capacities.items():
            if move := better_span(view, peer, capacity, 0.0):
                view = moved(view, {peer: move.span})
        if view is before:
            return view


def _small(rng: random.Random, most: int) -> float:
    """Of a swarm that can cover its blocks."""
    n_blocks, machines = 1, list[Machine]()
    while sum(machine.capacity for machine in machines) < n_blocks:
        n_blocks = rng.randint(4, 8)
        machines = [
            Machine(rng.randint(1, min(n_blocks, most)), rng.lognormvariate(0, 0.7)) for _ in range(rng.randint(3, 6))
        ]
    view = View({}, n_blocks)
    for number, machine in enumerate(machines):
        view = _joined(view, number, machine)
    view = _until_nobody_moves(view, {f"{number:05}": each.capacity for number, each in enumerate(machines)})
    return throughput(view, 0.0) / _best(n_blocks, machines)


def _best(n_blocks: int, machines: list[Machine]) -> float:
    """Over all placements. How strong each set of blocks is, for all placements of one machine more at a time."""
    sets = np.arange(1, 1 << n_blocks)
    rates = np.zeros((1, len(sets)))
    for machine in machines:
        windows = np.array([((1 << machine.capacity) - 1) << start for start in range(n_blocks - machine.capacity + 1)])
        given = machine.rate * ((sets & windows[:, None]) != 0)
        rates = (rates[:, None] + given).reshape(-1, len(sets))
    sizes = np.array([int(each).bit_count() for each in sets])
    return float((rates / sizes).min(axis=1).max())


def _crowd(rng: random.Random, peers: int) -> View:
    view = View({}, BLOCKS)
    for number in range(peers):
        view = _joined(view, number, Machine(rng.choice(CAPACITIES), rng.lognormvariate(RATE, SPREAD)))
    return view


def _share(view: View) -> float:
    return throughput(view, 0.0) * view.n_blocks / sum(1 / record.decode_s for record in view.records.values())


def _saturated(seed: int) -> float:
    """Tokens a second of all clients in the second half of the time, over the bound."""
    scenario = SATURATED.but(seed=seed)
    given = simulation.run(scenario).tokens_over_time
    streams = simulation.streams(scenario)
    world = World(scenario, Agenda(), streams, Tally(scenario.seconds))
    world.start()  # the same machines
    bound = sum(1 / peer.block_s for peer in world.peers) / scenario.n_blocks
    return mean(given[len(given) // 2 :]) / bound


def _after_loss(rng: random.Random, view: View) -> float:
    third = view.n_blocks // 3
    left = {
        peer: record for peer, record in view.records.items() if record.span.start > third or rng.random() < 0.5
    }
    view = View(left, view.n_blocks)
    return _share(_until_nobody_moves(view, {peer: len(record.span) for peer, record in left.items()}))


def _choice_ms(rng: random.Random, peers: int) -> float:
    records = {}
    for number in range(peers):
        start = rng.randrange(BLOCKS - 7)
        record = _record(number, Span(start, start + 8), rng.lognormvariate(RATE, SPREAD))
        records[record.peer_id] = record
    view, times = View(records, BLOCKS), []
    for _ in range(TIMED):
        begun = time.perf_counter()
        best_span(view, BLOCKS, rng.choice(CAPACITIES), 0.0, decode_s=0.01)
        times.append(1e3 * (time.perf_counter() - begun))
    return median(times)
