"""Leases over a DHT that is a dictionary, and what every node refuses of them."""

from __future__ import annotations

import pytest

from routing.errors import ProtocolError, Unreachable
from routing.types import PeerRecord, PeerState, Span
from swarm.discovery import Sequences
from swarm.identity import Identity
from swarm.leases import LEASE_S, Leases
from swarm.records import AHEAD_S, LONGEST_LEASE_S, RecordPolicy, encode_record, leases_key
from tests.swarm.test_discovery import SWARM, Shelf, ShelfHive

KEY = leases_key(SWARM)


def leases(shelf: Shelf) -> Leases:
    return Leases(ShelfHive(shelf), Identity.generate(), SWARM, Sequences())


async def test_a_lease_is_read_by_all_until_it_is_given_back() -> None:
    shelf = Shelf()
    mine, others = leases(shelf), leases(shelf)
    lease = await mine.take(Span(2, 4))
    assert await others.read() == await mine.read() == [lease]
    assert lease.span == Span(2, 4) and lease.since == pytest.approx(shelf.now, abs=0.01)
    await mine.give_back(lease)
    assert await others.read() == []
    again = await mine.take(Span(2, 4))
    assert await others.read() == [again] and again.since > lease.since


async def test_a_renewed_lease_is_as_old_as_it_was() -> None:
    shelf = Shelf()
    mine = leases(shelf)
    lease = await mine.take(Span(2, 4))
    shelf.now += 30
    renewed = await mine.renew(lease)
    assert renewed.since == lease.since and renewed.expires_at > lease.expires_at
    assert await leases(shelf).read() == [renewed]


async def test_the_lease_of_one_that_died_expires() -> None:
    shelf = Shelf()
    await leases(shelf).take(Span(2, 4))
    shelf.now += LEASE_S + 1
    assert await leases(shelf).read() == []


async def test_nobody_holds_a_lease_for_ever() -> None:
    shelf = Shelf()
    mine = leases(shelf)
    lease = await mine.take(Span(2, 4))
    for _ in range(int((LONGEST_LEASE_S - LEASE_S) / 30)):
        shelf.now += 30
        lease = await mine.renew(lease)
    shelf.now += 30
    with pytest.raises(Unreachable):
        await mine.renew(lease)


@pytest.mark.parametrize(
    ("since", "lasts", "state", "reason"),
    [
        (AHEAD_S + 1, 60.0, PeerState.JOINING, "a lease of"),  # in the future: it would come before nobody
        (-LONGEST_LEASE_S, 60.0, PeerState.JOINING, "a lease of"),  # older than all others
        (0.0, 400.0, PeerState.JOINING, "expires"),
        (0.0, 60.0, PeerState.SERVING, "says SERVING"),
    ],
)
def test_what_every_node_refuses(since: float, lasts: float, state: PeerState, reason: str) -> None:
    identity, now = Identity.generate(), 1_800_000_000.0
    record = PeerRecord(
        peer_id=identity.peer_id, span=Span(0, 2), state=state, sequence=int(1000 * (now + since)),
        expires_at=now + lasts,
    )  # fmt: skip
    data = encode_record(record, identity=identity, swarm_id=SWARM, key=KEY)
    with pytest.raises(ProtocolError, match=reason):
        RecordPolicy(SWARM).check(KEY, identity.peer_id, data, now)


def test_nobody_takes_a_lease_for_another() -> None:
    signer, now = Identity.generate(), 1_800_000_000.0
    record = PeerRecord(
        peer_id=signer.peer_id, span=Span(0, 2), state=PeerState.JOINING, sequence=int(1000 * now), expires_at=now + 60
    )
    data = encode_record(record, identity=signer, swarm_id=SWARM, key=KEY)
    RecordPolicy(SWARM).check(KEY, signer.peer_id, data, now)
    with pytest.raises(ProtocolError, match="signature"):
        RecordPolicy(SWARM).check(KEY, Identity.generate().peer_id, data, now)
