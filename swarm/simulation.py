"""Scenarios from files, and a simulation run from here: with this machine's clock, and random generators of a seed.

Owns the files' names and how they are read. What a scenario may say is in `routing/simulation/scenario.py`, what it
comes to in `report.py` beside it. Needs no swarm, no model and no network.
"""

from __future__ import annotations

import gc
import random
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

from routing.errors import BadInput
from routing.simulation import Report, Scenario, simulate
from routing.simulation.chance import Streams
from swarm.progress import Progress, silent

SCENARIOS = resources.files("swarm") / "scenarios"


def names() -> list[str]:
    """The scenarios that come along."""
    return sorted(entry.name.removesuffix(".toml") for entry in SCENARIOS.iterdir() if entry.name.endswith(".toml"))


def load(name: str, settings: Iterable[str] = (), seed: int | None = None) -> Scenario:
    """One of `names()`, or a TOML file. `settings` are "key=value" with values as in TOML; a text needs no quotes.
    Raises BadInput, which names what is wrong."""
    facts = _read(name)
    facts.setdefault("name", Path(name).stem)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip().isidentifier():
            raise BadInput(f"{setting!r} is not key=value; write for example --set peers=200")
        facts[key.strip()] = _value(value.strip())
    if seed is not None:
        facts["seed"] = seed
    return Scenario.of(facts)


def run(scenario: Scenario | str, *, growth: Sequence[int] = (), progress: Progress = silent) -> Report:
    """A report. `growth`: numbers of peers, to measure what plans cost among so many. Raises BadInput."""
    if isinstance(scenario, str):
        scenario = load(scenario)
    seconds = scenario.seconds
    with _no_collections():
        return simulate(
            scenario,
            streams(scenario),
            clock=time.perf_counter,
            watch=lambda passed: progress("simulating", round(passed), round(seconds)),
            growth=growth,
        )


def streams(scenario: Scenario) -> Streams:
    return lambda stream: random.Random(f"{scenario.seed}:{stream}")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Millions of small objects that live to the end, looked through again and again, are a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        if name in names():
            text = (SCENARIOS / f"{name}.toml").read_text(encoding="utf-8")
        elif path.suffix == ".toml":
            text = path.read_text(encoding="utf-8")
        else:
            raise BadInput(f"no scenario {name}; there are {', '.join(names())}, or give a file that ends in .toml")
    except OSError as error:
        raise BadInput(f"cannot read {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{name} is not a text in UTF-8") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{name} is not TOML: {error}") from error


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
