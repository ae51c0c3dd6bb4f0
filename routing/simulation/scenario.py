"""What is simulated, as data: machines, links, how peers come and go, what clients want, and what breaks when.

Owns the names, the defaults and what makes sense. Reads no file: who calls it has a mapping, from TOML for example.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from routing.coordinates import DIMENSIONS
from routing.errors import BadInput
from routing.types import Span

LIFETIMES = ("exponential", "lognormal")
STANDBYS = ("none", "inputs", "warm")
KINDS = ("slow", "kill", "leave")
BUSIEST = "busiest"
MOST_PEERS, MOST_CLIENTS, LONGEST_S, MOST_BLOCKS = 20_000, 10_000, 7 * 86_400, 1000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At `at_s`, `peer` (its number in order of joining, or "busiest": the one with most sessions) becomes `factor`
    times slower, or is killed, or leaves in good order. Raises BadInput."""

    at_s: float
    kind: str
    peer: int | str = BUSIEST
    factor: float = 10.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"faults.kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        _number("faults.at_s", self.at_s, 0.0, LONGEST_S)
        _number("faults.factor", self.factor, 0.01, 1e4)
        if self.peer != BUSIEST and (not isinstance(self.peer, int) or isinstance(self.peer, bool) or self.peer < 0):
            raise BadInput(f'faults.peer is a number from 0 on, or "{BUSIEST}", not {self.peer!r}')


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Times in seconds. What is unlike among machines or answers is drawn from a lognormal distribution of the median
    given, where `..._spread` is the deviation of its logarithm: with 0 all are alike. Raises BadInput."""

    name: str = "scenario"
    about: str = ""
    seed: int = 1
    seconds: float = 600.0
    n_blocks: int = 24

    # Peers.
    peers: int = 50  # at the start, and about as many later: for those that go, others come
    capacity: tuple[int, ...] = (4, 8, 8, 12)  # blocks that a peer can hold, drawn evenly
    spans: tuple[str, ...] = ()  # of the first peers, in turn; empty: each takes what the swarm lacks most
    block_s: float = 0.004  # one token through one block, alone
    speed_spread: float = 0.5
    speeds: tuple[float, ...] = ()  # of the first peers, in turn: so many times as quick; empty: drawn
    prefill_share: float = 0.05  # of that: one token of a long chunk
    slope: float = 0.1  # of a pass's time: what one more session in it adds
    hop_s: float = 0.002  # of any hop, however few blocks it runs
    lifetime_s: float = 0.0  # median; 0: nobody goes
    lifetime: str = "exponential"
    lifetime_spread: float = 1.0  # if lognormal
    graceful: float = 0.5  # share of those that go which say so first
    silent: float = 0.2  # share of those that die whose host no longer answers at all
    load_s: float = 20.0  # from joining to serving
    announce_joining: bool = True  # while loading, so that others see it
    rebalance_s: float = 0.0  # a peer looks as often, about, whether it should serve other blocks; 0: never

    # Links. Regions lie on a sphere, unless places are given.
    places: tuple[tuple[float, float, float], ...] = ()  # of the clients, then of the peers in turn: round trips apart
    regions: int = 4
    region_rtt_s: float = 0.08  # round trip between two of them, about
    access_s: float = 0.004  # each end's own share of a round trip
    access_spread: float = 0.7
    bandwidth: float = 12.5e6  # bytes a second
    row_bytes: int = 4096  # of one token between two hops

    # The directory.
    renew_s: float = 15.0
    record_s: float = 60.0  # a record of a peer that died stays so long after it was renewed last
    record_delay_s: float = 1.0  # from announcing to being read

    # Clients.
    clients: int = 20
    start_s: float = 0.0  # nobody asks before
    start_within_s: float = 60.0  # the first questions come within so long
    think_s: float = 60.0  # mean, between an answer and the next question
    answers: int = 0  # of a client at most; 0: any number
    prompt_tokens: int = 100
    prompt_spread: float = 0.7
    answer_tokens: int = 150
    answer_spread: float = 0.5
    noise: float = 0.05  # of a step's time, relative: in what is measured, not in how long it takes on average
    refresh_s: float = 5.0  # a client's view of the swarm is renewed as often
    look_s: float = 2.0  # a session looks for a cheaper route as often; at once where a hop becomes slow
    probes: int = 64  # peers that a client is connected with beforehand
    coordinates: bool = True  # network coordinates of all are known, about; else only what was measured
    standby: str = "inputs"
    wait_s: float = 0.0  # for blocks that nobody serves
    recovery_s: float = 60.0  # a loss may hold up an answer so long
    connect_s: float = 5.0  # a dial to a host that does not answer
    silence_s: float = 2.0  # until a silent connection is given up

    faults: tuple[Fault, ...] = field(default=())

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _number(name, getattr(self, name), low, high)
        for name in _WHOLE:
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise BadInput(f"{name} is a whole number, not {getattr(self, name)!r}")
        for name, allowed in (("lifetime", LIFETIMES), ("standby", STANDBYS)):
            if getattr(self, name) not in allowed:
                raise BadInput(f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")
        for name in ("announce_joining", "coordinates"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(f"{name} is true or false, not {getattr(self, name)!r}")
        if not self.capacity or not all(isinstance(each, int) and each >= 1 for each in self.capacity):
            raise BadInput(f"capacity is a list of numbers of blocks, for example [4, 8], not {list(self.capacity)}")
        for text in self.spans:
            if not isinstance(text, str):
                raise BadInput(f'spans is a list of spans, for example ["0:12", "12:24"], not {list(self.spans)}')
            if Span.parse(text).end > self.n_blocks:
                raise BadInput(f"spans has {text}, but the model has {self.n_blocks} blocks (n_blocks)")
        for speed in self.speeds:
            _number("each of speeds", speed, 0.01, 100.0)
        if len(self.places) == 1:
            raise BadInput("places has the clients' and at least one peer's, not one alone")
        for place in self.places:
            if not isinstance(place, tuple) or len(place) != DIMENSIONS:
                raise BadInput(f"each of places has {DIMENSIONS} axes, for example [0.02, 0.0, 0.0], not {place!r}")
            for axis in place:
                _number("each axis of places", axis, -5.0, 5.0)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Scenario:
        """From names and values as a TOML file has them. Raises BadInput, naming what is wrong."""
        known = {each.name for each in fields(cls)}
        for name in facts:
            if name not in known:
                raise BadInput(f"a scenario has no {name}; it has {', '.join(sorted(known))}")
        given = dict(facts)
        for name in ("capacity", "spans", "speeds", "places"):
            if name in given:
                given[name] = tuple(_listed(name, given[name]))
        if "places" in given:
            given["places"] = tuple(tuple(_listed("each of places", place)) for place in given["places"])
        if "faults" in given:
            given["faults"] = tuple(_fault(each) for each in _listed("faults", given["faults"]))
        for each in fields(cls):  # TOML tells 60 from 60.0; here both are seconds
            if each.type == "float" and isinstance(given.get(each.name), int) and given[each.name] is not True:
                given[each.name] = float(given[each.name])
        for name in ("name", "about"):
            if not isinstance(given.get(name, ""), str):
                raise BadInput(f"{name} is a text, not {given[name]!r}")
        return cls(**given)

    def but(self, **changes: Any) -> Scenario:
        """The same with other values. Raises BadInput."""
        return replace(self, **changes)


def _fault(facts: Any) -> Fault:
    known = {each.name for each in fields(Fault)}
    if not isinstance(facts, Mapping) or not {"at_s", "kind"} <= facts.keys() <= known:
        raise BadInput(f"each of faults has at_s and kind, and may have peer and factor; not {facts!r}")
    return Fault(**facts)


def _listed(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise BadInput(f"{name} is a list, not {value!r}; write {name} = [...]")
    return value


def _number(name: str, value: Any, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise BadInput(f"{name} is a number from {low:g} to {high:g}, not {value!r}")


_WHOLE = (
    "seed", "n_blocks", "peers", "regions", "row_bytes", "clients", "answers", "prompt_tokens", "answer_tokens",
    "probes",
)  # fmt: skip
_DAY = 86_400.0
_RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63), "seconds": (0.1, LONGEST_S), "n_blocks": (1, MOST_BLOCKS), "peers": (1, MOST_PEERS),
    "block_s": (1e-6, 60), "speed_spread": (0, 3), "prefill_share": (1e-4, 1), "slope": (0, 1), "hop_s": (0, 60),
    "lifetime_s": (0, 1e9), "lifetime_spread": (0, 3), "graceful": (0, 1), "silent": (0, 1), "load_s": (0, _DAY),
    "rebalance_s": (0, _DAY),
    "regions": (1, 1000), "region_rtt_s": (0, 5), "access_s": (0, 5), "access_spread": (0, 3),
    "bandwidth": (1, 1e12), "row_bytes": (0, 2**24), "renew_s": (0.1, _DAY), "record_s": (0, _DAY),
    "record_delay_s": (0, _DAY), "clients": (1, MOST_CLIENTS), "start_s": (0, LONGEST_S),
    "start_within_s": (0, LONGEST_S), "think_s": (0, LONGEST_S), "answers": (0, 1e9), "prompt_tokens": (1, 1e6),
    "prompt_spread": (0, 3), "answer_tokens": (2, 1e6), "answer_spread": (0, 3), "noise": (0, 1),
    "refresh_s": (0.1, _DAY), "look_s": (0.25, _DAY), "probes": (0, MOST_PEERS), "wait_s": (0, _DAY),
    "recovery_s": (0.1, _DAY), "connect_s": (0, _DAY), "silence_s": (0, _DAY),
}  # fmt: skip
