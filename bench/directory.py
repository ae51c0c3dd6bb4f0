"""Owns the figures of discovery at scale: what a client's reads of the directory bring, cost and keep."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

from bench.figures import Figure
from bench.setting import Setting
from routing.coordinates import Coordinate
from routing.types import PeerId, PeerRecord, Span
from swarm.changes import serve_changes
from swarm.discovery import Directory
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.records import RecordPolicy, block_key, encode_record
from swarm.sources import HOLDERS
from tests.whole.stand_ins import MemoryCarrier, MemoryNet

PEERS, BLOCKS, NODES = 10_000, 80, 40
SWARM = bytes(range(32))
NOW = 1_800_000_000.0
LIFE_S = 60.0


def directory(setting: Setting) -> list[Figure]:
    """Nodes in this process hold the records; reads go over sockets. CPU is that of both sides."""
    return asyncio.run(_directory(PEERS))


class _Node(Hive):
    """What a directory needs of a node: streams to others, and who holds what. There is no DHT to be read."""

    def __init__(self, net: MemoryNet, holders: Sequence[_Node] = ()):
        self.peer_id = Identity.generate().peer_id
        self.record_policy = RecordPolicy(SWARM)
        self.carrier = MemoryCarrier(self.peer_id, net)
        self.brought = 0
        self._holders = holders

    def dht_time(self) -> float:
        return NOW

    async def holders(self, keys: Sequence[str], count: int, timeout_s: float) -> dict[str, list[PeerId]]:
        return {key: [node.peer_id for node in _nodes_of(key, self._holders)] for key in keys}

    async def serve(self, protocol: str, handler) -> None:
        await self.carrier.serve(protocol, handler)

    async def open(
        self, peer_id: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.carrier.open(peer_id, protocol, timeout_s)
        exactly = reader.readexactly

        async def counted(nbytes: int) -> bytes:
            self.brought += nbytes
            return await exactly(nbytes)

        reader.readexactly = counted  # type: ignore[method-assign]
        return reader, writer


def _nodes_of(key: str, nodes: Sequence[_Node]) -> list[_Node]:
    block = int(key.rpartition("/")[2])
    return [nodes[(block + nth) % NODES] for nth in range(HOLDERS)]


class _Swarm:
    def __init__(self, peers: int, nodes: Sequence[_Node], rng: random.Random):
        self._nodes = nodes
        self._identities = [Identity.generate() for _ in range(peers)]
        self._records = [self._announced(identity, rng) for identity in self._identities]
        self.entry_bytes = sum(self._store(number) for number in range(peers))

    def _announced(self, identity: Identity, rng: random.Random) -> PeerRecord:
        length = rng.randint(5, 10)
        start = rng.randint(0, BLOCKS - length)
        return PeerRecord(
            peer_id=identity.peer_id,
            span=Span(start, start + length),
            addresses=("203.0.113.7:4001", "192.168.1.5:4001"),
            sequence=int(NOW * 1000),
            expires_at=NOW + LIFE_S,
            decode_s=rng.uniform(0.001, 0.01),
            cache_free=10_000,
            cache_total=20_000,
            place=Coordinate(place=(0.01, 0.02, 0.03), height=0.004, error=0.1),
        )

    def renew(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            old = self._records[number]
            self._records[number] = replace(old, sequence=old.sequence + 1, expires_at=old.expires_at + 1)
            self._store(number)

    def _store(self, number: int) -> int:
        """Under the first block of the span: nobody is told of what lies under the others. Returns the bytes of all."""
        record, identity = self._records[number], self._identities[number]
        key = block_key(SWARM, record.span.start)
        data = encode_record(record, identity=identity, swarm_id=SWARM, key=key)
        for node in _nodes_of(key, self._nodes):
            node.record_policy.check(key, record.peer_id, data, NOW)
        return len(record.span) * (len(data) + len(record.peer_id))


async def _directory(peers: int) -> list[Figure]:
    rng, net = random.Random(1), MemoryNet()
    nodes = [_Node(net) for _ in range(NODES)]
    for node in nodes:
        await serve_changes(node)
    swarm = _Swarm(peers, nodes, rng)
    words, figures = f"{peers:,} peers, {BLOCKS} blocks", []

    async def read(client: _Node, reader: Directory, what: str) -> None:
        client.brought, begun = 0, time.process_time()
        assert len(await reader.refresh()) == peers
        cpu_s = time.process_time() - begun
        figures.append(Figure.of_median(f"{words}: a read of the directory, {what}", "kB", [client.brought / 1e3]))
        figures.append(Figure.of_median(f"{words}: its CPU time", "ms", [1e3 * cpu_s]))

    client = _Node(net, nodes)
    reader = Directory(client, Identity.generate(), SWARM, BLOCKS)
    await read(client, reader, "the first")
    await read(client, reader, "nothing changed")
    swarm.renew(rng.sample(range(peers), peers // 100))
    await read(client, reader, "1 % changed")
    swarm.renew(rng.sample(range(peers), peers // 3))
    await read(client, reader, "a third renewed, as in 5 s")
    tracemalloc.start()
    try:
        again = _Node(net, nodes)
        keeps = Directory(again, Identity.generate(), SWARM, BLOCKS)
        await keeps.refresh()
        kept_mb = tracemalloc.get_traced_memory()[0] / 1e6
    finally:
        tracemalloc.stop()
    figures.append(Figure.of_median(f"{words}: memory of what was read", "MB", [kept_mb]))
    figures.append(
        Figure.of_median(f"{words}: one copy of all entries in the DHT", "kB", [swarm.entry_bytes / 1e3])
    )
    for carrier in list(net.carriers.values()):
        await carrier.close()
    return figures
