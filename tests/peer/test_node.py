"""A peer that loads its blocks tells so, and takes it back if nothing comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import devices
from peer.config import PeerConfig
from peer.node import Node
from peer.peer import Peer
from routing.errors import DamagedWeights, ModelError, UnsupportedQuantization
from routing.placement import best_span
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply
from swarm.identity import Identity
from swarm.tasks import Meanwhile
from tests.whole.stand_ins import until

BLOCKS = 6


class Told:
    """A directory that keeps what it is told."""

    def __init__(self) -> None:
        self.records: list[PeerRecord] = []
        self.left = 0

    async def announce(self, record: PeerRecord) -> PeerRecord:
        self.records.append(record)
        return record

    async def leave(self) -> None:
        self.left += 1


class Slow:
    """A compute thread whose work takes until `done` says that it may end."""

    def __init__(self, done: Callable[[], Any]):
        self._done = done

    async def run(self, work: Any, *args: Any) -> Any:
        await until(self._done)
        return work(*args)


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Told]:
    told = Told()
    peer: Any = SimpleNamespace(identity=Identity.generate(), thread=Slow(lambda: told.records))
    node = Node(PeerConfig(model="smollm2"), peer)
    node._span, node._directory = Span(0, 3), told  # type: ignore[assignment]
    monkeypatch.setattr(node, "_load", lambda span, check: "the blocks")
    return node, told


async def test_while_its_blocks_load_a_peer_is_seen_and_who_comes_then_takes_others(loading: tuple[Node, Told]) -> None:
    node, told = loading
    async with AsyncExitStack() as stack:
        assert await node._load_announced(stack, None) == "the blocks"
        [record] = told.records
        assert (record.peer_id, record.span) == (node._peer.identity.peer_id, Span(0, 3))
        assert record.state is PeerState.JOINING and told.left == 0
        view = apply(View({}, BLOCKS), RecordsSeen([record]))
        assert best_span(view, BLOCKS, 3, 0.0) == Span(3, 6)


async def test_a_peer_whose_blocks_cannot_be_loaded_says_goodbye(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, told = loading

    def load(span: Span, check: Any) -> Any:
        raise ModelError("a tensor is not the swarm's")

    monkeypatch.setattr(node, "_load", load)
    with pytest.raises(ModelError):
        async with AsyncExitStack() as stack:
            await node._load_announced(stack, None)
    assert told.records and told.left == 1


async def test_a_quantization_that_the_device_cannot_do_is_told_before_anything_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "choose_device", lambda wanted: wanted)  # as if it were here
    monkeypatch.setattr(Peer, "_take_identity", lambda self, stack: pytest.fail("something was begun"))
    with pytest.raises(UnsupportedQuantization, match="int4 is for CPUs"):
        async with Peer([PeerConfig(model="./nowhere", quantize="int4", device="cuda")]):
            pass


async def test_blocks_that_load_ahead_of_the_manifest_are_compared_with_it(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, told = loading
    compared: list[Any] = []
    monkeypatch.setattr(node, "_names", lambda span: [f"tensors of {span}"])
    monkeypatch.setattr(node, "_check", compared.append)
    async with AsyncExitStack() as stack, Meanwhile(node._compute(node._load, Span(0, 3), None)) as ahead:
        assert await node._load_announced(stack, ahead) == "the blocks"
    assert compared == [["tensors of 0:3"]]

    def differs(names: Any) -> None:
        raise DamagedWeights("a tensor is not the swarm's")

    monkeypatch.setattr(node, "_check", differs)
    with pytest.raises(DamagedWeights):
        async with AsyncExitStack() as stack, Meanwhile(node._compute(node._load, Span(0, 3), None)) as ahead:
            await node._load_announced(stack, ahead)
    assert told.left == 2


async def test_work_whose_result_is_not_taken_leaves_nothing() -> None:
    undone: list[str] = []

    async def undo(result: str) -> None:
        undone.append(result)

    async def work() -> str:
        return "a hive"

    async with Meanwhile(work(), undo) as taken:
        assert await taken.result() == "a hive"
    assert not undone
    with pytest.raises(ModelError):
        async with Meanwhile(work(), undo):
            await asyncio.sleep(0)
            raise ModelError("no such model")
    assert undone == ["a hive"]
    async with Meanwhile(asyncio.sleep(3600, "too late"), undo):
        await asyncio.sleep(0)
    assert undone == ["a hive"]


@pytest.mark.parametrize(
    ("place", "config", "threads"),
    [
        (0, {}, 8),
        (1, {}, 4),
        (2, {}, 2),
        (9, {}, 1),
        (1, {"threads": 3}, 3),
        (1, {"identity_path": Path("peer-1.key")}, None),
    ],
)
def test_a_second_peer_on_a_machine_takes_half_the_cores(
    monkeypatch: pytest.MonkeyPatch, place: int, config: dict[str, Any], threads: int | None
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    peer = Peer([PeerConfig(model="smollm2", **config)])
    peer._key_path = Path(f"peer-{place}.key")
    assert peer._threads() == threads
