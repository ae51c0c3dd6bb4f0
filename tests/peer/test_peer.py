"""What the models of one peer share: memory, its cache, what is said of them, and its end."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from pathlib import Path
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


def two_devices(monkeypatch: pytest.MonkeyPatch, free: dict[str, int], **config: Any) -> Peer:
    """A peer with `cuda:0` and `cuda:1`."""
    monkeypatch.setattr("peer.devices.choose_devices", lambda wanted: tuple(wanted.split(",")))
    monkeypatch.setattr("peer.peer.free_memory", free.__getitem__)
    return Peer([PeerConfig(model=name, device=",".join(free), **config) for name in NAMES[:2]])


def test_each_device_has_its_own_account_and_what_the_owner_allows_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda:0": 30 * GIB, "cuda:1": 10 * GIB}
    peer = two_devices(monkeypatch, free, max_memory_bytes=12 * GIB)
    first, second = peer.nodes
    memory = peer.memory(first)
    assert (memory.free_bytes, memory.by_device, memory.limit_bytes) == (40 * GIB, (30 * GIB, 10 * GIB), 12 * GIB)
    first.weights = (3 * GIB, GIB)
    assert peer.memory(second).by_device == (27 * GIB, 9 * GIB), "as much again is for the sessions of the first"
    assert peer.memory(second, freed=[GIB, 2 * GIB]).by_device == (28 * GIB, 11 * GIB)
    assert peer.memory(second, taken=[GIB, GIB]).limit_bytes == 2 * GIB
    second.weights = (0, 2 * GIB)
    both: Any = SimpleNamespace(bytes_by_device=first.weights, places=(0, 1))
    one: Any = SimpleNamespace(bytes_by_device=second.weights, places=(1,))
    budgets = [peer.cache(first, both), peer.cache(second, one)]
    assert budgets[0].parts[1] is budgets[1].parts[0] and len(budgets[1].parts) == 1
    # Of 6 GiB that are left of the limit half is for each device, as of the weights.
    assert [part.limit_bytes for part in budgets[0].parts] == [3 * GIB, 3 * GIB]
    assert budgets[0].limit_bytes == budgets[0].free_bytes == 6 * GIB


def test_a_device_without_blocks_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = two_devices(monkeypatch, {"cuda:0": 8 * GIB, "cuda:1": 0}, cache_bytes=GIB)
    blocks: Any = SimpleNamespace(bytes_by_device=(GIB, 0), places=(0,))
    assert [part.limit_bytes for part in peer.cache(peer.nodes[0], blocks).parts] == [GIB]


def test_parts_of_the_processor_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = two_devices(monkeypatch, {"cpu": 10 * GIB})
    peer.nodes = peer.nodes[:1]
    peer.config = PeerConfig(model="one", device="cpu,cpu")
    assert peer.memory(peer.nodes[0]).by_device == (5 * GIB, 5 * GIB)


@pytest.mark.parametrize(
    ("config", "cores"), [({"device": "cpu,cpu", "threads": 5}, [2, 2]), ({"device": "cpu,cpu,cpu"}, [2, 2, 2]),
                          ({"device": "cpu,cpu", "threads": 1}, [1, 1]), ({"device": "cpu"}, [6])],
)  # fmt: skip
async def test_the_parts_of_the_processor_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], cores: list[int]
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 6)
    peer = Peer([PeerConfig(model="one", **config)])
    monkeypatch.setattr("peer.peer.earlier_peers", lambda path: 0)
    peer._key_path = Path("peer-0.key")
    async with AsyncExitStack() as stack:
        await peer._start_threads(stack)
        assert [thread._threads for thread in peer.threads] == cores


async def test_each_compute_thread_has_its_own_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries' kernels run on the current device, wherever their tensors lie."""
    chosen: dict[int, Any] = {}
    monkeypatch.setattr("torch.cuda.set_device", lambda device: chosen.update({threading.get_ident(): device}))
    peer = two_devices(monkeypatch, {"cuda:0": GIB, "cpu": GIB, "cuda:1": GIB}, threads=1)
    async with AsyncExitStack() as stack:
        await peer._start_threads(stack)
        found = [chosen.get(await thread.run(threading.get_ident)) for thread in peer.threads]
    assert found == ["cuda:0", None, "cuda:1"]


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
