"""A swarm's DHT: hivemind's DHTNode on a p2pd, and nothing of hivemind beyond here and `p2pd.py`.

Owns each call to the DHT, and what is refused for it. Each swarm has a DHT of its own: its calls bear the swarm's name,
so that one p2pd can be a node of several, and no swarm's nodes meet another's. Does not know what the records mean (a
policy says which may be stored). All calls are to be made `Life.within` a deadline, which translates their errors.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from routing.errors import ProtocolError, Unreachable
from routing.types import PeerId
from swarm.p2pd import RPC_S, Life, reason_of
from swarm.records import RecordPolicy

log = logging.getLogger(__name__)

_REPLICAS = 5


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is stored in the DHT: `value` for (`key`, `subkey`) until `expires_at`, in DHT time."""

    key: str
    subkey: str
    value: bytes
    expires_at: float


class Validator(RecordValidatorBase):
    """Our policy, asked by hivemind for everything that another node stores here or answers."""

    def __init__(self, policy: RecordPolicy, clock: Callable[[], float]):
        self.policy = policy
        self._clock = clock
        self._keys = {DHTID.generate(source=key).to_bytes(): key for key in policy}

    def validate(self, record: DHTRecord) -> bool:
        try:
            subkey = msgspec.msgpack.decode(record.subkey, type=str | None)
            value = msgspec.msgpack.decode(record.value, type=bytes)
            key = self._keys.get(record.key, "")
            self.policy.check(key, subkey, value, self._clock(), record.expiration_time)
        except (msgspec.MsgspecError, ProtocolError) as error:
            log.debug("refused a record: %s", error)
            return False
        return True

    def prune(self, key: bytes, entries: Any) -> bool:
        """Drop what the policy refuses from a dictionary. hivemind would refuse the whole dictionary for one
        stale entry, which would hide all other peers of that key."""
        with entries.freeze():
            refused = [
                subkey
                for subkey, (value, expires_at) in entries.items()
                if not self.validate(DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires_at))
            ]
            for subkey in refused:
                del entries[subkey]
        return True


class _OfSwarm:
    """p2pd as the node of one swarm's DHT sees it: what it serves and calls bears the swarm's name."""

    def __init__(self, p2p: P2P, swarm_id: bytes):
        self._p2p, self._name = p2p, swarm_id.hex()
        self.peer_id = p2p.peer_id

    async def add_protobuf_handler(self, name: str, *args: Any, **options: Any) -> None:
        await self._p2p.add_protobuf_handler(f"{self._name}::{name}", *args, **options)

    async def call_protobuf_handler(self, peer_id: PeerID, name: str, *args: Any) -> Any:
        return await self._p2p.call_protobuf_handler(peer_id, f"{self._name}::{name}", *args)


class Dht:
    """A node of one swarm's DHT, for as long as its p2pd lives."""

    def __init__(self, life: Life, node: DHTNode):
        self._life, self.node = life, node

    @classmethod
    async def begin(cls, life: Life, validator: Validator, *, client: bool) -> Dht:
        """A node that knows nobody yet."""
        node = await DHTNode.create(
            p2p=_OfSwarm(life.p2p, validator.policy.swarm_id),
            node_id=DHTID.generate(source=str(life.p2p.peer_id)),  # the same after a restart
            client_mode=client,
            record_validator=validator,
            num_replicas=_REPLICAS,
            wait_timeout=RPC_S,
            cache_locally=False,  # who is there now is the question, not who was
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        node.protocol._validate_dictionary = validator.prune
        return cls(life, node)

    def end(self) -> None:
        self.node.is_alive = False  # its handlers end with p2pd; asking it to remove them could hang

    @property
    def knows_nobody(self) -> bool:
        """Whether the DHT's routing table is empty."""
        return not self.node.protocol.routing_table.uid_to_peer_id

    async def greet(self, peer_id: PeerId, addresses: Sequence[Multiaddr], clock: Callable[[], float]) -> float:
        """Connect to `peer_id`, ask for its time, and return the seconds that `clock` is ahead of it (negative:
        behind), less what the round trip hides. Raises Unreachable with the bare reason."""
        peer = PeerID.from_base58(peer_id)
        # An empty node info: a node that will be refused is not put into others' routing tables first.
        question = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
        try:
            await self._life.p2p._client.connect(peer, addresses)
            asked = clock()
            answer = await self.node.protocol.get_stub(peer).rpc_ping(question, timeout=RPC_S)
            answered = clock()
        except (P2PDaemonError, P2PHandlerError, TimeoutError, OSError, EOFError) as error:
            raise Unreachable(reason_of(error) or "no answer") from error
        return max(asked - answer.dht_time, 0.0) + min(answered - answer.dht_time, 0.0)

    async def enter(self, peer_ids: Iterable[PeerId]) -> None:
        """Fill the routing table through `peer_ids`, which are connected."""
        protocol = self.node.protocol
        await asyncio.gather(*(protocol.call_ping(PeerID.from_base58(peer_id)) for peer_id in peer_ids))
        await self.node.find_nearest_nodes([self.node.node_id])

    def inherit(self, dead: Dht) -> None:
        """Keep what others stored at `dead`, which is still valid."""
        self.node.protocol.storage = dead.node.protocol.storage

    async def store(self, entries: Sequence[Entry], *, elsewhere: bool) -> int:
        """Store `entries` in one batch, if `elsewhere` not at this node; returns how many were taken."""
        taken = await self.node.store_many(
            keys=[entry.key for entry in entries],
            values=[entry.value for entry in entries],
            expiration_time=[float(entry.expires_at) for entry in entries],
            subkeys=[entry.subkey for entry in entries],
            exclude_self=elsewhere,
        )
        return sum(bool(ok) for ok in taken.values())

    async def fetch(self, keys: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """All values of each key by subkey, from all nodes that hold it, in one batch."""
        # Any smaller time would end each search at the first node that knows anything.
        found = await self.node.get_many(keys, sufficient_expiration_time=math.inf)
        return {
            key: {
                subkey: item.value
                for subkey, item in entry.value.items()
                if isinstance(subkey, str) and isinstance(item.value, bytes)
            }
            if entry is not None and isinstance(entry.value, dict)
            else {}
            for key, entry in found.items()
        }

    async def holders(self, keys: Sequence[str], count: int) -> dict[str, list[PeerId]]:
        """The `count` other nodes nearest to each key, nearest first: those that store its values."""
        # Asked for a key, a node sends all values that it has; so we ask for the key beside it, which nobody stores.
        beside = {DHTID(DHTID.generate(source=key) ^ 1): key for key in keys}
        found = await self.node.find_nearest_nodes(list(beside), k_nearest=count, exclude_self=True)
        return {beside[near]: [str(peer_id) for peer_id in nodes.values()] for near, nodes in found.items()}
