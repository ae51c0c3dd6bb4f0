"""What the models of one peer share: memory, its cache, what is said of them, and its end."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from peer.capacity import RESERVE_BYTES
from peer.config import PeerConfig
from peer.peer import Peer
from routing.errors import DamagedWeights, NotEnoughMemory
from routing.reach import Notice

GIB = 1 << 30
BLOCK = 100 << 20
NAMES = ("one", "another", "third")


def peer_of(models: int, monkeypatch: pytest.MonkeyPatch, free_bytes: int, **config: Any) -> Peer:
    monkeypatch.setattr("peer.peer.free_memory", lambda device: free_bytes)
    return Peer([PeerConfig(model=name, device="cpu", **config) for name in NAMES[:models]])


def blocks_of(nbytes: int) -> Any:
    return SimpleNamespace(bytes_by_device=(nbytes,), places=(0,))


def load(peer: Peer, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> list[int]:
    """How many blocks of each model fit, when they are loaded one after the other."""
    counts = []
    for node in peer.nodes:
        counts.append(peer.memory(node).blocks_that_fit(BLOCK))
        node.weights = (counts[-1] * BLOCK,)
        free_bytes -= node.weights_bytes
        monkeypatch.setattr("peer.peer.free_memory", lambda device, left=free_bytes: left)
    return counts


def test_models_get_equal_parts_and_as_much_again_for_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    free = RESERVE_BYTES + 12 * BLOCK
    assert load(peer_of(1, monkeypatch, free), monkeypatch, free) == [6]
    peer = peer_of(3, monkeypatch, free)
    assert load(peer, monkeypatch, free) == [2, 2, 2]
    blocks = blocks_of(2 * BLOCK)
    budgets = [peer.cache(node, blocks) for node in peer.nodes]
    assert budgets[0] is budgets[1] is budgets[2]
    assert budgets[0].limit_bytes == (RESERVE_BYTES + 6 * BLOCK) // 2


def test_what_one_model_leaves_is_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    free = RESERVE_BYTES + 12 * BLOCK
    peer = peer_of(2, monkeypatch, free)
    peer.nodes[0].weights = (BLOCK,)
    monkeypatch.setattr("peer.peer.free_memory", lambda device: free - BLOCK)
    assert peer.memory(peer.nodes[1]).blocks_that_fit(BLOCK) == 5


def test_the_owners_limits_are_for_all_models_together(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 100 * GIB
    peer = peer_of(2, monkeypatch, free, max_memory_bytes=12 * BLOCK)
    assert load(peer, monkeypatch, free) == [3, 3]
    budget = peer.cache(peer.nodes[0], blocks_of(3 * BLOCK))
    assert budget.limit_bytes == 6 * BLOCK
    peer = peer_of(2, monkeypatch, free, max_memory_bytes=12 * BLOCK, cache_bytes=2 * BLOCK)
    assert load(peer, monkeypatch, free) == [5, 5]
    assert peer.cache(peer.nodes[0], blocks_of(5 * BLOCK)).limit_bytes == 2 * BLOCK
    with pytest.raises(NotEnoughMemory, match="--max-memory allows"):
        load(peer_of(3, monkeypatch, free, max_memory_bytes=4 * BLOCK), monkeypatch, free)


def test_a_model_that_moves_shares_the_cache_with_others_and_alone_begins_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = blocks_of(BLOCK)
    alone = peer_of(1, monkeypatch, 10 * GIB)
    assert alone.cache(alone.nodes[0], blocks) is not alone.cache(alone.nodes[0], blocks)
    both = peer_of(2, monkeypatch, 10 * GIB)
    budget = both.cache(both.nodes[0], blocks)
    budget.used_bytes = 2 * GIB
    monkeypatch.setattr("peer.peer.free_memory", lambda device: 8 * GIB)
    assert both.cache(both.nodes[1], blocks) is budget and budget.limit_bytes == 5 * GIB


@pytest.mark.parametrize(("models", "said"), [(1, "a shard is cut"), (2, "another: a shard is cut")])
async def test_of_several_models_the_one_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, models: int, said: str
) -> None:
    peer = peer_of(models, monkeypatch, 10 * GIB)

    async def load(stack: AsyncExitStack) -> None:
        pass

    async def fail(stack: AsyncExitStack) -> None:
        raise DamagedWeights("a shard is cut")

    for node in peer.nodes:
        monkeypatch.setattr(node, "load", load)
    monkeypatch.setattr(peer.nodes[-1], "load", fail)
    async with AsyncExitStack() as stack:
        with pytest.raises(DamagedWeights) as raised:
            await peer._load(stack)
    assert str(raised.value) == said and raised.value.advice == DamagedWeights.advice


async def test_while_one_model_is_handed_over_the_other_takes_no_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, left = peer_of(2, monkeypatch, 10 * GIB), []
    for node in peer.nodes:

        async def hand_over(node: Any = node) -> None:
            left.append(node)

        node._succession = SimpleNamespace(sessions=0)  # type: ignore[assignment]
        monkeypatch.setattr(node, "hand_over", hand_over)
    await peer.hand_over()
    assert not left, "nobody needs it"
    peer.nodes[1]._succession.sessions = 1  # type: ignore[misc]
    await peer.hand_over()
    assert left == peer.nodes


def test_that_it_cannot_be_reached_is_said_once_for_all_swarms(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, told = peer_of(2, monkeypatch, 10 * GIB), []
    peer._tell = told.append
    closed, opened = Notice(reachable=False, message="closed"), Notice(reachable=True, message="open")
    for notice in (closed, closed, opened, closed):
        peer.tell(notice)
    assert told == [closed, opened, closed]
