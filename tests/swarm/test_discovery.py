"""The directory over a DHT that is a dictionary; over the real one it is tested in test_hive.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from routing.errors import BadInput, ProtocolError, Unreachable
from routing.types import PeerRecord, PeerState, Span
from swarm.discovery import Directory, Sequences
from swarm.hive import Entry
from swarm.identity import Identity
from swarm.records import RecordPolicy, block_key, encode_record
from tests.full_disk import full_disk

SWARM = bytes(range(32))
BLOCKS = 12


class Shelf:
    """Storing nodes as one dictionary that keeps to hivemind's rule: the entry that expires last stays."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.entries: dict[str, dict[str, Entry]] = {}
        self.policy = RecordPolicy(SWARM)
        self.fetches = 0


class ShelfHive:
    """What a Directory needs of a Hive."""

    def __init__(self, shelf: Shelf):
        self.shelf = shelf
        self.record_policy = RecordPolicy(SWARM)
        self.takes = True

    def dht_time(self) -> float:
        return self.shelf.now

    async def store(self, entries: Sequence[Entry], timeout_s: float) -> int:
        taken = 0
        for entry in entries if self.takes else ():
            known = self.shelf.entries.setdefault(entry.key, {}).get(entry.subkey)
            try:
                self.shelf.policy.check(
                    entry.key, entry.subkey, entry.value, self.shelf.now, entry.expires_at
                )
            except ProtocolError:
                continue
            if known is None or known.expires_at < entry.expires_at:
                self.shelf.entries[entry.key][entry.subkey] = entry
                taken += 1
        return taken

    async def holders(self, keys: Sequence[str], count: int, timeout_s: float) -> dict[str, list[str]]:
        return {}  # a swarm of one

    async def fetch(self, keys: Sequence[str], timeout_s: float) -> dict[str, dict[str, bytes]]:
        self.shelf.fetches += 1
        return {
            key: {subkey: entry.value for subkey, entry in self.shelf.entries.get(key, {}).items()}
            for key in keys
        }


def directory(shelf: Shelf, identity: Identity | None = None, **options) -> Directory:
    return Directory(ShelfHive(shelf), identity or Identity.generate(), SWARM, BLOCKS, **options)


def record(span: Span) -> PeerRecord:
    return PeerRecord(peer_id="", span=span, addresses=("127.0.0.1:4001",))


async def test_peers_find_each_other_in_one_batch():
    shelf = Shelf()
    alice, bob = directory(shelf), directory(shelf)
    first = await alice.announce(record(Span(0, 8)))
    second = await bob.announce(record(Span(4, 12)))
    assert await alice.refresh() == sorted([first, second], key=lambda known: known.peer_id)
    assert shelf.fetches == 1
    assert {key for key, peers in shelf.entries.items() if second.peer_id in peers} == {
        block_key(SWARM, block) for block in range(4, 12)
    }


async def test_the_newest_record_of_a_peer_counts_and_expired_ones_do_not():
    shelf = Shelf()
    peer, reader = directory(shelf), directory(shelf)
    await peer.announce(record(Span(0, 4)))
    shelf.now += 1
    moved = await peer.announce(record(Span(2, 6)))  # the old record still lies under blocks 0 and 1
    assert await reader.refresh() == [moved]
    shelf.now += 61
    assert await reader.refresh() == []


async def test_a_peer_that_leaves_is_seen_leaving_whatever_expires_later():
    shelf = Shelf()
    peer, reader = directory(shelf), directory(shelf)
    serving = await peer.announce(record(Span(0, 4)))
    await peer.leave()
    [gone] = await reader.refresh()
    assert gone.state is PeerState.LEAVING
    assert gone.sequence > serving.sequence
    assert gone.expires_at > serving.expires_at
    await peer.leave()  # once is enough
    assert await reader.refresh() == [gone]


async def test_a_clock_that_was_set_back_does_not_undo_a_record():
    shelf = Shelf()
    identity = Identity.generate()
    peer = directory(shelf, identity)
    before = await peer.announce(record(Span(0, 4)))
    shelf.now -= 20
    after = await peer.announce(record(Span(0, 4)))
    assert after.sequence > before.sequence and after.expires_at > before.expires_at
    assert await directory(shelf).refresh() == [after]


async def test_what_does_not_hold_is_dropped_on_read():
    shelf = Shelf()
    good = await directory(shelf).announce(record(Span(0, 4)))
    liar = Identity.generate()
    forged = encode_record(
        PeerRecord(peer_id=liar.peer_id, span=Span(0, 4), sequence=1, expires_at=shelf.now + 50),
        identity=liar,
        swarm_id=bytes(32),
        key=block_key(SWARM, 0),
    )
    beyond = PeerRecord(peer_id=liar.peer_id, span=Span(3, BLOCKS + 1), sequence=1, expires_at=shelf.now + 50)
    for key, value in (
        (block_key(SWARM, 0), forged),
        (block_key(SWARM, 1), b"garbage"),
        (
            block_key(SWARM, 3),
            encode_record(beyond, identity=liar, swarm_id=SWARM, key=block_key(SWARM, 3)),
        ),
    ):
        shelf.entries[key][liar.peer_id] = Entry(
            key=key, subkey=liar.peer_id, value=value, expires_at=shelf.now + 50
        )
    assert await directory(shelf).refresh() == [good]


async def test_nobody_takes_the_record():
    shelf = Shelf()
    peer = directory(shelf)
    peer._hive.takes = False
    with pytest.raises(Unreachable, match="no node took"):
        await peer.announce(record(Span(0, 4)))


async def test_arguments_that_make_no_sense():
    shelf = Shelf()
    with pytest.raises(BadInput, match="not all within"):
        await directory(shelf).announce(record(Span(0, BLOCKS + 1)))
    with pytest.raises(BadInput, match="another swarm"):
        Directory(ShelfHive(shelf), Identity.generate(), bytes(32), BLOCKS)
    with pytest.raises(BadInput, match="257 blocks"):
        Directory(ShelfHive(shelf), Identity.generate(), SWARM, 257)


def test_sequence_numbers_follow_the_clock_and_never_go_back():
    sequences = Sequences()
    assert sequences.next(10.0) == 10_000
    assert sequences.next(10.0) == 10_001
    assert sequences.next(3.0) == 10_002
    assert sequences.next(11.0) == 11_000


def test_the_last_sequence_number_is_kept_beside_the_identity(tmp_path):
    identity = tmp_path / "identity"
    assert Sequences.beside(identity).next(10.0) == 10_000
    again, twin = Sequences.beside(identity), Sequences.beside(identity)
    assert again.next(5.0) == 10_001
    assert twin.next(5.0) == 10_002  # another process of the same identity
    assert [path.name for path in tmp_path.iterdir()] == ["identity.sequence"]


@pytest.mark.parametrize("damage", ["", "-5", "12x", "9" * 40, "٣"])
def test_a_damaged_file_is_as_good_as_none(tmp_path, damage):
    path = tmp_path / "identity.sequence"
    path.write_text(damage)
    assert Sequences(path).next(10.0) == 10_000


def test_a_full_disk_keeps_no_peer_from_announcing_itself(tmp_path, caplog):
    sequences = Sequences.beside(tmp_path / "identity")
    assert sequences.next(10.0) == 10_000
    with caplog.at_level(logging.WARNING), full_disk():
        assert [sequences.next(10.0), sequences.next(3.0), sequences.next(11.0)] == [10_001, 10_002, 11_000]
    assert caplog.text.count("going on without") == 1
    assert (tmp_path / "identity.sequence").read_text() == "10000\n"
    assert sequences.next(3.0) == 11_001 and Sequences.beside(tmp_path / "identity").next(3.0) == 11_002
