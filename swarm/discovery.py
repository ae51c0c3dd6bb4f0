"""Who serves what: a peer announces its record under each block of its span, and all read what has changed.

Owns the keys of a swarm in the DHT, the sequence numbers of one's own records, which of a peer's records
counts, and the book of those that live. Does not know how the DHT works, and decides nothing about routes.
Renewal is the caller's: a record lives for `lifetime_s`.

A read of the DHT brings every record once for each block of its span and each node that stores it: far too much
among thousands of peers. So one node that stores a block's records is asked what came since we asked last, and
only for records that begin with the block. The DHT itself is read where nobody answers, and for blocks that
nobody seems to serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from routing.errors import BadInput, DaemonFailed, ProtocolError, SwarmError, TimedOut, Unreachable
from routing.types import PeerId, PeerRecord, PeerState, Span
from swarm import disk_cache
from swarm.changes import ask_changes
from swarm.hive import Entry, Hive
from swarm.identity import Identity
from swarm.records import RecordPolicy, block_key, encode_record
from swarm.sources import HOLDERS, Sources

log = logging.getLogger(__name__)

LIFETIME_S = 30.0  # two renewals: whoever vanishes is not believed in for longer
TIMEOUT_S = 10.0
ASK_S = 3.0
ASKED_AT_ONCE = 16
CHECKED_AT_ONCE = 16  # signatures, about 2 ms; tokens that wait for this event loop go first


class Sequences:
    """The sequence numbers of one identity's records: never the same twice, never going back.

    The greater of the last one plus one and the clock in milliseconds. The last one is kept in a small file
    beside the identity, so that it grows over restarts even when the clock was set back; without a file, or with a
    disk that is full, in memory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None):
        self._path = None if path is None else Path(path)
        self._last = self._read()

    @classmethod
    def beside(cls, identity_path: str | os.PathLike[str]) -> Sequences:
        path = Path(identity_path)
        return cls(path.with_name(path.name + ".sequence"))

    def next(self, now: float) -> int:
        """The number for a record made at `now` (seconds)."""
        # Another process of the same identity may have written since.
        self._last = max(self._last + 1, self._read() + 1, int(now * 1000))
        if self._path is not None:
            disk_cache.keep(self._path, f"{self._last}\n".encode())
        return self._last

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            text = self._path.read_text().strip()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise BadInput(f"cannot read {self._path}: {error.strerror}") from error
        # A file cut by a crash is as good as none: the clock is ahead of it.
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


class Directory:
    """The peers of one swarm, as they announce themselves in the DHT."""

    def __init__(
        self,
        hive: Hive,
        identity: Identity,
        swarm_id: bytes,
        n_blocks: int,
        *,
        sequences: Sequences | None = None,
        lifetime_s: float = LIFETIME_S,
        timeout_s: float = TIMEOUT_S,
    ):
        policy = hive.record_policy
        if policy.swarm_id != swarm_id:
            raise BadInput("the hive keeps the records of another swarm")
        if block_key(swarm_id, n_blocks - 1) not in policy:
            raise BadInput(f"a model of {n_blocks} blocks has more than this swarm can announce")
        self._hive = hive
        self._identity = identity
        self._swarm_id = swarm_id
        self._n_blocks = n_blocks
        self._policy: RecordPolicy = policy
        self._sequences = sequences or Sequences()
        self._lifetime_s = lifetime_s
        self._timeout_s = timeout_s
        self._announced: dict[str, float] = {}  # key -> expiry of what this peer last stored there
        self._last: PeerRecord | None = None
        self._book: dict[PeerId, PeerRecord] = {}  # the newest record of each peer
        self._sources = Sources(n_blocks)
        self._reading = asyncio.Lock()
        self._checking = asyncio.Lock()  # answers come side by side, and are checked one after the other

    async def announce(self, record: PeerRecord) -> PeerRecord:
        """Store `record` under each block of its span; returns it as stored, with sequence number and expiry.

        Both are set here. Call it again before `lifetime_s` has passed. Raises BadInput, Unreachable if no
        node took it, TimedOut, DaemonFailed.
        """
        if record.span.end > self._n_blocks:
            raise BadInput(f"blocks {record.span} are not all within a model of {self._n_blocks} blocks")
        return await self._store(record)

    async def leave(self) -> None:
        """Tell the swarm that this peer is going: its last record again, LEAVING; once. Raises like `announce`."""
        if self._last is not None:
            try:
                await self._store(replace(self._last, state=PeerState.LEAVING))
            finally:
                self._last = None

    async def refresh(self) -> list[PeerRecord]:
        """The newest verified record of each peer, those that leave included, by peer id; none has expired.

        Raises TimedOut, DaemonFailed.
        """
        async with self._reading:  # two at once would bring the same twice
            told = await self._read_changes()
            left = [block for block in range(self._n_blocks) if block not in told] + self._uncovered(told)
            if left:
                keys = [block_key(self._swarm_id, block) for block in left]
                for key, entries in (await self._hive.fetch(keys, self._timeout_s)).items():
                    await self._take((key, subkey, data) for subkey, data in entries.items())
        now = self._hive.dht_time()
        self._book = {peer_id: record for peer_id, record in self._book.items() if record.expires_at > now}
        return [self._book[peer_id] for peer_id in sorted(self._book)]

    async def _read_changes(self) -> set[int]:
        """Ask one holder of each block what is new. Returns the blocks of which somebody told."""
        await self._choose_sources()
        told: set[int] = set()
        limit = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(peer_id: PeerId, since: Mapping[int, int]) -> None:
            try:
                async with limit:
                    changes = await ask_changes(self._hive, peer_id, self._sources.run(peer_id), since, ASK_S)
            except DaemonFailed:
                return  # that is our own
            except SwarmError as error:
                log.info("%s", error)
                self._sources.failed(peer_id, self._hive.dht_time())
                return
            await self._take(
                (block_key(self._swarm_id, block), subkey, data) for block, subkey, data in changes.records
            )
            self._sources.told(peer_id, since, changes.run, changes.version)
            told.update(since)

        await asyncio.gather(*(ask(peer_id, since) for peer_id, since in self._sources.questions().items()))
        return told

    async def _choose_sources(self) -> None:
        due = self._sources.due(self._hive.dht_time())
        if not due:
            return
        keys = {block: block_key(self._swarm_id, block) for block in due}
        try:
            holders = await self._hive.holders(list(keys.values()), HOLDERS, ASK_S)
        except (TimedOut, DaemonFailed) as error:
            log.info("%s", error)
            return
        self._sources.choose({block: holders.get(key, []) for block, key in keys.items()}, self._hive.dht_time())

    def _uncovered(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that no living record serves: whoever told of them may have joined just now."""
        now = self._hive.dht_time()
        living = (record for record in self._book.values() if record.expires_at > now)
        spans = {record.span for record in living if record.state is not PeerState.LEAVING}
        return sorted(set(blocks).difference(*(range(span.start, span.end) for span in spans)))

    async def _take(self, entries: Iterable[tuple[str, PeerId, bytes]]) -> None:
        """Into the book what holds of (key, subkey, data), and is newer than what is there."""
        async with self._checking:
            for count, (key, subkey, data) in enumerate(entries, 1):
                if count % CHECKED_AT_ONCE == 0:
                    await asyncio.sleep(0)
                try:
                    record = self._policy.check(key, subkey, data, self._hive.dht_time())
                except ProtocolError:
                    continue  # forged, stale or expired: as if it were not there
                known = self._book.get(subkey)
                if record.span.end <= self._n_blocks and (known is None or record.sequence > known.sequence):
                    self._book[subkey] = record

    def _keys(self, span: Span) -> list[str]:
        return [block_key(self._swarm_id, block) for block in range(span.start, span.end)]

    async def _store(self, record: PeerRecord) -> PeerRecord:
        keys = self._keys(record.span)
        now = self._hive.dht_time()
        # hivemind keeps the entry that expires last: a later record must never expire earlier.
        expires_at = max([now + self._lifetime_s, *(self._announced.get(key, 0.0) + 1e-3 for key in keys)])
        record = replace(
            record,
            peer_id=self._identity.peer_id,
            sequence=self._sequences.next(now),
            expires_at=expires_at,
        )
        entries = [
            Entry(
                key=key,
                subkey=record.peer_id,
                value=encode_record(record, identity=self._identity, swarm_id=self._swarm_id, key=key),
                expires_at=expires_at,
            )
            for key in keys
        ]
        if await self._hive.store(entries, self._timeout_s) == 0:
            raise Unreachable(f"no node took the record of {record.peer_id}")
        self._announced = {key: until for key, until in self._announced.items() if until > now}
        self._announced.update(dict.fromkeys(keys, expires_at))
        self._last = record
        return record
