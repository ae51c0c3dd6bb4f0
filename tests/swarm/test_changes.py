"""Directories that ask each other for changes: what comes, from whom, and when the DHT is read after all."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from routing.errors import ProtocolError, Unreachable
from routing.types import PeerId, PeerRecord, Span
from swarm import discovery
from swarm.changes import PROTOCOL, Changes, ask_changes, serve_changes
from swarm.discovery import LIFETIME_S, Directory
from swarm.hive import Entry
from swarm.identity import Identity
from swarm.records import RecordPolicy, block_key, encode_record
from swarm.sources import HOLDERS, KEEP_S, NEAREST, SHUN_S, Sources
from tests.whole.stand_ins import MemoryCarrier, MemoryNet

SWARM = bytes(range(32))
BLOCKS = 12


@dataclass
class Net:
    """Nodes that all store everything, on a clock of the test."""

    now: float = 1_800_000_000.0
    nodes: list[Node] = field(default_factory=list)
    streams: MemoryNet = field(default_factory=MemoryNet)
    reads: list[str] = field(default_factory=list)  # the keys that were read from the DHT itself

    async def node(self, *, answers: bool = True, stores: bool = True) -> Node:
        node = Node(self, Identity.generate(), stores)
        if answers:
            await serve_changes(node)  # type: ignore[arg-type]
        return node

    async def peer(self, span: Span, **changes) -> Directory:
        """Announced, and stored by all nodes that there are."""
        node = Node(self, Identity.generate(), stores=False)
        directory = Directory(node, node.identity, SWARM, BLOCKS)  # type: ignore[arg-type]
        await directory.announce(PeerRecord(peer_id="", span=span, addresses=("127.0.0.1:4001",), **changes))
        return directory

    def reader(self) -> Directory:
        node = Node(self, Identity.generate(), stores=False)
        return Directory(node, node.identity, SWARM, BLOCKS)  # type: ignore[arg-type]


class Node:
    """What a Directory needs of a Hive."""

    def __init__(self, net: Net, identity: Identity, stores: bool):
        self.net, self.identity, self.peer_id = net, identity, identity.peer_id
        self.record_policy = RecordPolicy(SWARM)
        self.carrier = MemoryCarrier(self.peer_id, net.streams)
        self.entries: dict[tuple[str, PeerId], Entry] = {}
        if stores:
            net.nodes.append(self)
        self.open, self.serve = self.carrier.open, self.carrier.serve

    def dht_time(self) -> float:
        return self.net.now

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        for node in self.net.nodes:
            for entry in entries:
                node.record_policy.check(entry.key, entry.subkey, entry.value, self.net.now, entry.expires_at)
                node.entries[entry.key, entry.subkey] = entry
        return len(entries)

    async def holders(self, keys: Sequence[str], count: int, timeout_s: float) -> dict[str, list[PeerId]]:
        nearest = [node.peer_id for node in self.net.nodes[:count]]
        return dict.fromkeys(keys, nearest)

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[PeerId, bytes]]:
        self.net.reads += keys
        stored = [entry for node in self.net.nodes for entry in node.entries.values()]
        return {key: {each.subkey: each.value for each in stored if each.key == key} for key in keys}


@pytest.fixture
async def net() -> AsyncIterator[Net]:
    net = Net()
    yield net
    for carrier in list(net.streams.carriers.values()):
        await carrier.close()


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Changes]:
    """All answers that directories get."""
    answers = []

    async def noted(*asked) -> Changes:
        answers.append(await ask_changes(*asked))
        return answers[-1]

    monkeypatch.setattr(discovery, "ask_changes", noted)
    return answers


def count(brought: list[Changes]) -> int:
    records = sum(len(each.records) for each in brought)
    brought.clear()
    return records


async def names(directory: Directory) -> set[PeerId]:
    return {record.peer_id for record in await directory.refresh()}


def own(directory: Directory) -> PeerId:
    return directory._identity.peer_id


async def test_each_record_comes_once_and_after_that_only_what_changed(net: Net, brought: list[Changes]) -> None:
    await net.node()
    peers = [await net.peer(span) for span in (Span(0, 7), Span(0, 12), Span(5, 6))]
    reader = net.reader()
    assert await names(reader) == {own(peer) for peer in peers}
    assert count(brought) == 3  # of 20 entries in the DHT
    assert await names(reader) == {own(peer) for peer in peers}
    assert count(brought) == 0
    assert peers[0]._last is not None
    net.now += 1
    renewed = await peers[0].announce(replace(peers[0]._last, queue_s=0.5))
    assert renewed in await reader.refresh()
    assert count(brought) == 1
    assert not net.reads


async def test_tokens_do_not_wait_while_many_records_are_checked(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "CHECKED_AT_ONCE", 2)
    nodes = [await net.node() for _ in range(HOLDERS)]
    for start in range(BLOCKS):
        await net.peer(Span(start, start + 1))
    reader, checked, most = net.reader(), 0, 0
    check = reader._policy.check

    def counted(*asked) -> PeerRecord:
        nonlocal checked
        checked += 1
        return check(*asked)

    monkeypatch.setattr(reader._policy, "check", counted)
    reading = asyncio.ensure_future(reader.refresh())
    while not reading.done():
        before = checked
        await asyncio.sleep(0)
        most = max(most, checked - before)
    assert len(await reading) == BLOCKS and checked == len(nodes) * BLOCKS
    assert most <= 3


async def test_a_peer_that_vanishes_is_gone_after_the_life_of_its_record(net: Net) -> None:
    await net.node()
    stays, vanishes = await net.peer(Span(0, 12)), await net.peer(Span(0, 12))
    reader = net.reader()
    assert await names(reader) == {own(stays), own(vanishes)}
    net.now += LIFETIME_S / 2
    assert stays._last is not None
    await stays.announce(stays._last)
    net.now += LIFETIME_S / 2 + 0.01
    assert await names(reader) == {own(stays)}


async def test_what_one_node_withholds_another_one_tells(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    hiding, *_ = [await net.node() for _ in range(NEAREST)]
    whole, reader = await net.peer(Span(0, 12)), net.reader()
    monkeypatch.setattr(reader._sources._chance, "shuffle", lambda some: some.sort(key=hiding.peer_id.__ne__))
    assert await names(reader) == {own(whole)}
    assert list(reader._sources.questions()) == [hiding.peer_id]
    hidden = await net.peer(Span(2, 4))
    tells = hiding.record_policy.changes
    hiding.record_policy.changes = lambda *asked: [  # type: ignore[method-assign]
        (peer_id, data) for peer_id, data in tells(*asked) if peer_id != own(hidden)
    ]
    assert await names(reader) == {own(whole)}
    for _ in range(2):
        net.now += 0.61 * KEEP_S
        for peer in (whole, hidden):
            assert peer._last is not None
            await peer.announce(peer._last)
    assert await names(reader) == {own(whole), own(hidden)}
    assert not net.reads


async def test_a_node_that_joined_just_now_and_knows_nothing_hides_nobody(net: Net) -> None:
    """Whoever reads for the first time asks all holders; a block that nobody serves is read from the DHT."""
    late = await net.node()
    await net.node()
    peer = await net.peer(Span(0, 12))
    for peers in late.record_policy._seen.values():
        peers.clear()
    assert await names(net.reader()) == {own(peer)}
    assert not net.reads
    for peers in net.nodes[1].record_policy._seen.values():
        peers.clear()
    assert await names(net.reader()) == {own(peer)}
    assert len(net.reads) == BLOCKS


async def test_a_node_that_does_not_answer_costs_one_read_of_the_dht(net: Net) -> None:
    await net.node(answers=False)
    peer = await net.peer(Span(0, 12))
    reader = net.reader()
    assert await names(reader) == {own(peer)}
    assert len(net.reads) == BLOCKS
    await net.node()
    assert peer._last is not None
    net.now += 1
    await peer.announce(peer._last)
    net.reads.clear()
    assert await names(reader) == {own(peer)}  # from the other one: who failed is not asked again soon
    assert not net.reads


async def test_a_node_that_was_started_anew_tells_all_it_has(net: Net, brought: list[Changes]) -> None:
    node = await net.node()
    first = await net.peer(Span(0, 12))
    reader = net.reader()
    assert await names(reader) == {own(first)}
    node.record_policy = RecordPolicy(SWARM)
    await serve_changes(node)  # type: ignore[arg-type]
    second = await net.peer(Span(0, 12))
    count(brought)
    assert await names(reader) == {own(first), own(second)}
    assert count(brought) == 1
    assert not net.reads


async def test_nobody_can_forge_or_pass_off_a_record_as_one_of_another_block(net: Net) -> None:
    node = await net.node()
    peer = await net.peer(Span(0, 12))
    victim, other = Identity.generate(), Identity.generate()
    record = PeerRecord(peer_id=other.peer_id, span=Span(0, 12), sequence=1, expires_at=net.now + 20)
    data = encode_record(record, identity=other, swarm_id=SWARM, key=block_key(SWARM, 0))
    [(_, true)] = node.record_policy.changes(block_key(SWARM, 0), 0, net.now)

    def lies(key: str, since: int, now: float) -> list[tuple[PeerId, bytes]]:
        if key == block_key(SWARM, 0):
            return [(victim.peer_id, data), (own(peer), true)]
        return [(own(peer), true)] if key == block_key(SWARM, 1) else []

    node.record_policy.changes = lies  # type: ignore[method-assign]
    assert await names(net.reader()) == {own(peer)}


@pytest.mark.parametrize("question", [b"", b"\xc1", b"\x92\xc4\x00\x91\x92\x00\xff", b"\x91" * 100])
async def test_a_question_that_makes_no_sense_is_not_answered(net: Net, question: bytes) -> None:
    node, asker = await net.node(), net.reader()._hive
    asked: list[BaseException] = []
    handler = node.carrier._handlers[PROTOCOL]

    async def noted(*stream) -> None:
        try:
            await handler(*stream)
        except ProtocolError as error:
            asked.append(error)
            stream[-1].close()

    await node.carrier.serve(PROTOCOL, noted)
    reader, writer = await asker.open(node.peer_id, PROTOCOL, 1.0)
    writer.write(len(question).to_bytes(2, "little") + question)
    assert await reader.read() == b""
    assert asked
    writer.close()


@asynccontextmanager
async def answering(net: Net, answer: Callable[[asyncio.StreamWriter], None]) -> AsyncIterator[Node]:
    node = Node(net, Identity.generate(), stores=False)

    async def handle(_: PeerId, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer(writer)
        writer.close()

    await node.carrier.serve(PROTOCOL, handle)
    yield node


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", Unreachable),
        (b"\x05\x00\x00\x00abc", Unreachable),
        (b"\x01\x00\x00\x00\xc1", ProtocolError),
        (b"\xff\xff\xff\xff", ProtocolError),
    ],
    ids=["nothing", "cut", "garbage", "too long"],
)
async def test_an_answer_that_makes_no_sense_has_a_name(net: Net, answer: bytes, error: type[Exception]) -> None:
    async with answering(net, lambda writer: writer.write(answer)) as node:
        with pytest.raises(error):
            await ask_changes(net.reader()._hive, node.peer_id, b"", {0: 0}, 1.0)


async def test_two_who_read_at_once_bring_it_once(net: Net, brought: list[Changes]) -> None:
    await net.node()
    peer = await net.peer(Span(0, 12))
    reader = net.reader()
    both = await asyncio.gather(names(reader), names(reader))
    assert both == [{own(peer)}] * 2
    assert count(brought) == 1


# -- whom to ask


def test_all_holders_are_asked_the_first_time_and_then_one_of_the_nearest() -> None:
    holders = [str(number) for number in range(HOLDERS)]
    for seed in range(10):
        sources = Sources(1, random.Random(seed))
        sources.choose({0: holders}, 0.0)
        assert sources.questions() == {peer_id: {0: 0} for peer_id in holders}
        for peer_id in holders:
            sources.told(peer_id, [0], b"run", 1)
        [asked] = sources.questions()
        assert asked in holders[:NEAREST]


def test_few_nodes_are_asked_for_many_blocks() -> None:
    sources = Sources(80, random.Random(1))
    chance = random.Random(2)
    nodes = [str(number) for number in range(6)]
    sources.choose({block: chance.sample(nodes, HOLDERS) for block in range(80)}, 0.0)
    for peer_id in list(sources.questions()):
        sources.told(peer_id, range(80), b"run", 7)
    asked = sources.questions()
    assert len(asked) <= 4
    assert sorted(block for blocks in asked.values() for block in blocks) == list(range(80))
    assert all(since == 7 for blocks in asked.values() for since in blocks.values())


def test_another_node_is_asked_after_a_while_and_not_for_all_blocks_at_once() -> None:
    sources = Sources(80, random.Random(1))
    holders = {block: ["a", "b"] for block in range(80)}
    sources.choose(holders, 0.0)
    before = {block: source.peer_id for block, source in sources._sources.items()}
    assert not sources.due(0.79 * KEEP_S)
    assert 0 < len(sources.due(KEEP_S)) < 80
    assert len(sources.due(1.21 * KEEP_S)) == 80
    sources.choose(holders, 1.21 * KEEP_S)
    assert all(sources._sources[block].peer_id != peer_id for block, peer_id in before.items())


def test_who_failed_is_left_alone_for_a_while() -> None:
    sources = Sources(2, random.Random(1))
    sources.choose({0: ["a"], 1: ["a"]}, 0.0)
    sources.failed("a", 0.0)
    assert sources.due(1.0) == [0, 1] and not sources.questions()
    sources.choose({0: ["a", "b"], 1: ["a"]}, 1.0)
    assert sources.questions() == {"b": {0: 0}}
    sources.choose({1: ["a"]}, SHUN_S + 1)
    assert sources.questions()["a"] == {1: 0}


def test_nobody_found_is_no_reason_to_leave_who_answers() -> None:
    sources = Sources(1, random.Random(1))
    sources.choose({0: ["a"]}, 0.0)
    sources.told("a", [0], b"run", 3)
    sources.choose({0: []}, 2 * KEEP_S)
    assert sources.questions() == {"a": {0: 3}} and sources.due(2 * KEEP_S) == [0]
