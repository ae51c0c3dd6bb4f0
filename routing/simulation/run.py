"""A scenario from its beginning to its end, and what planning costs as a swarm grows.

Owns the order of things: peers first, then clients, then time. Has no clock of its own: `clock`, if given, measures
plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from routing.candidates import Candidates
from routing.cost import CLIENT, Costs, CostSettings
from routing.errors import NoRoute
from routing.planner import plan
from routing.request import Request
from routing.simulation.agenda import Agenda
from routing.simulation.chance import Chance, Streams
from routing.simulation.client import Client
from routing.simulation.generation import Generation
from routing.simulation.report import Planning, Report, Tally
from routing.simulation.scenario import Scenario
from routing.simulation.world import World
from routing.types import PeerId, PeerRecord, Span
from routing.view import View

GROWTH = (100, 300, 1000, 3000, 10_000)
PLANS = 9  # of each size
PARTS = 100  # of the time, for who watches

Watch = Callable[[float], None]


def simulate(
    scenario: Scenario,
    streams: Streams,
    *,
    clock: Callable[[], float] | None = None,
    watch: Watch | None = None,
    growth: Sequence[int] = (),
) -> Report:
    """What happens. `streams(name)` makes a generator that depends on the scenario's seed and the name alone. `watch`
    is told the seconds that have passed. `growth`: numbers of peers for `planning_growth`."""
    agenda, tally = Agenda(), Tally(scenario.seconds)
    world = World(scenario, agenda, streams, tally)
    world.start()
    tally.begins(min(world.serving))
    clients = [
        _Questions(Client(number, world, streams(f"client {number}"), clock), streams(f"questions {number}"))
        for number in range(scenario.clients)
    ]
    for client in clients:
        client.begin()
    for part in range(1, PARTS + 1):
        agenda.run(scenario.seconds * part / PARTS)
        if watch is not None:
            watch(agenda.now)
    for client in clients:
        client.end()
    work = [
        peer.work / (scenario.seconds - peer.served_since)
        for peer in world.peers
        if peer.alive and scenario.seconds - peer.served_since > scenario.seconds / 10
    ]
    grown = planning_growth(scenario, growth, streams, clock=clock) if growth else ()
    return tally.report(
        scenario.name, scenario.seed, scenario.peers, [each.rate for each in clients], work, grown
    )


class _Questions:
    """A client's: when it asks, how long the prompt and the answer are."""

    def __init__(self, client: Client, rng: Chance):
        self._client, self._rng, self._now = client, rng, client.world.agenda
        self._running: Generation | None = None

    @property
    def rate(self) -> float:
        return self._client.tokens / self._client.busy_s if self._client.busy_s else 0.0

    def begin(self) -> None:
        self._now.at(first_question_s(self._client.world.scenario, self._rng), self._ask)

    def end(self) -> None:
        """Of the simulation: what runs counts as far as it has come."""
        if self._running is not None:
            self._running.settle()
            self._client.busy_s += self._now.now - self._running.begun
            self._client.world.tally.had_gap(self._running.gap_s)

    def _ask(self) -> None:
        scenario = self._client.world.scenario
        self._client.world.tally.started += 1
        self._client.asked += 1
        prompt = _length(self._rng, scenario.prompt_tokens, scenario.prompt_spread, 1)
        answer = _length(self._rng, scenario.answer_tokens, scenario.answer_spread, 2)
        self._running = Generation(self._client, prompt, answer, self._answered)
        self._running.begin()

    def _answered(self) -> None:
        scenario = self._client.world.scenario
        self._running = None
        if not scenario.answers or self._client.asked < scenario.answers:
            pause_s = self._rng.expovariate(1 / scenario.think_s) if scenario.think_s else 0.0
            # At least a moment, so that giving up and asking again do not follow each other for ever.
            self._now.after(max(0.01, pause_s), self._ask)


def planning_growth(
    scenario: Scenario, sizes: Sequence[int], streams: Streams, *, clock: Callable[[], float] | None = None
) -> tuple[Planning, ...]:
    """What one client's plan costs among so many peers as the scenario has, spans at random: the change of a record and
    of a measurement between two plans is part of it. A size at which nobody serves some block is left out."""
    found = []
    for size in sizes:
        tally = Tally(scenario.seconds)
        try:
            _plan_some(scenario.but(peers=size), streams, tally, clock)
        except NoRoute:
            continue
        found.append(tally.planning(size))
    return tuple(found)


def _plan_some(scenario: Scenario, streams: Streams, tally: Tally, clock: Callable[[], float] | None) -> None:
    rng = streams(f"growth {scenario.peers}")
    world = World(scenario, Agenda(), streams, tally)
    costs = Costs(CostSettings(hop_s=scenario.hop_s))
    costs.place(CLIENT, world.place(rng)[1])
    records: dict[PeerId, PeerRecord] = {}
    for number in range(scenario.peers):
        length = min(scenario.n_blocks, rng.choice(scenario.capacity))
        start = rng.randrange(scenario.n_blocks - length + 1)
        block_s = rng.lognormvariate(math.log(scenario.block_s), scenario.speed_spread)
        peer_id = f"{number:05}"
        records[peer_id] = PeerRecord(
            peer_id=peer_id, span=Span(start, start + length), decode_s=block_s, expires_at=math.inf
        )
        costs.place(peer_id, world.place(rng)[1])
    view = View(records, scenario.n_blocks)
    request = Request(n_blocks=scenario.n_blocks)
    candidates = Candidates(scenario.n_blocks, costs)
    candidates.short_view(view, 0.0, request)  # the first time puts all in order
    for turn in range(PLANS):
        costs.advance(float(turn))
        costs.observe_rtt(CLIENT, rng.choice(list(records)), scenario.access_s)
        begun = clock() if clock else 0.0
        short = candidates.short_view(view, 0.0, request)
        route = plan(short, costs, request, 0.0)
        tally.planned(len(short.records), route.relaxations, clock() - begun if clock else None)


def first_question_s(scenario: Scenario, rng: Chance) -> float:
    """When a client asks for the first time. `rng`: its stream of questions."""
    return scenario.start_s + rng.uniform(0.0, scenario.start_within_s)


def _length(rng: Chance, median: int, spread: float, least: int) -> int:
    return max(least, round(rng.lognormvariate(math.log(median), spread)) if spread else median)
