"""Who a process is: an Ed25519 key, its libp2p peer id, signatures under a domain, secrets from the key.

The peer id holds the public key itself, so a signature is checked with nothing but its maker's id. Every
signature is made under a domain string of its own, so that none can be replayed for another purpose.
Knows no connection, no record, no frame.
"""

from __future__ import annotations

import os
import secrets
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from routing.errors import BadInput, ProtocolError, StartError
from routing.types import PeerId

SIGNATURE_BYTES = 64
_PRIVATE_HEADER = bytes.fromhex("08011240")  # protobuf: type Ed25519, then 64 bytes: seed, public key
_PUBLIC_HEADER = bytes.fromhex("002408011220")  # identity multihash of the public key's protobuf
_FILE_BYTES = len(_PRIVATE_HEADER) + 64
_LONGEST_ID = 64  # base58 decoding is quadratic: refuse long text before decoding


class Identity:
    """A private key with the peer id that follows from it."""

    def __init__(self, key: Ed25519PrivateKey):
        self._key = key
        self._seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        self._public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: PeerId = base58.b58encode(_PUBLIC_HEADER + self._public).decode()

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """64 bytes that `verify(self.peer_id, domain, message, ...)` accepts."""
        return self._key.sign(_under(domain, message))

    def secret(self, label: bytes) -> bytes:
        """32 secret bytes that follow from the key and `label` (keyed BLAKE2b); the same in every process."""
        return blake2b(label, key=self._seed, person=b"swarm-secret-1", digest_size=32).digest()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """The identity in the file `path`, which is written, with mode 0600, if it is missing.

        The format is libp2p's for Ed25519 private keys, so that p2pd reads the same file. Processes
        that start at once agree on one identity: the first to publish its file wins.
        Raises BadInput if the file is not an Ed25519 identity, or cannot be read; StartError if it cannot be written.
        """
        target = Path(path)
        for _ in range(2):
            try:
                return cls._parse(target.read_bytes(), target)
            except FileNotFoundError:
                cls.generate()._publish(target, replace=False)
            except OSError as error:
                raise BadInput(f"cannot read the identity file {target}: {error.strerror}") from error
        raise BadInput(f"the identity file {target} vanished while it was being read")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to `path`, mode 0600, whole or not at all, over what was there. Raises StartError."""
        self._publish(Path(path), replace=True)

    @classmethod
    def _parse(cls, data: bytes, source: Path) -> Identity:
        if len(data) != _FILE_BYTES or not data.startswith(_PRIVATE_HEADER):
            raise BadInput(
                f"{source} is not an Ed25519 identity file",
                advice="Name another file; a new identity is written where there is none.",
            )
        identity = cls(Ed25519PrivateKey.from_private_bytes(data[4:36]))
        if identity._public != data[36:]:
            raise BadInput(f"{source} is damaged: its public key does not belong to its private key")
        return identity

    def _publish(self, target: Path, *, replace: bool) -> None:
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            # O_EXCL and the mode at creation: nobody else can read the key at any moment.
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_PRIVATE_HEADER + self._seed + self._public)
                    file.flush()
                    os.fsync(file.fileno())
                if replace:
                    os.replace(draft, target)
                else:
                    os.link(draft, target)
            finally:
                draft.unlink(missing_ok=True)
        except FileExistsError:
            pass  # another process was first; its identity is the one to use
        except OSError as error:
            raise StartError(
                f"cannot write the identity file {target}: {error.strerror}",
                advice="See that it has room and may be written, or set HOME to another folder.",
            ) from error


def verify(peer_id: PeerId, domain: bytes, message: bytes, signature: bytes) -> None:
    """Return if `peer_id` signed `message` under `domain`. Raises ProtocolError."""
    try:
        public_key_of(peer_id).verify(signature, _under(domain, message))
    except InvalidSignature:
        raise ProtocolError(f"a signature that {peer_id} is said to have made is not its own") from None


@lru_cache(maxsize=16384)  # more than the peers of a large swarm: each renews four times a minute
def public_key_of(peer_id: PeerId) -> Ed25519PublicKey:
    """The key inside an Ed25519 peer id. Raises ProtocolError if the text is not exactly one."""
    if len(peer_id) <= _LONGEST_ID:
        try:
            raw = base58.b58decode(peer_id)
        except ValueError:
            raw = b""
        if len(raw) == 38 and raw.startswith(_PUBLIC_HEADER) and base58.b58encode(raw).decode() == peer_id:
            return Ed25519PublicKey.from_public_bytes(raw[6:])
    raise ProtocolError(f"{peer_id[:_LONGEST_ID]!r} is not an Ed25519 peer id")


def fields(*parts: bytes) -> bytes:
    """Byte strings as one, each behind its length (u32, little-endian): no two lists give the same."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _under(domain: bytes, message: bytes) -> bytes:
    """What is signed: the domain behind its length (one byte), then the message."""
    if not 0 < len(domain) < 256:
        raise BadInput("a signature needs a domain of 1 to 255 bytes")
    return bytes([len(domain)]) + domain + message
