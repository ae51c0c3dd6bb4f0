"""A running session's moves, on virtual time: soon away from a hop that has become slow, and never for noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from routing.cost import CLIENT, Costs
from routing.moving import LEAST_MARGIN, LOOK_S, Mover, Pace
from routing.planner import Plan, plan
from routing.request import Request
from routing.types import PeerRecord, Route, Span
from routing.view import View

BLOCKS, BLOCK_S, LINK_S = 10, 0.004, 0.01
PEERS = ("a", "b")


class Run:
    """A session on one of two equal peers; each step is measured, as a client does."""

    def __init__(self, seed: int, noise: float):
        self.rng, self.noise = random.Random(seed), noise
        self.mover, self.costs = Mover(random.Random(seed)), Costs()
        records = [PeerRecord(peer_id=p, span=Span(0, BLOCKS), decode_s=BLOCK_S, expires_at=1e9) for p in PEERS]
        self.view = View({record.peer_id: record for record in records}, BLOCKS)
        for peer in PEERS:
            self.costs.observe_rtt(CLIENT, peer, 2 * LINK_S)
        self.now = 0.0
        self.route: Route | None = None
        self.route = self.find(0.0).route
        self.moves: list[float] = []
        self.slow: dict[str, float] = {}  # times as long

    def find(self, margin: float) -> Plan:
        self.costs.advance(self.now)
        return plan(self.view, self.costs, Request(n_blocks=BLOCKS, prefer=self.route, hysteresis=margin), 0.0)

    def step(self) -> None:
        if self.mover.is_due(self.now):
            found = self.mover.look(self.now, self.find)
            if found is not None:
                self.mover.moves(self.now)
                self.mover.rerouted()
                self.moves.append(self.now)
                self.route = found.route
        (hop,) = self.route
        block_s = BLOCK_S * self.slow.get(hop.peer_id, 1.0) * max(0.1, self.rng.gauss(1, self.noise))
        seconds = BLOCKS * block_s + 2 * LINK_S
        self.now += seconds
        self.costs.advance(self.now)
        self.costs.observe_decode(hop.peer_id, block_s, BLOCK_S)
        self.mover.step(seconds, self.now)

    def until(self, done: Callable[[], bool], most: int = 1000) -> int:
        """Steps until then."""
        for count in range(most):
            if done():
                return count
            self.step()
        raise AssertionError(f"not within {most} steps")


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_ten_minutes_of_noise_move_nobody(noise: float) -> None:
    moves = 0
    for seed in range(5):
        run = Run(seed, noise)
        while run.now < 600:
            run.step()
        moves += len(run.moves)
    assert moves == 0


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_hop_that_becomes_ten_times_slower_is_left_within_eight_tokens(noise: float) -> None:
    counts = []
    for seed in range(20):
        run = Run(seed, noise)
        run.until(lambda run=run: run.now > 3.0)
        (hop,) = run.route
        run.slow[hop.peer_id] = 10.0
        counts.append(run.until(lambda run=run, hop=hop: run.route[0].peer_id != hop.peer_id))
    assert max(counts) <= 8, counts


def test_one_late_step_moves_nobody() -> None:
    run = Run(1, 0.05)
    for turn in range(400):
        run.slow = dict.fromkeys(PEERS, 30.0 if turn % 40 == 39 else 1.0)
        run.step()
    assert not run.moves


def test_who_claims_too_much_is_left_for_good() -> None:
    """It says that it is ten times as quick as it is. Measured once, it is not believed again when that fades."""
    run = Run(1, 0.05)
    run.view = View(
        {p: PeerRecord(peer_id=p, span=Span(0, BLOCKS), decode_s=BLOCK_S / 10 if p == "b" else BLOCK_S, expires_at=1e9)
         for p in PEERS}, BLOCKS)  # fmt: skip
    run.until(lambda: run.route[0].peer_id == "b")
    run.slow["b"] = 2.0
    claimed = {"a": BLOCK_S, "b": BLOCK_S / 10}
    real = run.costs.observe_decode
    run.costs.observe_decode = lambda peer, s, _: real(peer, s, claimed[peer])  # type: ignore[method-assign]
    run.until(lambda: run.route[0].peer_id == "a")
    before = len(run.moves)
    while run.now < 600:
        run.step()
    assert len(run.moves) == before


def test_the_pace_is_robust() -> None:
    pace = Pace()
    assert not pace.known and pace.margin == LEAST_MARGIN and not pace.slowed
    for _ in range(24):
        pace.add(0.1)
    pace.add(5.0)
    assert pace.slowed and pace.now_s == pytest.approx(0.1) and pace.margin == LEAST_MARGIN
    pace.add(0.1)
    assert not pace.slowed


def test_of_a_crowd_as_many_go_as_make_both_equal() -> None:
    mover, turns = Mover(random.Random(1)), 2000

    def share(here: int, there: int, gain: float) -> float:
        return sum(mover.our_turn(here, there, gain) for _ in range(turns)) / turns

    assert share(0, 0, 1.2) == share(1, 0, 1.2) == 1
    assert share(16, 0, 1.2) == pytest.approx(0.5, abs=0.05)
    assert share(10, 6, 1.2) == pytest.approx(0.2, abs=0.05)
    assert share(8, 8, 1.5) == share(8, 7, 1.5) == 0, "equal crowds: nothing is gained by a change of places"
    assert share(8, 8, 5.0) == pytest.approx(0.5, abs=0.05), "but for a peer that is slow for another reason"


def test_a_move_makes_the_next_one_harder() -> None:
    mover, asked = Mover(random.Random(1)), list[float]()

    def find(margin: float) -> Plan | None:
        asked.append(margin)
        return None

    for _ in range(10):
        mover.step(0.1, 0.0)
    mover.look(0.0, find)
    mover.moves(0.0)
    assert not mover.is_due(LOOK_S / 2) and mover.is_due(LOOK_S)
    mover.look(LOOK_S, find)
    mover.look(700.0, find)
    assert asked == [LEAST_MARGIN, pytest.approx(1.5 * LEAST_MARGIN), LEAST_MARGIN]
