"""`swarm simulate`: a scenario on virtual time, told in figures and drawn."""

from __future__ import annotations

import time
from collections.abc import Sequence

from routing.simulation.run import GROWTH
from swarm.simulation import load, names, run
from swarm.simulation_tables import simulation_tables
from swarm.terminal import Console

FAILED = 1


def show_scenarios(console: Console) -> None:
    found = [load(name) for name in names()]
    for scenario in found:
        console.say(f"{scenario.name:<10}{scenario.about}")
    console.event({"scenarios": [{"name": each.name, "about": each.about} for each in found]})


def simulate(console: Console, name: str, settings: Sequence[str], seed: int | None, growth: bool) -> int:
    """The exit code: 0 unless an answer failed while every block had a peer. Raises BadInput."""
    scenario = load(name, settings, seed)
    begun = time.monotonic()
    with console.progress("peers join") as progress:
        report = run(scenario, growth=GROWTH if growth else (), progress=progress)
    took_s = time.monotonic() - begun
    console.show(simulation_tables(report))
    console.note(f"simulated in {took_s:.1f} s")
    console.event({**report.facts(), "took_s": round(took_s, 2)})
    return FAILED if report.failed_while_covered else 0
