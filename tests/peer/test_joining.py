"""Newcomers that choose at the same moment end up where they would have gone one after the other."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from peer.joining import Newcomer
from routing.errors import TimedOut
from routing.rebalancing import Lease
from routing.types import PeerId, PeerRecord, PeerState, Span
from swarm.discovery import LIFETIME_S
from tests.peer.clockwork import Clockwork

SETTLE_S = 1.0


class Swarm:
    """A directory in which a record can be read some time after it was announced."""

    def __init__(self, clock: Clockwork, seed: int, n_blocks: int):
        self.clock, self.rng, self.n_blocks = clock, random.Random(seed), n_blocks
        self.records: dict[PeerId, PeerRecord] = {}
        self.down = False

    async def store(self, record: PeerRecord) -> PeerRecord:
        now = self.clock.time()
        record = replace(record, sequence=int(1000 * now), expires_at=now + LIFETIME_S)
        await asyncio.sleep(self.rng.uniform(0.05, SETTLE_S / 2))
        self.records[record.peer_id] = record
        await asyncio.sleep(self.rng.uniform(0.0, SETTLE_S / 4))  # until the last node has answered
        return record

    async def refresh(self) -> list[PeerRecord]:
        if self.down:
            raise TimedOut("the directory does not answer")
        await asyncio.sleep(self.rng.uniform(0.01, 0.1))
        return list(self.records.values())

    async def read(self) -> list[Lease]:
        return []


class Peer:
    def __init__(self, swarm: Swarm, name: PeerId, capacity: int):
        self.swarm, self.name = swarm, name
        self.span = Span(0, 1)
        self.rounds = 0
        self.newcomer = Newcomer(
            n_blocks=swarm.n_blocks, capacity=capacity, directory=swarm, leases=swarm, clock=swarm.clock.time,
            settle_s=SETTLE_S,
        )  # fmt: skip

    async def announce(self, state: PeerState = PeerState.JOINING) -> PeerRecord:
        return await self.swarm.store(PeerRecord(peer_id=self.name, span=self.span, state=state))

    async def join(self, after_s: float) -> None:
        """As the node does it."""
        await asyncio.sleep(after_s)
        self.span = await self.newcomer.choose()
        while True:
            self.rounds += 1
            span = await self.newcomer.settle(self, self.span)  # type: ignore[arg-type]  what it needs of an announcer
            if span == self.span:
                break
            self.span = span
        await asyncio.sleep(self.swarm.rng.uniform(0.0, 3.0))  # the rest of loading
        await self.announce(PeerState.SERVING)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_races_for_a_gap_in_the_end_all_blocks_are_served(seed: int) -> None:
    rng = random.Random(seed)
    n_blocks, capacity = rng.randint(4, 24), rng.randint(1, 4)
    count = -(-n_blocks // capacity)
    with Clockwork() as clock:
        swarm = Swarm(clock, seed, n_blocks)
        peers = [Peer(swarm, f"peer {number:02}", capacity) for number in rng.sample(range(count), count)]
        together = rng.choice([0.0, 0.3, 3.0])

        async def all_join() -> None:
            await asyncio.gather(*(peer.join(rng.uniform(0.0, together)) for peer in peers))

        clock.run(all_join())
    served = {block for peer in peers for block in range(peer.span.start, peer.span.end)}
    assert served == set(range(n_blocks)), [str(peer.span) for peer in peers]
    assert max(peer.rounds for peer in peers) <= count + 1


def test_who_comes_alone_looks_once_and_who_comes_later_moves_nobody() -> None:
    with Clockwork() as clock:
        swarm = Swarm(clock, 0, 4)
        first, second = Peer(swarm, "z", 2), Peer(swarm, "a", 2)

        async def one_after_the_other() -> None:
            await asyncio.gather(first.join(0.0), second.join(0.9))

        clock.run(one_after_the_other())
    assert (first.span, second.span) == (Span(0, 2), Span(2, 4)) and first.rounds == second.rounds == 1


def test_a_directory_that_does_not_answer_stops_nobody() -> None:
    with Clockwork() as clock:
        swarm = Swarm(clock, 0, 4)
        peer = Peer(swarm, "a", 2)

        async def join() -> None:
            span = await peer.newcomer.choose()
            swarm.down = True
            assert await peer.newcomer.settle(peer, span) == span  # type: ignore[arg-type]

        clock.run(join())
