"""A peer that measures its ways to a few others when it begins: whom, for how long, and what it knows then."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from peer import surroundings
from peer.surroundings import EVERY_S, JITTER, PINGS, SOON_S, Surroundings
from routing.coordinates import DIMENSIONS, Coordinate, Vivaldi
from routing.cost import CostSettings
from routing.errors import TimedOut, Unreachable
from routing.neighbours import MOST
from routing.types import PeerRecord, Span
from swarm.identity import Identity
from swarm.link import Heartbeat
from tests.routing.test_coordinates import matrix
from tests.swarm.test_transport import Record, endpoint

N_BLOCKS = 12


class Network:
    """Hosts that are as far apart as `rtt_s(a, b)` says, each with its coordinate. Nothing takes any time."""

    def __init__(self, rtt_s: Callable[[int, int], float], rng: Random):
        self.rtt_s, self.rng = rtt_s, rng
        self.ends: dict[int, End] = {}

    async def refresh(self) -> list[PeerRecord]:
        return [end.record for end in self.ends.values()]


class End:
    """An endpoint as `Surroundings` sees it."""

    def __init__(self, network: Network, number: int, span: str = "0:12"):
        self.network, self.number, self.peer_id, self.span = network, number, f"{number:03}", Span.parse(span)
        self.coordinates = Vivaldi()
        self.links: dict[str, Way] = {}
        self.dialled: list[str] = []
        self.closed = 0
        network.ends[number] = self

    @property
    def record(self) -> PeerRecord:
        place = self.coordinates.coordinate
        return PeerRecord(
            peer_id=self.peer_id, span=self.span, expires_at=100.0, place=place if place.known else None
        )

    def link(self, peer_id: str) -> Way | None:
        return self.links.get(peer_id)

    async def connect(self, peer_id: str, addresses: Sequence[str], timeout_s: float) -> Way:
        if peer_id not in self.links:
            self.dialled.append(peer_id)
            other = self.network.ends[int(peer_id)]
            if math.isinf(self.network.rtt_s(self.number, other.number)):
                raise Unreachable("nobody there")
            self.links[peer_id] = Way(self, other)
        return self.links[peer_id]


class Way:
    def __init__(self, here: End, there: End):
        self.here, self.there, self.pings, self.watched = here, there, 0, False
        self.used = False
        self._least_s = math.inf

    async def ping(self, timeout_s: float) -> float:
        self.pings += 1
        rng, network = self.here.network.rng, self.here.network
        rtt_s = network.rtt_s(self.here.number, self.there.number) * rng.lognormvariate(0, 0.05)
        if rtt_s > timeout_s:
            raise TimedOut("no answer")
        self._least_s = min(self._least_s, rtt_s)
        away = tuple(rng.gauss(0, 1) for _ in range(DIMENSIONS))
        self.here.coordinates.observe(self.there.coordinates.coordinate, self._least_s, away)
        return rtt_s

    async def close(self) -> None:
        self.here.closed += 1
        del self.here.links[self.there.peer_id]


class Passes:
    """Time passes at once; a test is over when it is `until`."""

    def __init__(self, until: float = math.inf):
        self.now, self.until, self.pauses = 0.0, until, list[float]()

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)
        if self.now > self.until:
            raise asyncio.CancelledError


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    passes = Passes()
    monkeypatch.setattr(surroundings.asyncio, "sleep", passes.sleep)
    return passes


def of(end: End, tell: Callable[[], None] = lambda: None, seed: int = 1) -> Surroundings:
    return Surroundings(end, end.network, N_BLOCKS, lambda: end.span, lambda: 0.0, tell, Random(seed))  # type: ignore[arg-type]


def alike(rtt_s: float = 0.05) -> Network:
    return Network(lambda a, b: rtt_s, Random(1))


async def test_each_of_a_few_is_pinged_some_times_and_the_links_are_closed_at_the_next_look(passes: Passes) -> None:
    network = alike()
    for number in range(20):
        End(network, number)
    end = End(network, 20)
    ways = of(end)
    await ways.look()
    assert len(end.dialled) == len(end.links) == MOST and end.closed == 0, "the other end may have begun to use it"
    assert len(passes.pauses) == MOST * PINGS
    await ways.look()
    assert len(passes.pauses) == MOST * (PINGS + 1), "later one of each"
    assert end.closed == len(end.links) == MOST


async def test_a_link_that_was_there_or_that_a_session_uses_stays(passes: Passes) -> None:
    network = alike()
    for number in range(4):
        End(network, number)
    end = End(network, 4)
    was = await end.connect("000", (), 1.0)
    connect = end.connect

    async def and_a_session_comes(peer_id: str, addresses: Sequence[str], timeout_s: float) -> Way:
        way = await connect(peer_id, addresses, timeout_s)
        way.watched, way.used = peer_id == "001", peer_id == "002"
        return way

    end.connect = and_a_session_comes  # type: ignore[method-assign]
    ways = of(end)
    await ways.look()
    assert was.pings == PINGS and len(end.links) == 4
    await ways._close_unused()
    assert end.links.keys() == {"000", "001", "002"} and end.closed == 1


async def test_who_cannot_be_reached_or_does_not_answer_is_no_error(passes: Passes, caplog) -> None:
    network = Network(lambda a, b: (math.inf, 60.0, 0.05)[min(a, b)], Random(1))
    for number in range(3):
        End(network, number)
    end = End(network, 3)
    ways = of(end)
    with caplog.at_level(logging.INFO):
        await ways.look()
        await ways._close_unused()
    assert not end.links and end.closed == 2
    assert "nobody there" in caplog.text and "no answer" in caplog.text


async def test_a_look_takes_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "LOOK_S", 0.01)
    network = alike()
    End(network, 0)
    end, forever = End(network, 1), asyncio.Event()

    async def ping(self: Way, timeout_s: float) -> float:
        await forever.wait()
        return 0.0

    monkeypatch.setattr(Way, "ping", ping)
    ways = of(end)
    await ways.look()
    await ways._close_unused()
    assert end.closed == 1 and not end.links


async def test_it_looks_less_and_less_often_and_tells_once_it_knows(passes: Passes) -> None:
    network, told, looks = alike(), list[float](), list[float]()
    end, passes.until = End(network, 0), 20_000.0

    async def refresh() -> list[PeerRecord]:
        looks.append(passes.now)
        if len(looks) == 3:
            raise Unreachable("the directory cannot be read")
        if len(looks) == 6:
            for number in range(1, 5):
                End(network, number)
        return [each.record for each in network.ends.values()]

    network.refresh = refresh  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await of(end, lambda: told.append(passes.now)).run()
    assert looks[0] <= JITTER[1] * SOON_S and len([at for at in looks if at < 600.0]) in range(6, 12)
    assert len(told) == 1 and looks[5] < told[0] < looks[5] + 1.0
    assert all(JITTER[0] * EVERY_S <= b - a <= JITTER[1] * EVERY_S + 1.0 for a, b in pairwise(looks[-10:]))


async def test_a_short_exchange_tells_about_where_a_newcomer_is(passes: Passes) -> None:
    """Hosts join one after the other, and nobody ever opens a session. What the places say of ways that nobody measured
    is compared with what is believed without: the default. One that comes to many that know where they are knows it
    after its first look; those that come to few, when they have looked again."""
    rng = Random(2)
    rtts = matrix(rng)
    network, met = Network(lambda a, b: rtts[a][b], rng), set[frozenset[int]]()
    others, newcomers = range(50), range(50, 80)

    def off(ours: Iterable[int], theirs: Iterable[int]) -> float:
        """Relative, median."""
        pairs = [(a, b) for a in ours for b in theirs if a != b and frozenset((a, b)) not in met]
        place = {number: end.coordinates.coordinate for number, end in network.ends.items()}
        return median(abs(place[a].rtt_s(place[b]) / rtts[a][b] - 1) for a, b in pairs)

    ways: dict[int, Surroundings] = {}

    async def look(number: int) -> None:
        end = network.ends[number]
        if number not in ways:
            ways[number] = of(end, seed=number)
        await ways[number].look()
        met.update(frozenset((number, int(peer_id))) for peer_id in end.dialled)

    for number in others:
        End(network, number)
        await look(number)
    at_first = off(others, others)
    for _ in range(9):
        for number in others:
            await look(number)
    settled = off(others, others)
    for number in newcomers:
        End(network, number)
        await look(number)
    known = sum(network.ends[number].coordinates.coordinate.known for number in newcomers)
    guessed = median(abs(2 * CostSettings().link_s / rtts[a][b] - 1) for a in newcomers for b in others)
    new = off(newcomers, others)
    print(f"relative error: {at_first:.2f} at first, settled {settled:.2f}, newcomer {new:.2f}; default {guessed:.2f}")
    assert settled < 0.2 and new < 0.25 and new < 0.6 * guessed and known >= 0.8 * len(newcomers)


async def test_over_real_links_a_peer_measures_and_leaves_nothing_behind() -> None:
    here, there = (Identity.generate() for _ in range(2))
    record = Record()
    async with endpoint(here, Record()) as mine, endpoint(there, record, heartbeat=Heartbeat()) as other:
        address = await other.listen("127.0.0.1")
        other.coordinates = Vivaldi(Coordinate(place=(0.01, 0.0, 0.0), error=0.1))

        class Directory:
            async def refresh(self) -> list[PeerRecord]:
                return [PeerRecord(peer_id=there.peer_id, span=Span(0, 6), addresses=(address,), expires_at=100.0)]

        ways = Surroundings(mine, Directory(), N_BLOCKS, lambda: Span(6, 12), lambda: 0.0, lambda: None)
        await ways.look()
        assert len(mine.links) == 1 and not mine.links[0].used
        await ways._close_unused()
        assert mine.links == []
        await record.until(lambda: record.lost)
        assert other.links == [] and mine.coordinates.coordinate != Coordinate()
