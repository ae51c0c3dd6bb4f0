from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.coordinates import Coordinate
from routing.errors import BadInput, ProtocolError
from routing.types import PeerRecord, PeerState, Span
from swarm.identity import Identity
from swarm.records import (
    DOMAIN,
    DTYPES,
    VALUE_BYTES,
    RecordPolicy,
    _message,
    _unpack_place,
    block_key,
    decode_record,
    encode_record,
)

SWARM = bytes(range(32))
NOW = 1_800_000_000.0
ALICE = Identity.generate()
BOB = Identity.generate()
KEY = block_key(SWARM, 3)


def record(identity: Identity = ALICE, **changes) -> PeerRecord:
    plain = PeerRecord(
        peer_id=identity.peer_id,
        span=Span(0, 10),
        addresses=("127.0.0.1:4001",),
        sequence=int(NOW * 1000),
        expires_at=NOW + 60,
    )
    return replace(plain, **changes)


def signed(identity: Identity = ALICE, key: str = KEY, swarm: bytes = SWARM, **changes) -> bytes:
    return encode_record(record(identity, **changes), identity=identity, swarm_id=swarm, key=key)


def value_of(data: bytes) -> bytes:
    return msgspec.msgpack.decode(data)[2]


@given(
    start=st.integers(0, 255),
    length=st.integers(1, 256),
    state=st.sampled_from(PeerState),
    speeds=st.tuples(*[st.floats(0, 1000)] * 3),
    caches=st.tuples(*[st.integers(0, 2**40)] * 2),
    addresses=st.lists(
        st.sampled_from(["10.0.0.1:1", "[2001:db8::1]:65535", "[FE80::1%eth0]:9", "a-host.example:4001"]),
        max_size=4,
    ),
    dtype=st.sampled_from(["", *DTYPES.values()]),
    region=st.from_regex("([a-z0-9-]{1,16})?", fullmatch=True),
    int8=st.floats(0, 1e-3),
    more=st.integers(0, 99),
)
def test_a_record_comes_back_as_it_was(start, length, state, speeds, caches, addresses, dtype, region, int8, more):
    before = record(
        span=Span(start, start + length),
        state=state,
        addresses=tuple(addresses),
        decode_s=speeds[0],
        prefill_s=speeds[1],
        queue_s=speeds[2],
        cache_free=caches[0],
        cache_total=caches[1],
        dtype=dtype,
        region=region,
        int8_value_s=int8,
        loads=Span(start, start + length + more) if more else None,
    )
    data = encode_record(before, identity=ALICE, swarm_id=SWARM, key=KEY)
    after = decode_record(data, swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id)
    rounded = {name: getattr(after, name) for name in ("decode_s", "prefill_s", "queue_s", "int8_value_s")}
    assert after == replace(before, **rounded)
    assert after.int8_value_s == pytest.approx(before.int8_value_s, abs=1e-12)
    assert after.decode_s == pytest.approx(before.decode_s, abs=1e-9)
    assert after.prefill_s == pytest.approx(before.prefill_s, abs=1e-9)
    assert after.queue_s == pytest.approx(before.queue_s, abs=1e-6)


def test_the_worst_realistic_record_fits_in_200_bytes():
    data = signed(
        key=block_key(SWARM, 255),
        span=Span(128, 256),
        state=PeerState.DRAINING,
        addresses=(
            "[2001:db8:85a3:1234:5678:8a2e:1370:7334]:65535",
            "[fd12:3456:789a:bcde:f012:3456:789a:bcde]:65535",
            "203.0.113.255:65535",
            "192.168.255.254:65535",
            "a-volunteer-with-a-rather-long-host-name.dyn.example.org:65535",
        ),
        decode_s=12.345678901,
        prefill_s=1.234567891,
        queue_s=3600.123456,
        cache_free=2**40,
        cache_total=2**41,
        place=Coordinate(place=(9.1, -9.2, 9.3), height=9.4, error=0.99),
        dtype="bfloat16",
        region="europe-northwest",
        int8_value_s=123.456e-9,
        loads=Span(128, 1000),
    )
    assert len(value_of(data)) <= VALUE_BYTES
    # Ten thousand of them with their subkeys under one key stay within hivemind's 4 MiB.
    assert len(data) + len(ALICE.peer_id) + 16 < 4 * 2**20 / 10_000


def test_where_a_peer_is_comes_back_to_the_microsecond():
    place = Coordinate(place=(0.012345, -0.1, 0.0), height=0.003, error=0.25)
    back = decode_record(signed(place=place), swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id)
    assert back.place is not None and back.place.numbers == pytest.approx(place.numbers, abs=1e-6)
    assert decode_record(signed(), swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id).place is None


@pytest.mark.parametrize("packed", [(1,), (2**62,) * 5, (0, 0, 0, -1, 1), (0, 0, 0, 1, -1), (1,) * 9])
def test_a_place_that_is_none_spoils_no_record(packed):
    assert _unpack_place(packed) is None


def test_what_an_older_peer_does_not_say_and_what_nobody_knows_is_not_stated():
    fields = msgspec.msgpack.decode(value_of(signed(dtype="float32", region="eu", loads=Span(0, 20))))[:-4]
    for changed in (fields, [*fields, 99, "EU!"], [*fields, 0, "", 0], [*fields, 0, "", 0, 10]):
        value = msgspec.msgpack.encode(changed)
        message = _message(SWARM, KEY, ALICE.peer_id, 1, NOW, value)
        data = msgspec.msgpack.encode([1, NOW, value, ALICE.sign(DOMAIN, message)])
        back = decode_record(data, swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id)
        assert (back.dtype, back.region, back.span, back.int8_value_s, back.loads) == ("", "", Span(0, 10), 0.0, None)


def test_a_record_that_would_not_fit_is_refused_by_its_maker():
    with pytest.raises(BadInput, match="bytes of 200"):
        signed(addresses=("x" * 200 + ":1",))
    with pytest.raises(BadInput, match="addresses"):
        signed(addresses=("127.0.0.1:1",) * 9)


@pytest.mark.parametrize("loads", ["0:10", "0:9", "1:20"])
def test_what_is_still_to_be_loaded_comes_behind_what_is_served(loads):
    with pytest.raises(BadInput, match="not more than 0:10"):
        signed(loads=Span.parse(loads))


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:0", ":80", "host:70000", "host:x"])
def test_an_address_that_nobody_can_dial_is_refused(address):
    with pytest.raises(BadInput, match="HOST:PORT"):
        signed(addresses=(address,))


@pytest.mark.parametrize("change", [{"decode_s": math.nan}, {"queue_s": -1.0}, {"expires_at": math.inf}])
def test_numbers_that_mean_nothing_are_refused(change):
    with pytest.raises(BadInput):
        signed(**change)


def test_nobody_signs_for_another():
    with pytest.raises(BadInput, match="cannot sign"):
        encode_record(record(BOB), identity=ALICE, swarm_id=SWARM, key=KEY)


@given(at=st.integers(0, 10_000), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed(at, change):
    data = bytearray(signed())
    data[at % len(data)] ^= change
    with pytest.raises(ProtocolError):
        decode_record(bytes(data), swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id)


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        decode_record(data, swarm_id=SWARM, key=KEY, subkey=ALICE.peer_id)


def test_a_signature_holds_for_its_key_swarm_and_signer_alone():
    data = signed()
    for change in (
        {"key": block_key(SWARM, 4)},
        {"swarm_id": bytes(32)},
        {"subkey": BOB.peer_id},
        {"subkey": "nobody"},
    ):
        with pytest.raises(ProtocolError):
            decode_record(data, **{"swarm_id": SWARM, "key": KEY, "subkey": ALICE.peer_id, **change})


def refuses(policy: RecordPolicy, reason: str, data: bytes, **changes) -> None:
    arguments = {"key": KEY, "subkey": ALICE.peer_id, "now": NOW, **changes}
    with pytest.raises(ProtocolError, match=reason):
        policy.check(arguments.pop("key"), arguments.pop("subkey"), data, **arguments)


def test_the_policy_takes_a_good_record():
    policy = RecordPolicy(SWARM)
    assert policy.check(KEY, ALICE.peer_id, signed(), NOW, NOW + 60) == record()
    assert policy.check(KEY, ALICE.peer_id, signed(), NOW) == record()


def test_what_every_storing_node_refuses():
    policy = RecordPolicy(SWARM)
    refuses(policy, "not a key of this swarm", signed(key="elsewhere"), key="elsewhere")
    refuses(policy, "without subkey", signed(), subkey=None)
    refuses(policy, "not a record", b"plain")
    refuses(policy, "signature", signed(), subkey=BOB.peer_id)
    refuses(policy, "signature", signed(key=block_key(SWARM, 4)))
    refuses(policy, "signature", signed(swarm=bytes(32)))
    refuses(policy, "expires 301 s", signed(expires_at=NOW + 301))
    refuses(policy, "expires 0 s", signed(expires_at=NOW))
    refuses(policy, "did not sign", signed(), expires_at=NOW + 61)
    refuses(policy, "announces blocks 5:9", signed(span=Span(5, 9)))
    assert policy.check(KEY, ALICE.peer_id, signed(expires_at=NOW + 300), NOW).span == Span(0, 10)


def test_a_nan_expiry_is_refused():
    sequence, _, value, signature = msgspec.msgpack.decode(signed())
    refuses(RecordPolicy(SWARM), "expires", msgspec.msgpack.encode((sequence, math.nan, value, signature)))


def test_an_older_sequence_number_is_refused_however_late_it_expires():
    policy = RecordPolicy(SWARM)
    policy.check(KEY, ALICE.peer_id, signed(sequence=8), NOW)
    refuses(policy, "older", signed(sequence=7, expires_at=NOW + 299))
    policy.check(KEY, ALICE.peer_id, signed(sequence=8), NOW)  # the same again is no fault
    policy.check(KEY, ALICE.peer_id, signed(sequence=9), NOW)
    refuses(policy, "older", signed(sequence=8))


def test_sequence_numbers_are_counted_for_each_entry_apart():
    policy = RecordPolicy(SWARM)
    policy.check(KEY, ALICE.peer_id, signed(sequence=8), NOW)
    policy.check(KEY, BOB.peer_id, signed(BOB, sequence=7), NOW)
    other = block_key(SWARM, 4)
    policy.check(other, ALICE.peer_id, signed(key=other, sequence=7), NOW)


def test_a_forged_record_does_not_raise_the_sequence_number():
    policy = RecordPolicy(SWARM)
    sequence, expires_at, value, signature = msgspec.msgpack.decode(signed(sequence=7))
    refuses(policy, "signature", msgspec.msgpack.encode((sequence + 5, expires_at, value, signature)))
    policy.check(KEY, ALICE.peer_id, signed(sequence=7), NOW)


def test_a_known_signature_is_not_taken_for_other_bytes():
    policy = RecordPolicy(SWARM)
    policy.check(KEY, ALICE.peer_id, signed(), NOW)
    sequence, expires_at, value, signature = msgspec.msgpack.decode(signed())
    longer = msgspec.msgpack.encode((sequence, expires_at + 1, value, signature))
    refuses(policy, "signature", longer)


def test_who_wants_to_hear_of_news_does_once_for_each_record_and_key():
    policy, heard = RecordPolicy(SWARM), []
    policy.on_news.append(heard.append)
    for data in (signed(), signed(), signed(sequence=record().sequence + 1, state=PeerState.DRAINING)):
        policy.check(KEY, ALICE.peer_id, data, NOW)
    with pytest.raises(ProtocolError):
        policy.check(KEY, ALICE.peer_id, signed(), NOW)
    assert [each.state for each in heard] == [PeerState.SERVING, PeerState.DRAINING]


def test_a_full_key_takes_no_more_peers_until_some_are_forgotten():
    policy = RecordPolicy(SWARM, most_peers=2)
    third = Identity.generate()
    for identity in (ALICE, BOB):
        policy.check(KEY, identity.peer_id, signed(identity), NOW)
    refuses(policy, "already", signed(third), subkey=third.peer_id)
    policy.check(KEY, ALICE.peer_id, signed(sequence=int(NOW * 1000) + 1), NOW)  # those within may renew
    later = NOW + 400
    policy.check(KEY, third.peer_id, signed(third, expires_at=later + 60), later)
