"""Owns the figures of the simulator against the lab: the same scenarios as data, simulated and run for real.

In the lab (`tests/lab/`) peers and clients are processes on hosts apart from each other; sockets, sessions and routing
are the real ones. Peers compute a tiny model in truth, so that texts can be compared with the local ones, and sleep for
what is left of the time that the scenario gives a pass (`bench/paced.py`): what is compared is routing, the network,
queues and recovery, not this machine's arithmetic. What a hop takes beside its pass on this machine is measured first,
on a chain without distances, and told to the simulator as `hop_s`; nothing else is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import dist
from statistics import median
from typing import Any

from bench.children import Client, as_run
from bench.figures import Figure, Run, gaps_s, longest_gap_s
from bench.prompts import long_ids
from bench.setting import PacedSwarm, Setting
from routing.simulation import Fault, Scenario
from routing.simulation.report import percentile
from routing.simulation.run import first_question_s
from swarm import simulation
from tests.lab.lab import Lab

BLOCKS, SPANS = 6, ("0:3", "3:6", "0:3", "3:6")
CHAIN_S = 8.0
WITHIN_S = 0.25  # about a step: a fault comes at any moment of one
SEEDS = 21  # of simulations: what chance decides there, it decides anew in each round of the lab
APART = (
    (0.0, 0.0, 0.0), (0.03, 0.0, 0.0), (0.04, 0.02, 0.0), (0.0, 0.05, 0.0), (-0.02, 0.03, 0.0),
)  # fmt: skip
STEADY = Scenario(
    name="steady", about="Two clients, four peers unlike each other and unlike far.",
    n_blocks=BLOCKS, peers=len(SPANS), spans=SPANS, block_s=0.025, speed_spread=0.0, speeds=(1.0, 0.8, 0.7, 1.1),
    places=APART, access_s=0.0, row_bytes=256, noise=0.02, clients=2, answers=1, start_within_s=2.0, prompt_tokens=40,
    prompt_spread=0.0, answer_tokens=400, answer_spread=0.0, seconds=20.0,
)  # fmt: skip
SCENARIOS = (
    STEADY,
    STEADY.but(
        name="crowd", about="Six clients, two equal peers for each block.",
        speeds=(1.0,), clients=6, places=((0.0, 0.0, 0.0), *(((0.02, 0.0, 0.0),) * 4)),
    ),
    STEADY.but(
        name="loss", about="One client; the hop that is busiest is killed.",
        clients=1, start_within_s=WITHIN_S, faults=(Fault(at_s=8.0, kind="kill"),),
    ),
    STEADY.but(
        name="slow", about="One client; the hop that is busiest becomes ten times slower.",
        clients=1, start_within_s=WITHIN_S, faults=(Fault(at_s=8.0, kind="slow"),),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Tokens a second of all clients together over the scenario's time, and the longest gap of the median answer."""

    tokens_per_s: float
    gap_s: float


def simulated(setting: Setting) -> list[Figure]:
    """Four scenarios; of each, what the lab gave over what was simulated."""
    figures = []
    with setting.tiny(BLOCKS) as tiny:
        hop_s = hop_beside_its_pass_s(tiny)
        for scenario in (each.but(hop_s=hop_s) for each in SCENARIOS):
            expected = foreseen(scenario)
            seen, equal = [], []
            for turn in range(setting.rounds):
                runs, same = in_the_lab(tiny, scenario.but(seed=turn))
                seen.append(outcome_of(runs, scenario.seconds))
                equal += same
            note = f"{scenario.about} Equal to local: {sum(equal)} of {len(equal)}"
            for words, unit, key in (("tokens/s", "", "tokens_per_s"), ("longest gap", "s", "gap_s")):
                lab, virtual = [getattr(outcome, key) for outcome in seen], getattr(expected, key)
                words = f"simulator against the lab, {scenario.name}: {words}"
                figures += [
                    Figure.of_median(f"{words}, in the lab", unit, lab, note),
                    Figure.of_median(f"{words}, the lab over the simulator", "", [each / virtual for each in lab],
                                     f"simulated: {virtual:.3g} {unit}".strip()),
                ]  # fmt: skip
    return [*figures, Figure.of_median("a hop in the lab beside its pass, without distances", "ms", [1e3 * hop_s])]


def hop_beside_its_pass_s(setting: Setting) -> float:
    """Taking a step, packing it, handing it on: and a client's share of what it does between two steps."""
    chain = SPANS[:2]
    scenario = STEADY.but(
        peers=len(chain), spans=chain, clients=1, start_within_s=0.0, speeds=(1.0,), seconds=CHAIN_S,
        places=((0.0, 0.0, 0.0),) * (1 + len(chain)),
    )  # fmt: skip
    runs, _ = in_the_lab(setting, scenario)
    return max(0.0, median(gaps_s(runs[0])) - BLOCKS * scenario.block_s) / len(chain)


def foreseen(scenario: Scenario) -> Outcome:
    """The median of the simulator's."""
    reports = [simulation.run(scenario.but(seed=seed)) for seed in range(SEEDS)]
    return Outcome(
        tokens_per_s=median(report.tokens_per_s for report in reports),
        gap_s=median(report.gap_s[0] for report in reports),
    )


def in_the_lab(setting: Setting, scenario: Scenario) -> tuple[list[Run], list[bool]]:
    """One run with new processes: each answer up to the end of the scenario's time, and whether it is the local one."""
    prompts = [
        long_ids([setting.prompt(number)], scenario.prompt_tokens, number) for number in range(scenario.clients)
    ]
    with _swarm(setting, scenario) as swarm, ExitStack() as stack:
        clients = [stack.enter_context(setting.client(swarm)) for _ in prompts]
        for client in clients:
            client.wait_for_peers(scenario.peers)
        began, runs = _play(scenario, swarm, clients, prompts)
    equal = [
        setting.local.generate(prompt, len(run.ids)).ids == run.ids for prompt, run in zip(prompts, runs, strict=True)
    ]
    return [_up_to(began + scenario.seconds, run) for run in runs], equal


def _up_to(end: float, run: Run) -> Run:
    count = sum(at <= end for at in run.times)
    return Run(began=run.began, ids=run.ids[:count], times=run.times[:count])


def outcome_of(runs: Sequence[Run], seconds: float) -> Outcome:
    """The gap is the lower median, as in the simulator's report."""
    return Outcome(
        tokens_per_s=sum(len(run.ids) for run in runs) / seconds,
        gap_s=percentile([longest_gap_s(run) for run in runs], 50),
    )


def _play(
    scenario: Scenario, swarm: PacedSwarm, clients: Sequence[Client], prompts: Sequence[list[int]]
) -> tuple[float, list[Run]]:
    """When it began, and each client's answer."""
    began, streams = time.monotonic(), simulation.streams(scenario)
    asks = [first_question_s(scenario, streams(f"questions {number}")) for number in range(len(clients))]
    due: list[tuple[float, Fault | int]] = [(at_s, number) for number, at_s in enumerate(asks)]
    due += [(fault.at_s, fault) for fault in scenario.faults]
    routes: list[list[str]] = []  # as they were at each client's first token
    for at_s, what in sorted(due, key=lambda each: each[0]):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        if isinstance(what, Fault):
            routes = routes or [client.next()["route"] for client in clients]
            swarm.harm(what, routes)
        else:
            tell_at, most_s = 1 if scenario.faults else 0, scenario.seconds - at_s
            request = clients[what].request([prompts[what]], scenario.answer_tokens, tell_at=tell_at, most_s=most_s)
            clients[what].send(request)
    facts: list[dict[str, Any]] = [client.next()["runs"][0] for client in clients]
    return began, [as_run(each) for each in facts]


@contextmanager
def _swarm(setting: Setting, scenario: Scenario) -> Iterator[PacedSwarm]:
    with Lab(hosts=1 + scenario.peers) as lab:
        for a, b in combinations(range(1 + scenario.peers), 2):
            lab.link(1 + a, 1 + b, delay_ms=1e3 * dist(scenario.places[a], scenario.places[b]) / 2)
        with PacedSwarm(lab, setting.model, scenario) as swarm:
            yield swarm
