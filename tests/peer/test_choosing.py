"""Newcomers that start together, over a DHT that is a dictionary: each chooses when those before have."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from peer.announcer import Announcer
from peer.choosing import TURN_S, Turn
from peer.config import PeerConfig
from peer.node import Node
from peer.served_model import ServedModel
from routing.types import PeerRecord, PeerState, Span
from swarm.discovery import Directory, Sequences
from swarm.hive import Entry
from swarm.identity import Identity
from swarm.leases import Leases
from swarm.progress import silent
from tests.swarm.test_discovery import BLOCKS, SWARM, Shelf, ShelfHive
from tests.whole.stand_ins import until

HALF = BLOCKS // 2


class FarHive(ShelfHive):
    """Each call takes some turns of the event loop, as chance will have it."""

    def __init__(self, shelf: Shelf, rng: random.Random):
        super().__init__(shelf)
        self._rng = rng
        self.stores = 0

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        await self._travel()
        taken = await super().store(entries, timeout_s)
        self.stores += 1
        await self._travel()
        return taken

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        await self._travel()
        found = await super().fetch(keys, timeout_s)
        await self._travel()
        return found

    async def _travel(self) -> None:
        for _ in range(self._rng.randrange(20)):
            await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def any_block_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServedModel, "block_bytes", lambda self: 1)
    monkeypatch.setattr(ServedModel, "kept_decode_s", lambda self: 0.0)
    monkeypatch.setattr("peer.choosing.LOOK_S", 0.0)


async def at_once(work: Any) -> Any:
    return work()


def newcomer(shelf: Shelf, rng: random.Random, most_blocks: int = HALF) -> Node:
    """As it is when it has joined."""
    identity, room = Identity.generate(), SimpleNamespace(blocks_that_fit=lambda block_bytes: BLOCKS)
    threads = [SimpleNamespace(run=at_once)]
    peer: Any = SimpleNamespace(identity=identity, memory=lambda node: room, threads=threads, progress=silent)
    node, hive = Node(PeerConfig(model="smollm2", join="CODE", most_blocks=most_blocks), peer), FarHive(shelf, rng)
    node._model.n_blocks, node._hive = BLOCKS, hive  # type: ignore[assignment]
    sequences = Sequences()
    node._directory = Directory(hive, identity, SWARM, BLOCKS, sequences=sequences)
    node._turn = Turn(BLOCKS, Leases(hive, identity, SWARM, sequences, TURN_S), hive.dht_time)
    return node


async def starts(node: Node) -> Span:
    node._span = await node._choose()
    announcer = Announcer(node._directory, node.record, node.config.renew_s)
    announcer.renew_soon()
    telling = asyncio.create_task(node._tell_choice(announcer))
    await until(lambda: announcer.announced)
    telling.cancel()
    return node._span


@pytest.mark.parametrize("seed", range(8))
async def test_those_that_start_together_choose_as_if_one_had_come_after_the_other(seed: int) -> None:
    shelf, rng = Shelf(), random.Random(seed)
    one_by_one = [await starts(newcomer(shelf, rng)) for _ in range(6)]
    shelf = Shelf()
    together = await asyncio.gather(*(starts(newcomer(shelf, rng)) for _ in range(6)))
    assert len(set(one_by_one)) > 1 and sorted(together) == sorted(one_by_one)


async def test_who_comes_alone_waits_for_nobody() -> None:
    shelf = Shelf()
    node = newcomer(shelf, random.Random(1))
    assert await node._choose() == Span(0, HALF)
    assert node._hive.stores == 1 and shelf.fetches == 2  # its lease; leases, records


async def test_who_dies_while_it_chooses_holds_up_the_others_for_no_longer_than_its_lease() -> None:
    shelf, rng = Shelf(), random.Random(1)
    await newcomer(shelf, rng)._turn.come()
    other = newcomer(shelf, rng)
    shelf.now += 1.0
    choosing = asyncio.create_task(starts(other))
    await until(lambda: shelf.fetches > 5)
    assert not choosing.done()
    shelf.now += TURN_S - 0.9
    assert await choosing == Span(0, HALF)


async def test_what_was_chosen_counts_before_its_record_can_be_read() -> None:
    shelf, rng = Shelf(), random.Random(1)
    first = newcomer(shelf, rng)
    await first._turn.chosen(span := await first._choose())
    assert await newcomer(shelf, rng)._choose() == Span(HALF, BLOCKS) != span


async def test_who_takes_all_blocks_needs_no_turn() -> None:
    shelf, rng = Shelf(), random.Random(1)
    await newcomer(shelf, rng)._turn.come()
    assert await newcomer(shelf, rng, BLOCKS)._choose() == Span(0, BLOCKS)


async def test_where_no_node_takes_the_lease_a_newcomer_chooses_out_of_turn() -> None:
    shelf, rng = Shelf(), random.Random(1)
    await newcomer(shelf, rng)._turn.come()
    other = newcomer(shelf, rng)
    other._hive.takes = False
    assert await other._choose() == Span(0, HALF)
    await other._turn.chosen(Span(0, HALF))  # there is nothing to tell


async def test_what_a_restarted_peer_said_when_it_left_does_not_hide_what_it_chose() -> None:
    shelf, rng = Shelf(), random.Random(1)
    first, reader = newcomer(shelf, rng), newcomer(shelf, rng)
    await first._directory.announce(PeerRecord(peer_id="", span=Span(HALF, BLOCKS), state=PeerState.SERVING))
    await first._directory.leave()
    shelf.now += 1.0
    await first._turn.chosen(await first._choose())
    assert await reader._choose() == Span(HALF, BLOCKS)
