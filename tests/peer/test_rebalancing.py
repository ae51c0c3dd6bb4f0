"""Peers that look, take leases, load and switch, over a directory that all of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from peer.rebalancing import REST_LOOKS, Rebalancing
from routing.errors import ModelError, NotEnoughMemory, StartError
from routing.rebalancing import Lease
from routing.types import PeerId, PeerRecord, PeerState, Span
from tests.whole.stand_ins import until

N_BLOCKS = 4
SERVING, DRAINING = PeerState.SERVING, PeerState.DRAINING


class Swarm:
    """The directory, its leases and the time."""

    def __init__(self, **spans: str):
        self.now = 1000.0
        self.leases: dict[PeerId, Lease] = {}
        self.records = {peer: PeerRecord(peer_id=peer, span=Span.parse(s), expires_at=1e9) for peer, s in spans.items()}
        self.loaded: list[tuple[PeerId, Span]] = []
        self.drained: list[PeerId] = []
        self.meanwhile: Callable[[], None] = lambda: None  # while a peer drains

    def goes(self, peer: PeerId) -> None:
        self.records[peer] = replace(self.records[peer], state=DRAINING)

    async def refresh(self) -> list[PeerRecord]:
        return list(self.records.values())

    def peer(self, me: PeerId, load: Callable[[Span], Awaitable[Any]] | None = None) -> Rebalancing:
        async def loads(span: Span) -> Any:
            self.loaded.append((me, span))
            await asyncio.sleep(0)
            return await load(span) if load is not None else span

        async def switch(blocks: Any) -> None:
            self.records[me] = replace(self.records[me], span=blocks)

        async def replaces(span: Span, may: Callable[[], Awaitable[bool]]) -> bool:
            self.drained.append(me)
            self.records[me] = replace(self.records[me], state=DRAINING)
            self.meanwhile()
            if moved := await may():
                self.records[me] = replace(self.records[me], span=span)
            self.records[me] = replace(self.records[me], state=SERVING)
            return moved

        return Rebalancing(
            me=me, n_blocks=N_BLOCKS, capacity=2, directory=self, leases=Book(self, me), clock=lambda: self.now,
            load=loads, switch=switch, replace=replaces, settle_s=0.0,
        )  # fmt: skip


class Book:
    """One peer's hand on the leases. What is taken can be read only a moment later."""

    def __init__(self, swarm: Swarm, me: PeerId):
        self.swarm, self.me = swarm, me

    async def take(self, span: Span) -> Lease:
        now = self.swarm.now
        self.swarm.leases[self.me] = lease = Lease(peer_id=self.me, span=span, since=now, expires_at=now + 45)
        return lease

    async def renew(self, lease: Lease) -> Lease:
        return lease

    async def give_back(self, lease: Lease) -> None:
        self.swarm.leases.pop(self.me, None)

    async def read(self) -> list[Lease]:
        return list(self.swarm.leases.values())


async def test_a_block_about_to_lose_its_last_peer_is_rescued_at_the_first_look() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    assert not await swarm.peer("a").look()
    swarm.goes("z")
    assert await swarm.peer("a").look()
    assert swarm.records["a"].span == Span(2, 4) and not swarm.leases


async def test_of_two_that_race_for_a_gap_one_moves_and_the_other_stays() -> None:
    swarm = Swarm(a="0:2", b="0:2", c="0:2", z="2:4")
    swarm.goes("z")
    peers = [swarm.peer("b"), swarm.peer("a")]
    assert await asyncio.gather(*(peer.look() for peer in peers)) == [False, True]  # at once: the lower id
    assert swarm.loaded == [("a", Span(2, 4))] and swarm.records["b"].span == Span(0, 2)
    assert not swarm.leases
    # The other chooses anew: nobody can take the gap any more, but between the two it helps both.
    assert [await peers[0].look(), await peers[0].look()] == [False, True]
    assert swarm.records["b"].span == Span(1, 3)


async def test_the_one_that_was_first_moves_whatever_its_id() -> None:
    swarm = Swarm(a="0:2", b="0:2", c="0:2", z="2:4")
    swarm.goes("z")
    begun, held = asyncio.Event(), asyncio.Event()

    async def slowly(span: Span) -> Span:
        begun.set()
        await held.wait()
        return span

    first = asyncio.create_task(swarm.peer("b", slowly).look())
    await begun.wait()
    swarm.now += 5
    assert not await swarm.peer("a").look()
    held.set()
    assert await first and swarm.loaded == [("b", Span(2, 4))]


async def test_when_the_holder_of_a_lease_dies_another_moves_once_it_has_expired() -> None:
    swarm = Swarm(a="0:2", b="0:2", c="0:2", z="2:4")
    swarm.goes("z")
    await Book(swarm, "b").take(Span(2, 4))
    del swarm.records["b"]
    other = swarm.peer("a")
    swarm.records["d"] = replace(swarm.records["a"], peer_id="d")
    # Nobody knows what became of b: its lease still keeps the gap.
    assert not await other.look()
    swarm.now += 46
    assert await other.look() and swarm.records["a"].span == Span(2, 4)


async def test_when_blocks_cannot_be_loaded_the_old_ones_are_served_on_and_others_may_try() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")

    async def damaged(span: Span) -> Any:
        raise ModelError("a tensor is not the swarm's")

    peer = swarm.peer("a", damaged)
    for _ in range(1 + REST_LOOKS):
        assert not await peer.look()
    assert swarm.records["a"].span == Span(0, 2) and not swarm.leases and len(swarm.loaded) == 1
    assert await swarm.peer("b").look() and swarm.records["b"].span == Span(2, 4)


async def test_who_became_the_last_one_while_it_loaded_stays() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")

    async def meanwhile(span: Span) -> Span:
        swarm.goes("b")
        return span

    assert not await swarm.peer("a", meanwhile).look()
    assert swarm.records["a"].span == Span(0, 2) and not swarm.leases


async def test_who_lost_its_lease_while_it_loaded_does_not_move() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")

    async def for_long(span: Span) -> Span:
        swarm.now += 60  # and no renewal came through
        return span

    assert not await swarm.peer("a", for_long).look() and swarm.records["a"].span == Span(0, 2)


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError("torch"), MemoryError()])
async def test_any_failure_of_loading_is_taken(error: Exception) -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")

    async def fails(span: Span) -> Any:
        raise error

    assert not await swarm.peer("a", fails).look()


async def test_who_hears_that_a_peer_drains_looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peer.rebalancing.ALARM_S", 0.0)
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    peer = swarm.peer("a")
    running = asyncio.create_task(peer.run(every_s=1e6))
    peer.heard(swarm.records["z"])
    await asyncio.sleep(0)
    assert not peer._alarm.is_set()
    swarm.goes("z")
    peer.heard(swarm.records["z"])
    await until(lambda: swarm.records["a"].span == Span(2, 4))
    running.cancel()


# -- no memory for both spans -----------------------------------------------------------------------------------


async def no_room(span: Span) -> Any:
    raise NotEnoughMemory("both do not fit")


async def test_who_has_no_memory_for_both_drains_first() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")
    assert await swarm.peer("a", no_room).look()
    assert swarm.records["a"].span == Span(2, 4) and swarm.drained == ["a"] and not swarm.leases


@pytest.mark.parametrize("state", [DRAINING, PeerState.JOINING])
async def test_nobody_drains_first_unless_others_serve_all_that_it_serves(state: PeerState) -> None:
    swarm = Swarm(a="0:2", b="0:2", c="1:3", z="2:4")
    swarm.goes("z")
    swarm.records["b"] = replace(swarm.records["b"], state=state)
    assert not await swarm.peer("a", no_room).look()
    assert swarm.records["a"].span == Span(0, 2) and not swarm.drained and not swarm.leases


async def test_who_became_the_last_one_while_it_drained_stays() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")
    swarm.meanwhile = lambda: swarm.goes("b")
    assert not await swarm.peer("a", no_room).look() and swarm.drained
    assert swarm.records["a"].span == Span(0, 2) and swarm.records["a"].state is SERVING and not swarm.leases


async def test_who_can_serve_nothing_any_more_ends() -> None:
    swarm = Swarm(a="0:2", b="0:2", z="2:4")
    swarm.goes("z")
    peer = swarm.peer("a", no_room)

    async def breaks(span: Span, may: Callable[[], Awaitable[bool]]) -> bool:
        raise StartError("neither could be loaded")

    peer._replace = breaks
    with pytest.raises(StartError):
        await peer.run(every_s=0.0)
