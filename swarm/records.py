"""What a peer says of itself in the DHT: its bytes, its signature, and what every node refuses.

Owns the layout of a record and the policy of storing nodes and readers. Pure: the time is an argument, and
nothing here knows hivemind or the network. A node keeps records for the block keys of its own swarm alone, and for the
key of its leases: records of peers that are about to serve other blocks.
"""

from __future__ import annotations

import ipaddress
import math
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from routing.coordinates import Coordinate
from routing.errors import BadInput, ProtocolError
from routing.types import PeerId, PeerRecord, PeerState, Span, parse_region
from swarm.identity import Identity, fields, verify

DOMAIN = b"swarm-record-1"
VALUE_BYTES = 200  # so that one key can hold ten thousand peers within hivemind's 4 MiB
MOST_BLOCKS = 256
HORIZON_S = 300.0
LONGEST_LEASE_S = 900.0  # from its first moment: who loads for longer begins anew
AHEAD_S = 5.0  # another clock may be
MOST_ADDRESSES = 8
_DTYPES = ("float32", "bfloat16")
# That blocks compute in, and how their weights are quantized; any other number: not stated.
DTYPES = dict(enumerate((f"{d}{q}" for q in ("", "/int8", "/int4", "/nf4") for d in _DTYPES), start=1))

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Value(msgspec.Struct, array_like=True, frozen=True):
    """At most 200 bytes of msgpack. Fields behind the last one are skipped: later versions may add."""

    start: _Count
    end: _Count
    state: PeerState
    addresses: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MOST_ADDRESSES)]
    decode_ns: _Count
    prefill_ns: _Count
    queue_us: _Count
    cache_free: _Count
    cache_total: _Count
    place: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)] = ()  # three axes, height (us), error (1/1000)
    dtype: _Count = 0  # see DTYPES
    region: str = ""
    int8_ps: _Count = 0
    loads_to: _Count = 0  # the end of what it will serve once all is loaded; 0: it is


class _Signed(msgspec.Struct, array_like=True, frozen=True):
    sequence: _Count
    expires_at: float
    value: bytes
    signature: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_signed = msgspec.msgpack.Decoder(_Signed).decode
_decode_value = msgspec.msgpack.Decoder(_Value).decode


def block_key(swarm_id: bytes, block: int) -> str:
    """The DHT key under which the peers that serve `block` are found."""
    return f"swarm/{swarm_id.hex()}/{block}"


def leases_key(swarm_id: bytes) -> str:
    """The DHT key under which peers say where they are about to move: JOINING there, or LEAVING if it is over. The
    sequence number of a lease is the moment at which it was taken, in milliseconds, and stays when it is renewed."""
    return f"swarm/{swarm_id.hex()}/leases"


def encode_record(record: PeerRecord, *, identity: Identity, swarm_id: bytes, key: str) -> bytes:
    """`record` as signed bytes for the entry (`key`, the signer's peer id). Raises BadInput.

    Speeds are kept to the nanosecond, that of the codec to the picosecond, the queue to the microsecond. The record
    must be the signer's own, with its sequence number and expiry set.
    """
    if record.peer_id != identity.peer_id:
        raise BadInput(f"{identity.peer_id} cannot sign a record of {record.peer_id}")
    if len(record.addresses) > MOST_ADDRESSES:
        raise BadInput(f"a record holds at most {MOST_ADDRESSES} addresses, not {len(record.addresses)}")
    if (loads := record.loads) and not (loads.start == record.span.start and loads.end > record.span.end):
        raise BadInput(f"blocks {loads} are not more than {record.span}, from the same one on")
    if record.sequence < 0 or not math.isfinite(record.expires_at):
        raise BadInput("a record needs a sequence number of 0 or more and a finite expiry")
    claims = _Value(
        start=record.span.start,
        end=record.span.end,
        state=record.state,
        addresses=tuple(_pack_address(address) for address in record.addresses),
        decode_ns=_scaled(record.decode_s, 1e9),
        prefill_ns=_scaled(record.prefill_s, 1e9),
        queue_us=_scaled(record.queue_s, 1e6),
        cache_free=max(0, record.cache_free),
        cache_total=max(0, record.cache_total),
        place=_pack_place(record.place),
        dtype=next((number for number, name in DTYPES.items() if name == record.dtype), 0),
        region=record.region,
        int8_ps=_scaled(record.int8_value_s, 1e12),
        loads_to=record.loads.end if record.loads is not None else 0,
    )
    value = _encode(claims)
    if len(value) > VALUE_BYTES:  # the rest matters more
        value = _encode(msgspec.structs.replace(claims, place=()))
    if len(value) > VALUE_BYTES:
        raise BadInput(f"the record takes {len(value)} bytes of {VALUE_BYTES}; announce fewer addresses")
    expires_at = float(record.expires_at)
    message = _message(swarm_id, key, record.peer_id, record.sequence, expires_at, value)
    return _encode(_Signed(record.sequence, expires_at, value, identity.sign(DOMAIN, message)))


def decode_record(data: bytes, *, swarm_id: bytes, key: str, subkey: PeerId) -> PeerRecord:
    """The record in `data`, which `subkey` must have signed for this key and swarm. Raises ProtocolError."""
    signed = _parse(data)
    message = _message(swarm_id, key, subkey, signed.sequence, signed.expires_at, signed.value)
    verify(subkey, DOMAIN, message, signed.signature)
    return _record(signed, subkey)


@dataclass(slots=True)
class _Seen:
    record: PeerRecord
    data: bytes
    until: float  # after this no record with a lower sequence number can be alive
    version: int  # of the policy, when this came


class RecordPolicy:
    """What a storing node and a reader refuse. Remembers the newest record seen of each entry, and their order.

    Refused are: keys that are neither blocks nor the leases of this swarm, plain values without subkey, a wrong
    signature, a subkey that is not the signer, an expiry in the past or more than `horizon_s` ahead, a sequence number
    below one already seen, a span without the key's block, more than `most_peers` peers under one key; leases that
    begin in the future or last longer than `LONGEST_LEASE_S`.
    """

    def __init__(
        self,
        swarm_id: bytes,
        *,
        most_blocks: int = MOST_BLOCKS,
        horizon_s: float = HORIZON_S,
        most_peers: int = 10_000,
    ):
        self.swarm_id = swarm_id
        self._blocks: dict[str, int | None] = {block_key(swarm_id, block): block for block in range(most_blocks)}
        self._blocks[leases_key(swarm_id)] = None
        self._horizon_s = horizon_s
        self._most_peers = most_peers
        self.version = 0  # grows with each record that is news
        self.on_news: list[Callable[[PeerRecord], None]] = []  # told each of them, once for each key
        self._seen: dict[str, dict[PeerId, _Seen]] = {key: {} for key in self._blocks}  # the newest last
        self._pruned_at = dict.fromkeys(self._blocks, -math.inf)

    def __iter__(self) -> Iterator[str]:
        """The keys that this node stores."""
        return iter(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def check(
        self, key: str, subkey: PeerId | None, data: bytes, now: float, expires_at: float | None = None
    ) -> PeerRecord:
        """The record in `data`, if it may be stored or used at `now` (DHT time). Raises ProtocolError.

        `expires_at` is the expiry that the DHT keeps for the entry, if known: it must be the signed one.
        """
        if key not in self._blocks:
            raise ProtocolError(f"{key!r} is not a key of this swarm")
        if not subkey:
            raise ProtocolError(f"a plain value without subkey under {key!r}")
        peers = self._seen[key]
        seen = peers.get(subkey)
        known = seen is not None and seen.data == data  # verified before: every reader meets it many times
        signed = seen.record if seen is not None and known else _parse(data)
        if not now < signed.expires_at <= now + self._horizon_s:  # refuses NaN too
            raise ProtocolError(f"a record of {subkey} expires {signed.expires_at - now:.0f} s from now")
        if expires_at is not None and expires_at != signed.expires_at:
            raise ProtocolError(f"a record of {subkey} is kept with an expiry that it did not sign")
        if seen is not None and signed.sequence < seen.record.sequence:
            raise ProtocolError(f"record {signed.sequence} of {subkey} is older than {seen.record.sequence}")
        if seen is not None and known:
            seen.until = now + self._horizon_s
            return seen.record
        record = decode_record(data, swarm_id=self.swarm_id, key=key, subkey=subkey)
        if (block := self._blocks[key]) is None:
            _check_lease(record, now)
        elif block not in record.span:
            raise ProtocolError(f"{subkey} announces blocks {record.span} under {key!r}")
        if seen is None:
            self._make_room(key, now)
        self.version += 1
        peers.pop(subkey, None)
        peers[subkey] = _Seen(record, data, now + self._horizon_s, self.version)
        for tell in self.on_news:
            tell(record)
        return record

    def changes(self, key: str, since: int, now: float) -> list[tuple[PeerId, bytes]]:
        """The living records that came after version `since` and whose span *begins* with the key's block.

        Whoever asks so for all keys gets each peer's record once, and not once for each block of its span.
        """
        found = []
        for peer_id, seen in reversed(self._seen[key].items()):
            if seen.version <= since:
                break
            if seen.record.span.start == self._blocks[key] and seen.record.expires_at > now:
                found.append((peer_id, seen.data))
        return found

    def _make_room(self, key: str, now: float) -> None:
        peers = self._seen[key]
        if now - self._pruned_at[key] > self._horizon_s / 5:
            self._pruned_at[key] = now
            for gone in [peer for peer, seen in peers.items() if seen.until < now]:
                del peers[gone]
        if len(peers) >= self._most_peers:
            raise ProtocolError(f"{len(peers)} peers under {key!r} already")


def _check_lease(record: PeerRecord, now: float) -> None:
    since = record.sequence / 1000
    if not since <= now + AHEAD_S or record.expires_at > since + LONGEST_LEASE_S:
        raise ProtocolError(f"a lease of {record.peer_id} from {since - now:.0f} s to {record.expires_at - now:.0f} s")
    if record.state not in (PeerState.JOINING, PeerState.LEAVING):
        raise ProtocolError(f"a lease of {record.peer_id} that says {record.state.name}")


def _parse(data: bytes) -> _Signed:
    try:
        signed = _decode_signed(data)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a record: {error}") from None
    if len(signed.value) > VALUE_BYTES:
        raise ProtocolError(f"a record of {len(signed.value)} bytes; at most {VALUE_BYTES} are allowed")
    return signed


def _record(signed: _Signed, peer_id: PeerId) -> PeerRecord:
    try:
        value = _decode_value(signed.value)
        return PeerRecord(
            peer_id=peer_id,
            span=Span(value.start, value.end),
            state=value.state,
            addresses=tuple(_unpack_address(packed) for packed in value.addresses),
            sequence=signed.sequence,
            expires_at=signed.expires_at,
            decode_s=value.decode_ns / 1e9,
            prefill_s=value.prefill_ns / 1e9,
            queue_s=value.queue_us / 1e6,
            cache_free=value.cache_free,
            cache_total=value.cache_total,
            place=_unpack_place(value.place),
            dtype=DTYPES.get(value.dtype, ""),
            region=_unpack_region(value.region),
            int8_value_s=value.int8_ps / 1e12,
            loads=Span(value.start, value.loads_to) if value.loads_to > value.end else None,
        )
    except (msgspec.MsgspecError, BadInput, UnicodeDecodeError) as error:
        raise ProtocolError(f"a damaged record of {peer_id}: {error}") from None


def _message(
    swarm_id: bytes, key: str, subkey: PeerId, sequence: int, expires_at: float, value: bytes
) -> bytes:
    return fields(swarm_id, key.encode(), subkey.encode(), struct.pack("<Qd", sequence, expires_at), value)


def _scaled(seconds: float, unit: float) -> int:
    if not 0 <= seconds < 1e6:
        raise BadInput(f"a record cannot hold {seconds} s")
    return round(seconds * unit)


def _pack_place(place: Coordinate | None) -> tuple[int, ...]:
    if place is None:
        return ()
    *seconds, error = place.numbers
    return (*(round(each * 1e6) for each in seconds), round(min(error, 1.0) * 1e3))


def _unpack_place(packed: tuple[int, ...]) -> Coordinate | None:
    """None, too, for what is no coordinate: the rest of the record is as good without."""
    if not packed:
        return None
    *seconds, error = packed
    return Coordinate.parse([*(each / 1e6 for each in seconds), error / 1e3])


def _unpack_region(text: str) -> str:
    """Empty, too, for what names no region: the rest of the record is as good without."""
    try:
        return parse_region(text)
    except BadInput:
        return ""


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise BadInput(f"{address[:80]!r} is not HOST:PORT")
    return host, int(port)


def _pack_address(address: str) -> bytes:
    """Length of the IP address (4 or 16), its bytes, the port; or, for a host name, 0 and the text."""
    host, port = _split_address(address)
    with suppress(ValueError):
        raw = ipaddress.ip_address(host).packed
        packed = bytes((len(raw),)) + raw + port.to_bytes(2, "big")
        if _unpack_address(packed) == address:
            return packed
    return b"\0" + address.encode()


def _unpack_address(packed: bytes) -> str:
    kind, rest = packed[:1], packed[1:]
    if kind == b"\0":
        address = rest.decode()
    elif kind in (b"\4", b"\x10") and len(rest) == kind[0] + 2:
        host, port = ipaddress.ip_address(rest[:-2]), int.from_bytes(rest[-2:], "big")
        address = f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"
    else:
        raise BadInput(f"a damaged address of {len(packed)} bytes")
    _split_address(address)
    return address
