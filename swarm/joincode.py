"""The join code: all that a newcomer needs to find a swarm, as one line of letters and digits.

Owns the code's layout and its checksum. Knows nothing of what answers at the addresses.

Layout, in base58: version u8, packing u8 (0 plain, 1 raw deflate), body, checksum. The body is msgpack:
bootstrap addresses, fingerprint, swarm key, invite. The checksum is 6 bytes of BLAKE2b over all before it.
"""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass
from hashlib import blake2b

import base58
import msgspec

from routing.errors import BadInput, BadJoinCode

VERSION = 1
FINGERPRINT_BYTES = 32
_CHECKSUM_BYTES = 6
_MOST_CHARACTERS = 4096  # base58 decoding is quadratic: refuse long text before decoding
_MOST_BODY_BYTES = 16 * 1024
_MOST_ADDRESSES = 16
_ED25519_ID = bytes.fromhex("002408011220")  # how the bytes of every Ed25519 peer id begin
_IP_BYTES = {"ip4": 4, "ip6": 16}


class _Body(msgspec.Struct, array_like=True, frozen=True):
    bootstrap: tuple[bytes, ...]
    fingerprint: bytes
    swarm_key: bytes = b""
    invite: bytes = b""


@dataclass(frozen=True, kw_only=True)
class JoinCode:
    """Where a swarm can be reached, which one it is, and the right to enter. Raises BadInput.

    `bootstrap`: multiaddrs that end in `/p2p/PEER_ID`. `fingerprint`: 32 bytes, of the manifest. `swarm_key`:
    the public key of a private swarm, empty in an open one.
    """

    bootstrap: tuple[str, ...]
    fingerprint: bytes
    swarm_key: bytes = b""
    invite: bytes = b""

    def __post_init__(self) -> None:
        if not 0 < len(self.bootstrap) <= _MOST_ADDRESSES:
            raise BadInput(f"a join code holds 1 to {_MOST_ADDRESSES} addresses, not {len(self.bootstrap)}")
        for address in self.bootstrap:
            if not address.startswith("/") or "/p2p/" not in address:
                raise BadInput(f"{address[:80]!r} is not a multiaddr that ends in /p2p/PEER_ID")
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise BadInput(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")

    def __str__(self) -> str:
        return self.encode()

    def encode(self) -> str:
        """One line of letters and digits. Raises BadInput if there is more in it than a code can hold."""
        packed = tuple(_pack(address) for address in self.bootstrap)
        body = msgspec.msgpack.encode(_Body(packed, self.fingerprint, self.swarm_key, self.invite))
        size, deflated = len(body), _deflate(body)
        packing, body = (1, deflated) if len(deflated) < len(body) else (0, body)
        data = bytes((VERSION, packing)) + body
        text = base58.b58encode(data + _checksum(data)).decode()
        if len(text) > _MOST_CHARACTERS or size > _MOST_BODY_BYTES:
            raise BadInput(f"{size} bytes in {len(text)} characters are more than a join code holds")
        return text

    @classmethod
    def parse(cls, text: str) -> JoinCode:
        """The code in `text`; white space around it is forgiven. Raises BadJoinCode."""
        text = text.strip()
        if not text:
            raise BadJoinCode("the join code is empty")
        if len(text) > _MOST_CHARACTERS:
            raise BadJoinCode(f"{len(text)} characters are too many for a join code")
        try:
            data = base58.b58decode(text)
        except ValueError:
            raise BadJoinCode("the join code holds a character that no join code has") from None
        data, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
        if len(data) < 2 or checksum != _checksum(data):
            raise BadJoinCode("the join code has a typing error, or a part of it is missing")
        if data[0] != VERSION:
            raise BadJoinCode(
                f"the join code is of version {data[0]}, this program reads version {VERSION}",
                advice="Install the version of this program that the others in the swarm run.",
            )
        try:
            body = msgspec.msgpack.decode(_inflate(data[2:]) if data[1] else data[2:], type=_Body)
            return cls(
                bootstrap=tuple(_unpack(packed) for packed in body.bootstrap),
                fingerprint=body.fingerprint,
                swarm_key=body.swarm_key,
                invite=body.invite,
            )
        except (msgspec.MsgspecError, zlib.error, ValueError, BadInput) as error:
            raise BadJoinCode(f"the join code was not made by this program: {error}") from None


def _checksum(data: bytes) -> bytes:
    return blake2b(data, digest_size=_CHECKSUM_BYTES, person=b"swarm-join-1").digest()


def _deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(body) + packer.flush()


def _inflate(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(-15)
    body = unpacker.decompress(data, _MOST_BODY_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("its body is too long or cut")
    return body


def _pack(address: str) -> bytes:
    """`/ip4|ip6/HOST/tcp/PORT/p2p/ED25519_ID` as 39 or 51 bytes; any other form stays text, slash first."""
    parts = address.split("/")
    if len(parts) != 7 or parts[1] not in _IP_BYTES or parts[3] != "tcp" or parts[5] != "p2p":
        return address.encode()
    try:
        host = ipaddress.ip_address(parts[2]).packed
        peer = base58.b58decode(parts[6])
        port = int(parts[4]).to_bytes(2, "big")
        packed = bytes((len(host),)) + host + port + peer.removeprefix(_ED25519_ID)
        if _unpack(packed) == address:
            return packed
    except (ValueError, OverflowError):
        pass  # not of that form after all
    return address.encode()


def _unpack(packed: bytes) -> str:
    if packed.startswith(b"/"):
        return packed.decode()
    size = packed[0] if packed else 0
    kind = {length: name for name, length in _IP_BYTES.items()}.get(size)
    if kind is None or len(packed) != 1 + size + 2 + 32:
        raise ValueError("it holds a damaged address")
    host = ipaddress.ip_address(packed[1 : 1 + size])
    port = int.from_bytes(packed[1 + size : 3 + size], "big")
    peer = base58.b58encode(_ED25519_ID + packed[3 + size :]).decode()
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"
