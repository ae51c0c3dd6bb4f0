"""Who is at the other end: the certificate, the hello and the verdict, before the first frame. Sans-IO.

The dialler knows whom it wants: the listener's self-signed certificate carries its identity's signature, or,
on a stream, the channel itself has authenticated it. The listener learns who dialled from the hello, which is
signed over the listener's nonce and bound to this very channel. A verdict ends it, so that two processes that
dial each other at once settle which connection stays before any frame is sent. Knows no socket, and not
who is welcome.
"""

from __future__ import annotations

import secrets
import ssl
import struct
import tempfile
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from hashlib import sha256
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
)

from routing.errors import ProtocolError
from routing.types import PeerId
from swarm.identity import SIGNATURE_BYTES, Identity, fields, verify
from swarm.wire import VERSION

MAGIC = b"SWRM"
NONCE_BYTES = 32
INSTANCE_BYTES = 16
ROLES = ("client", "peer")
SERVER_DOMAIN = b"swarm-tls-server-1"
CLIENT_DOMAIN = b"swarm-tls-client-1"
SIGNATURE_OID = x509.ObjectIdentifier("2.25.180217342718406823107463512809176490213")  # a UUID: no registry needed

_PREFACE = struct.Struct("<4sH")  # magic, version; behind the listener's come its instance and a nonce
_HELLO_LENGTH = struct.Struct("<H")
_VERDICT = struct.Struct("<BH")  # code, length of the text that follows
_LONGEST_HELLO = 512
_LONGEST_TEXT = 512
_BAD_CERTIFICATE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.ExtensionNotFound,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


# --- certificate -------------------------------------------------------------------------------------------


def make_certificate(identity: Identity) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    """A self-signed certificate (DER) for a fresh P-256 key, with `identity`'s signature in an extension.

    It names nobody and has no useful dates: the dialler checks the signature and nothing else, so a wrong
    clock does no harm.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swarm")])
    signature = identity.sign(SERVER_DOMAIN, _certified(identity.peer_id, key.public_key()))
    builder = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
        .add_extension(x509.UnrecognizedExtension(SIGNATURE_OID, signature), critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER), key


def check_certificate(certificate: bytes, wanted: PeerId) -> None:
    """Return if the certificate (DER) was made by `wanted`. Raises ProtocolError."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        signature = parsed.extensions.get_extension_for_oid(SIGNATURE_OID).value.public_bytes()
        key = parsed.public_key()
    except _BAD_CERTIFICATE as error:
        raise ProtocolError(f"the certificate is not one of this protocol: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProtocolError("the certificate's key is not an elliptic curve key")
    try:
        verify(wanted, SERVER_DOMAIN, _certified(wanted, key), signature)
    except ProtocolError as error:
        raise ProtocolError(f"wrong identity: another process than {wanted} answered there") from error


def _certified(peer_id: PeerId, key: ec.EllipticCurvePublicKey) -> bytes:
    return fields(peer_id.encode(), key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def server_context(certificate: bytes, key: ec.EllipticCurvePrivateKey) -> ssl.SSLContext:
    """TLS 1.3 only, no session tickets, no compression."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _harden(context)
    context.num_tickets = 0
    # The ssl module takes keys from files only: the key is written under a password that nobody else has.
    password = secrets.token_hex(16)
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode()))
    with tempfile.TemporaryDirectory(prefix="swarm-") as folder:
        chain, private = Path(folder, "cert.pem"), Path(folder, "key.pem")
        chain.write_text(ssl.DER_cert_to_PEM_cert(certificate))
        private.write_bytes(secret)
        context.load_cert_chain(chain, private, password)
    return context


def client_context() -> ssl.SSLContext:
    """Verifies nothing: `check_certificate` does, against the peer id that is wanted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _harden(context)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _harden(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_COMPRESSION


# --- hello -------------------------------------------------------------------------------------------------


def tls_binding(certificate: bytes) -> bytes:
    """What ties a hello to one TLS listener: the hash of its certificate (DER)."""
    return fields(b"tls", sha256(certificate).digest())


def stream_binding(dialler: PeerId, listener: PeerId) -> bytes:
    """What ties a hello to a stream: the ids that the channel itself has authenticated."""
    return fields(b"stream", dialler.encode(), listener.encode())


class Hello(msgspec.Struct, array_like=True, frozen=True):
    peer_id: str
    role: str  # "client" or "peer"
    instance: bytes  # 16 random bytes of the dialling process: a restart is told from a second connection
    last: bytes  # nonce of the newest connection between the two that the dialler knows of; empty: none
    signature: bytes


class Verdict(IntEnum):
    WELCOME = 0
    CROSSED = 1  # another connection between the two stays
    REFUSED = 2  # the text says why


@dataclass(frozen=True, slots=True)
class Answer:
    """The listener's verdict, as the dialler reads it."""

    verdict: Verdict
    text: str


_decode_hello = msgspec.msgpack.Decoder(Hello).decode


def _signed(hello: Hello, listener: PeerId, nonce: bytes, binding: bytes) -> bytes:
    ids = hello.peer_id.encode(), listener.encode()
    return fields(*ids, hello.role.encode(), hello.instance, hello.last, nonce, binding)


def _check_preface(data: bytearray) -> None:
    magic, version = _PREFACE.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError("the other side does not speak this protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the protocol, this side version {VERSION}",
            advice="Update the older side.",
        )


class Dialling:
    """The dialler's side: `start()`, `nonce` comes, `hello()`, `answer` comes; `rest` is of the frames."""

    def __init__(self, identity: Identity, role: str, wanted: PeerId, binding: bytes):
        self._identity, self._role, self._wanted, self._binding = identity, role, wanted, binding
        self._data = bytearray()
        self._greeted = False
        self.instance = b""  # of the listening process
        self.nonce: bytes | None = None
        self.answer: Answer | None = None
        self.rest = b""

    def start(self) -> bytes:
        return _PREFACE.pack(MAGIC, VERSION)

    def hello(self, instance: bytes, last: bytes) -> bytes:
        assert self.nonce is not None and not self._greeted, "the hello follows the listener's preface, once"
        self._greeted = True
        hello = Hello(self._identity.peer_id, self._role, instance, last, b"")
        signature = self._identity.sign(CLIENT_DOMAIN, _signed(hello, self._wanted, self.nonce, self._binding))
        body = msgspec.msgpack.encode(msgspec.structs.replace(hello, signature=signature))
        return _HELLO_LENGTH.pack(len(body)) + body

    def receive_data(self, data: bytes) -> None:
        """Raises ProtocolError."""
        self._data += data
        if self.nonce is None and len(self._data) >= _PREFACE.size:
            _check_preface(self._data)
            middle, end = _PREFACE.size + INSTANCE_BYTES, _PREFACE.size + INSTANCE_BYTES + NONCE_BYTES
            if len(self._data) >= end:
                self.instance = bytes(self._data[_PREFACE.size : middle])
                self.nonce = bytes(self._data[middle:end])
                del self._data[:end]
        if self.nonce is None or len(self._data) < _VERDICT.size:
            return
        code, length = _VERDICT.unpack_from(self._data)
        if length > _LONGEST_TEXT:
            raise ProtocolError(f"the verdict's text would have {length} bytes")
        end = _VERDICT.size + length
        if len(self._data) < end:
            return
        text = self._data[_VERDICT.size : end].decode(errors="replace")
        if code not in iter(Verdict):
            raise ProtocolError(f"verdict {code} is not known in version {VERSION}")
        if code == Verdict.WELCOME and not self._greeted:
            raise ProtocolError("the other side welcomed a hello that was never sent")
        self.answer = Answer(Verdict(code), text)
        self.rest = bytes(self._data[end:])
        self._data.clear()


class Answering:
    """The listener's side: `start()`, then `hello` comes, verified; `verdict()` ends it."""

    def __init__(self, peer_id: PeerId, instance: bytes, binding: bytes):
        self._peer_id, self._instance, self._binding = peer_id, instance, binding
        self._data = bytearray()
        self._checked = False
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.hello: Hello | None = None

    def start(self) -> bytes:
        return _PREFACE.pack(MAGIC, VERSION) + self._instance + self.nonce

    @staticmethod
    def verdict(verdict: Verdict, text: str = "") -> bytes:
        encoded = text.encode()[:_LONGEST_TEXT]
        return _VERDICT.pack(verdict, len(encoded)) + encoded

    def receive_data(self, data: bytes) -> None:
        """Raises ProtocolError."""
        if self.hello is not None and data:
            raise ProtocolError("frames came before the verdict")
        self._data += data
        if not self._checked and len(self._data) >= _PREFACE.size:
            _check_preface(self._data)
            del self._data[: _PREFACE.size]
            self._checked = True
        if not self._checked or len(self._data) < _HELLO_LENGTH.size:
            return
        (length,) = _HELLO_LENGTH.unpack_from(self._data)
        if length > _LONGEST_HELLO:
            raise ProtocolError(f"a hello of {length} bytes; at most {_LONGEST_HELLO} are allowed")
        end = _HELLO_LENGTH.size + length
        if len(self._data) > end:
            raise ProtocolError("frames came before the verdict")
        if len(self._data) == end:
            self.hello = self._verified(bytes(self._data[_HELLO_LENGTH.size :]))

    def _verified(self, body: bytes) -> Hello:
        try:
            hello = _decode_hello(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the hello is damaged: {error}") from error
        if hello.role not in ROLES:
            raise ProtocolError(f"role {hello.role[:16]!r} is not known in version {VERSION}")
        wrong = len(hello.instance) != INSTANCE_BYTES or len(hello.last) not in (0, NONCE_BYTES)
        if wrong or len(hello.signature) != SIGNATURE_BYTES:
            raise ProtocolError("a field of the hello has the wrong length")
        signed = _signed(hello, self._peer_id, self.nonce, self._binding)
        verify(hello.peer_id, CLIENT_DOMAIN, signed, hello.signature)
        return hello
