"""Leases in the DHT: which peers are about to serve other blocks.

Owns how a lease is stored, renewed, given back and read. What leases mean, and whose comes first, is in
`routing/rebalancing.py`; what a storing node refuses, in `records.py`.
"""

from __future__ import annotations

from dataclasses import replace

from routing.errors import ProtocolError, Unreachable
from routing.rebalancing import Lease
from routing.types import PeerRecord, PeerState, Span
from swarm.discovery import TIMEOUT_S, Sequences
from swarm.hive import Entry, Hive
from swarm.identity import Identity
from swarm.records import RecordPolicy, encode_record, leases_key

LEASE_S = 45.0  # if its holder dies, others wait so long


class Leases:
    """Those of one swarm, and this peer's own: one at a time."""

    def __init__(self, hive: Hive, identity: Identity, swarm_id: bytes, sequences: Sequences, lease_s: float = LEASE_S):
        self._hive, self._identity, self._swarm_id, self._sequences = hive, identity, swarm_id, sequences
        self._policy: RecordPolicy = hive.record_policy
        self._key, self._lease_s = leases_key(swarm_id), lease_s
        self._until = 0.0  # hivemind keeps the entry that expires last

    async def take(self, span: Span) -> Lease:
        """Raises Unreachable if no node took it, TimedOut, DaemonFailed."""
        now = self._hive.dht_time()
        since = self._sequences.next(now) / 1000
        return await self._store(Lease(peer_id=self._identity.peer_id, span=span, since=since, expires_at=0.0))

    async def renew(self, lease: Lease) -> Lease:
        """It may be for other blocks by now. Raises like `take`: also when it has been held for too long."""
        return await self._store(lease)

    async def give_back(self, lease: Lease) -> None:
        """Raises like `take`."""
        await self._store(lease, PeerState.LEAVING)

    async def read(self) -> list[Lease]:
        """All that live. Raises TimedOut, DaemonFailed."""
        found = await self._hive.fetch([self._key], TIMEOUT_S)
        now, leases = self._hive.dht_time(), []
        for subkey, data in sorted(found.get(self._key, {}).items()):
            try:
                record = self._policy.check(self._key, subkey, data, now)
            except ProtocolError:
                continue
            if record.state is PeerState.JOINING:
                since = record.sequence / 1000
                lease = Lease(peer_id=subkey, span=record.span, since=since, expires_at=record.expires_at)
                leases.append(lease)
        return leases

    async def _store(self, lease: Lease, state: PeerState = PeerState.JOINING) -> Lease:
        lease = replace(lease, expires_at=max(self._hive.dht_time() + self._lease_s, self._until + 1e-3))
        record = PeerRecord(
            peer_id=lease.peer_id, span=lease.span, state=state, sequence=round(lease.since * 1000),
            expires_at=lease.expires_at,
        )  # fmt: skip
        value = encode_record(record, identity=self._identity, swarm_id=self._swarm_id, key=self._key)
        entry = Entry(key=self._key, subkey=lease.peer_id, value=value, expires_at=lease.expires_at)
        if await self._hive.store([entry], TIMEOUT_S) == 0:
            raise Unreachable(f"no node took the lease of {lease.peer_id}")
        self._until = lease.expires_at
        return lease
