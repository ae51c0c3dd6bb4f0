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
from peer.announcer import Announcer
from peer.cache import CacheBudget
from peer.choosing import Turn
from peer.config import PeerConfig
from peer.node import RESCUE_LOOKS, Node
from peer.peer import Peer
from routing.errors import DamagedWeights, ModelError, StartError, UnsupportedQuantization
from routing.placement import best_span
from routing.types import PeerRecord, PeerState, Span
from routing.view import RecordsSeen, View, apply
from swarm import manifest as manifests
from swarm.identity import Identity
from swarm.progress import silent
from swarm.tasks import Meanwhile
from tests.routing.test_placement import UNLIKE_HALVES
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


class Loads:
    """A loader on the compute thread of `node`."""

    pending_bytes = 0

    def __init__(self, node: Node, result: Any = "the blocks"):
        self._node, self._result = node, result

    async def first(self, span: Span, check: Any) -> Any:
        return await self._node._compute(self._load)

    def _load(self) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.fixture
def loading() -> tuple[Node, Told]:
    told = Told()
    peer: Any = SimpleNamespace(
        identity=Identity.generate(), threads=[Slow(lambda: told.records)], progress=silent
    )
    node = Node(PeerConfig(model="smollm2"), peer)
    node._turn = Turn(BLOCKS, Told(), lambda: 0.0)  # type: ignore[arg-type]
    node._span, node._directory = Span(0, 3), told  # type: ignore[assignment]
    node._loader = Loads(node)  # type: ignore[assignment]
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


async def test_a_newcomer_whose_speed_was_kept_chooses_by_it(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swarm of `test_whoever_knows_to_be_fast_goes_between_the_halves`."""
    node, _ = loading
    node.config = PeerConfig(model="smollm2", join="a code", most_blocks=2)
    node._peer.threads = [Slow(lambda: True)]  # type: ignore[list-item]
    node._peer.memory = lambda _: SimpleNamespace(blocks_that_fit=lambda _: 2)  # type: ignore[assignment, return-value]
    node._model.n_blocks, node._hive = 4, SimpleNamespace(dht_time=lambda: 0.0)  # type: ignore[assignment]
    monkeypatch.setattr(node._model, "block_bytes", lambda: 1)

    async def none() -> list[Any]:
        return []

    async def refresh() -> list[PeerRecord]:
        return list(UNLIKE_HALVES.records.values())

    node._turn, node._directory = SimpleNamespace(come=none), SimpleNamespace(refresh=refresh)  # type: ignore[assignment]
    chosen = []
    for kept_s in (0.0, 0.002):
        monkeypatch.setattr(node._model, "kept_decode_s", lambda kept_s=kept_s: kept_s)
        chosen.append(await node._choose())
    assert chosen == [Span(2, 4), Span(1, 3)]


async def test_a_peer_whose_blocks_cannot_be_loaded_says_goodbye(loading: tuple[Node, Told]) -> None:
    node, told = loading
    node._loader = Loads(node, ModelError("a tensor is not the swarm's"))  # type: ignore[assignment]
    with pytest.raises(ModelError):
        async with AsyncExitStack() as stack:
            await node._load_announced(stack, None)
    assert told.records and told.left == 1


async def test_a_quantization_that_the_device_cannot_do_is_told_before_anything_is_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "choose_devices", lambda wanted: (wanted,))  # as if it were here
    monkeypatch.setattr(Peer, "_take_identity", lambda self, stack: pytest.fail("something was begun"))
    with pytest.raises(UnsupportedQuantization, match="int4 is for CPUs"):
        async with Peer([PeerConfig(model="./nowhere", quantize="int4", device="cuda")]):
            pass


async def test_blocks_that_load_ahead_of_the_manifest_are_compared_with_it(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, told = loading
    compared: list[Any] = []

    async def load() -> Any:
        node._model.check(["a", "b"])
        node._model.manifest = "the manifest"  # type: ignore[assignment]
        node._model.check(["c"])
        return await node._compute(lambda: "the blocks")

    def differs(*_: Any) -> None:
        raise DamagedWeights("a tensor is not the swarm's")

    node._model.checkpoint = None  # type: ignore[assignment]
    monkeypatch.setattr(manifests, "check", lambda checkpoint, names, manifest: compared.append(names))
    async with AsyncExitStack() as stack, Meanwhile(load()) as ahead:
        assert await node._load_announced(stack, ahead) == "the blocks"
    assert compared == [["c"], ["a", "b"]]
    async with AsyncExitStack() as stack, Meanwhile(node._loader.first(Span(0, 3), None)) as ahead:
        monkeypatch.setattr(manifests, "check", differs)
        with pytest.raises(DamagedWeights):
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


async def test_work_that_several_share_is_undone_once_and_outlives_one_that_gives_up_waiting() -> None:
    undone: list[str] = []
    ready = asyncio.Event()

    async def work() -> str:
        await ready.wait()
        return "a daemon"

    async def undo(result: str) -> None:
        undone.append(result)

    async with Meanwhile(work(), undo) as shared:
        gives_up = asyncio.ensure_future(shared.shared())
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.sleep(0)
        ready.set()
        assert [await shared.shared(), await shared.shared()] == ["a daemon"] * 2 and not undone
        await shared.end()
    assert undone == ["a daemon"]


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


class Waiting:
    """Sessions that stay until somebody has come for their blocks."""

    def __init__(self, node: Node, rescued_after: int | None):
        self.asked, self._until = 0, rescued_after
        node._succession = self  # type: ignore[assignment]
        node._is_rescued = self.comes  # type: ignore[method-assign]

    @property
    def sessions(self) -> int:
        return 0 if self._until is not None and self.asked > self._until else 1

    async def hand_over(self) -> None:
        pass

    async def comes(self) -> bool:
        self.asked += 1
        return self._until is not None


@pytest.mark.parametrize(("rescued_after", "asked"), [(None, 1), (0, 1), (5, 6)])
async def test_who_leaves_waits_for_its_rescuer_alone(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch, rescued_after: int | None, asked: int
) -> None:
    monkeypatch.setattr("peer.node.RESCUE_LOOK_S", 0.0)
    node, _ = loading
    node._announcer = Announcer(node._directory, node.record, 1.0)
    waiting = Waiting(node, rescued_after)
    await node.hand_over()
    assert waiting.asked == asked


async def test_a_rescue_that_never_ends_is_not_waited_for_for_ever(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peer.node.RESCUE_LOOK_S", 0.0)
    node, _ = loading
    node._announcer = Announcer(node._directory, node.record, 1.0)
    waiting = Waiting(node, rescued_after=10**9)
    await node.hand_over()
    assert waiting.sessions and waiting.asked == RESCUE_LOOKS


class Vacating:
    """A node that serves blocks 0:3 and has given them up when it is asked to, with loading as `loads` says."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch, loads: list[Exception | None], gone: bool = True):
        self.gone, self.loads, self.served, self.moved, self.states = gone, loads, [], [], []
        node._state = PeerState.SERVING
        node._peer.moved = lambda _, span: self.moved.append(span)  # type: ignore[method-assign]
        node._peer.memory = lambda *_, **__: None  # type: ignore[assignment]
        node._peer.nodes = [node]
        node._announcer = Announcer(node._directory, node.record, 1.0)
        blocks, budget = SimpleNamespace(bytes_by_device=(0,), places=(0,)), CacheBudget(0)
        bare = SimpleNamespace(load=None, blocks=blocks, budget=budget)
        node._succession = SimpleNamespace(current=bare, vacate=self.vacate)  # type: ignore[assignment]
        monkeypatch.setattr(node, "_fits", lambda span, memory: True)
        node._loader = self  # type: ignore[assignment]
        monkeypatch.setattr(node, "_succeed", lambda blocks, load: self.served.append(blocks))
        self.node = node

    async def vacate(self, may: Any) -> bool:
        self.states.append(self.node._state)
        return self.gone

    async def beside(self, span: Span, check: Any) -> Span:
        self.states.append(self.node._state)
        if problem := self.loads.pop(0):
            raise problem
        return span


async def may() -> bool:
    return True


async def test_who_drains_first_says_so_and_joins_with_the_new_blocks(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Vacating(loading[0], monkeypatch, [None])
    assert await peer.node._replace(Span(3, 6), may)
    assert peer.served == peer.moved == [Span(3, 6)] and peer.node._state is PeerState.SERVING
    assert peer.states == [PeerState.DRAINING, PeerState.JOINING]


async def test_when_the_new_blocks_cannot_be_loaded_the_old_ones_are_again(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Vacating(loading[0], monkeypatch, [OSError("disk"), None])
    assert not await peer.node._replace(Span(3, 6), may)
    assert peer.served == [Span(0, 3)] and not peer.moved
    assert peer.node._span == Span(0, 3) and peer.node._state is PeerState.SERVING


async def test_a_peer_that_can_load_nothing_any_more_says_so(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Vacating(loading[0], monkeypatch, [OSError("disk"), MemoryError("none")])
    with pytest.raises(StartError, match="disk; none"):
        await peer.node._replace(Span(3, 6), may)


async def test_who_may_not_give_its_blocks_up_serves_them_on(
    loading: tuple[Node, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Vacating(loading[0], monkeypatch, [], gone=False)
    assert not await peer.node._replace(Span(3, 6), may)
    assert not peer.served and peer.node._state is PeerState.SERVING and peer.node._span == Span(0, 3)
