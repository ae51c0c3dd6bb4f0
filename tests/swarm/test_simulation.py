"""Simulations from the command line and in a notebook: files, settings, JSON, exit codes, the drawings."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from routing.errors import BadInput
from routing.simulation import Planning, Report
from swarm import plots, simulation
from swarm.commands import simulate as command
from swarm.simulation_tables import simulation_tables, sparkline
from swarm.terminal import Console

QUICK = ("seconds=30", "peers=20", "clients=4", "start_within_s=2", "faults=[]")


@pytest.fixture(scope="module")
def report() -> Report:
    return simulation.run(simulation.load("small", QUICK))


def text(report: Report, width: int = 80) -> str:
    console = RichConsole(width=width, record=True, file=io.StringIO())
    console.print(simulation_tables(report))
    return console.export_text()


def test_a_scenario_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('about = "x"\npeers = 3\n[[faults]]\nat_s = 1\nkind = "kill"\n')
    scenario = simulation.load(str(path), ["clients=7", "standby=warm", "capacity=[2, 3]"], seed=9)
    assert (scenario.name, scenario.peers, scenario.clients, scenario.seed) == ("mine", 3, 7, 9)
    assert scenario.standby == "warm" and scenario.capacity == (2, 3) and scenario.faults[0].kind == "kill"
    path.write_bytes(b"peers = ")
    with pytest.raises(BadInput, match="is not TOML"):
        simulation.load(str(path))
    path.write_bytes(b"\xff")
    with pytest.raises(BadInput, match="UTF-8"):
        simulation.load(str(path))


def test_what_is_told(report: Report) -> None:
    told = text(report)
    assert "small, seed 1: 20 peers, 4 clients, 30 s" in told and "No answer failed" in told
    assert all(len(line) <= 80 for line in told.splitlines())
    grown = replace(report, growth=(Planning(peers=100, plans=9, candidates=20, relaxations=300.0),))
    assert "moves tried" in text(grown) and "100" in text(grown)
    assert "2 answers failed while" in text(replace(report, failed_while_covered=2))


def test_json_and_exit_codes(report: Report, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    console = Console(as_json=True)
    assert command.simulate(console, "small", QUICK, 1, growth=False) == 0
    facts = json.loads(capsys.readouterr().out)
    same = ("started", "tokens", "rates", "stall_s", "moves")
    assert [facts[name] for name in same] == [json.loads(json.dumps(report.facts()))[name] for name in same]
    assert facts["planning"]["ms_p50"] > 0 and facts["took_s"] > 0
    monkeypatch.setattr(command, "run", lambda *_, **__: replace(report, failed_while_covered=1))
    assert command.simulate(console, "small", QUICK, 1, growth=False) == 1
    capsys.readouterr()
    command.show_scenarios(console)
    assert "churn" in [each["name"] for each in json.loads(capsys.readouterr().out)["scenarios"]]


def test_a_sparkline_is_as_high_as_its_values() -> None:
    assert sparkline([0, 1, 4, 8]) == " ▂▅█" and sparkline([0, 0]) == "  " and sparkline([]) == ""


def test_the_picture_says_what_the_report_says(report: Report) -> None:
    above, below = plots.simulation(report).axes
    heights = [bar.get_height() for bar in above.patches]
    assert heights == pytest.approx(list(report.tokens_over_time))
    assert [bar.get_height() for bar in below.patches] == pytest.approx([1e3 * s for s in report.stalls_over_time])
    assert f"{report.tokens_per_s:,.1f} tokens/s" in above.get_title("left")
    with pytest.raises(BadInput, match="no token"):
        plots.simulation(replace(report, tokens_over_time=(0.0,) * 60))
