"""A swarm on virtual time, under the real routing code: views, costs, candidates, plans, moves, health, placement.

The simulator owns what the code decides about: machines, links, churn, and clients that want text. `scenario.py` says
what happens, `peer.py` and `world.py` hold peers and the directory, `client.py` what a client knows, `generation.py`
the life of one answer, `queueing.py` and `delays.py` how long things take, `report.py` what came of it, `run.py` puts
them together. No clock and no randomness of its own: the same seed gives the same report.
"""

from routing.simulation.report import Planning, Report
from routing.simulation.run import planning_growth, simulate
from routing.simulation.scenario import Fault, Scenario

__all__ = ["Fault", "Planning", "Report", "Scenario", "planning_growth", "simulate"]
