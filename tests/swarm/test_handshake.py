from __future__ import annotations

import contextlib
import json
import ssl
from datetime import datetime
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import ProtocolError
from swarm.handshake import (
    SIGNATURE_OID,
    Answering,
    Dialling,
    Hello,
    Verdict,
    check_certificate,
    client_context,
    make_certificate,
    server_context,
    stream_binding,
    tls_binding,
)
from swarm.identity import Identity

ALICE, BOB, EVE = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32)) for n in (1, 2, 3))
BINDING = tls_binding(b"certificate")
HERE, THERE = bytes(16), bytes([9] * 16)
VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "wire-vectors.json").read_text())["hellos"]


def pair(binding: bytes = BINDING, role: str = "client") -> tuple[Dialling, Answering]:
    return Dialling(ALICE, role, BOB.peer_id, binding), Answering(BOB.peer_id, THERE, BINDING)


def greet(dialling: Dialling, answering: Answering, last: bytes = b"") -> None:
    answering.receive_data(dialling.start())
    dialling.receive_data(answering.start())
    answering.receive_data(dialling.hello(HERE, last))


@pytest.mark.parametrize("role", ["client", "peer"])
@pytest.mark.parametrize("last", [b"", bytes(32)])
def test_both_sides_learn_who_the_other_is(role, last):
    dialling, answering = pair(role=role)
    greet(dialling, answering, last)
    hello = answering.hello
    assert hello is not None
    assert (hello.peer_id, hello.role, hello.instance, hello.last) == (ALICE.peer_id, role, HERE, last)
    assert (dialling.instance, dialling.nonce) == (THERE, answering.nonce)
    dialling.receive_data(answering.verdict(Verdict.WELCOME) + b"frames")
    assert dialling.answer is not None and dialling.answer.verdict is Verdict.WELCOME
    assert dialling.rest == b"frames"


@pytest.mark.parametrize("verdict", [Verdict.CROSSED, Verdict.REFUSED])
def test_a_verdict_says_why(verdict):
    dialling, answering = pair()
    greet(dialling, answering)
    dialling.receive_data(answering.verdict(verdict, "full"))
    assert dialling.answer is not None and (dialling.answer.verdict, dialling.answer.text) == (
        verdict,
        "full",
    )


@given(st.lists(st.integers(1, 40), max_size=20))
def test_any_split_gives_the_same(cuts):
    dialling, answering = pair()
    to_dialler, to_listener = answering.start(), dialling.start()

    def feed(machine, data: bytes) -> None:
        at = 0
        for size in [*cuts, len(data)]:
            machine.receive_data(data[at : at + size])
            at += size

    feed(answering, to_listener)
    feed(dialling, to_dialler)
    feed(answering, dialling.hello(HERE, b""))
    assert answering.hello is not None and answering.hello.peer_id == ALICE.peer_id
    feed(dialling, answering.verdict(Verdict.REFUSED, "text"))
    assert dialling.answer is not None and dialling.answer.text == "text"


def refused(answering: Answering, hello: bytes, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        answering.receive_data(hello)
    assert answering.hello is None


def prepared() -> tuple[Dialling, Answering]:
    dialling, answering = pair()
    answering.receive_data(dialling.start())
    dialling.receive_data(answering.start())
    return dialling, answering


def test_a_hello_for_another_connection_is_refused():
    """Replayed on another connection (nonce), to another listener, or through a man in the middle."""
    dialling, _ = prepared()
    hello = dialling.hello(HERE, b"")
    _, other = prepared()
    refused(other, hello, "not its own")

    for listener, binding in ((EVE.peer_id, BINDING), (BOB.peer_id, tls_binding(b"another"))):
        dialling, answering = pair()
        third = Answering(listener, THERE, binding)
        third.nonce = answering.nonce
        third.receive_data(dialling.start())
        dialling.receive_data(answering.start())
        refused(third, dialling.hello(HERE, b""), "not its own")


@pytest.mark.parametrize("field", ["peer_id", "role", "instance", "last"])
def test_every_field_of_the_hello_is_signed(field):
    dialling, answering = prepared()
    hello = msgspec.msgpack.decode(dialling.hello(HERE, b"")[2:], type=Hello)
    changed = {"peer_id": EVE.peer_id, "role": "peer", "instance": bytes([1] * 16), "last": bytes(32)}[field]
    body = msgspec.msgpack.encode(msgspec.structs.replace(hello, **{field: changed}))
    refused(answering, len(body).to_bytes(2, "little") + body, "not its own")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"role": "king"}, "role 'king'"),
        ({"instance": b""}, "wrong length"),
        ({"last": b"x"}, "wrong length"),
        ({"signature": b""}, "wrong length"),
        ({"peer_id": "nobody"}, "not an Ed25519 peer id"),
    ],
)
def test_a_malformed_hello_is_refused(changes, match):
    dialling, answering = prepared()
    hello = msgspec.msgpack.decode(dialling.hello(HERE, b"")[2:], type=Hello)
    body = msgspec.msgpack.encode(msgspec.structs.replace(hello, **changes))
    refused(answering, len(body).to_bytes(2, "little") + body, match)


def test_frames_before_the_verdict_are_refused():
    dialling, answering = prepared()
    refused(answering, dialling.hello(HERE, b"") + b"f", "before the verdict")
    dialling, answering = prepared()
    answering.receive_data(dialling.hello(HERE, b""))
    with pytest.raises(ProtocolError, match="before the verdict"):
        answering.receive_data(b"f")


def test_another_protocol_and_another_version_are_named():
    for machine in pair():
        with pytest.raises(ProtocolError, match="does not speak"):
            machine.receive_data(b"GET / HTTP/1.1\r\n\r\n")
    for machine in pair():
        with pytest.raises(ProtocolError, match=r"version 2 .* version 1"):
            machine.receive_data(b"SWRM\x02\x00")


def test_a_long_hello_and_a_long_text_are_refused_at_once():
    _, answering = prepared()
    refused(answering, (513).to_bytes(2, "little"), "513 bytes")
    dialling, _ = prepared()
    with pytest.raises(ProtocolError, match="600 bytes"):
        dialling.receive_data(b"\x02" + (600).to_bytes(2, "little"))
    dialling, answering = prepared()
    dialling.receive_data(answering.verdict(Verdict.REFUSED, "é" * 1000))
    assert dialling.answer is not None and len(dialling.answer.text) > 200


@pytest.mark.parametrize("verdict", [b"\x07\x00\x00", b"\x00\x00\x00"])
def test_an_unknown_or_early_verdict_is_refused(verdict):
    dialling, _ = prepared()  # no hello was sent
    with pytest.raises(ProtocolError):
        dialling.receive_data(verdict)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_protocol_error(data):
    for machine in (*pair(), *prepared()):
        with contextlib.suppress(ProtocolError):
            machine.receive_data(data)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_a_hello_vector(vector):
    seed, get = bytes.fromhex(vector["dialler_seed"]), lambda name: bytes.fromhex(vector[name])
    dialler = Identity(Ed25519PrivateKey.from_private_bytes(seed))
    assert dialler.peer_id == vector["dialler"]
    if vector["name"] == "tls":
        assert tls_binding(get("certificate")) == get("binding")
    else:
        assert stream_binding(vector["dialler"], vector["listener"]) == get("binding")
    dialling = Dialling(dialler, vector["role"], vector["listener"], get("binding"))
    assert dialling.start() == get("dialler_preface")
    dialling.receive_data(get("listener_preface"))
    assert dialling.hello(get("instance"), get("last")) == get("hello")
    dialling.receive_data(get("welcome"))
    assert dialling.answer is not None and dialling.answer.verdict is Verdict.WELCOME


# --- the certificate ---


def certificate(signature: bytes | None, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | None = None) -> bytes:
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "swarm")])
    builder = x509.CertificateBuilder(
        subject_name=name,
        issuer_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=datetime(2000, 1, 1),
        not_valid_after=datetime(2100, 1, 1),
    )
    if signature is not None:
        extension = x509.UnrecognizedExtension(SIGNATURE_OID, signature)
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def test_a_certificate_proves_its_maker_and_nobody_else():
    made, _ = make_certificate(ALICE)
    check_certificate(made, ALICE.peer_id)
    with pytest.raises(ProtocolError, match=f"another process than {BOB.peer_id}"):
        check_certificate(made, BOB.peer_id)


def test_a_signature_does_not_move_to_another_key():
    made, _ = make_certificate(ALICE)
    signature = x509.load_der_x509_certificate(made).extensions.get_extension_for_oid(SIGNATURE_OID)
    with pytest.raises(ProtocolError):
        check_certificate(certificate(signature.value.public_bytes()), ALICE.peer_id)


def test_other_certificates_are_refused_by_name():
    rsa_key = rsa.generate_private_key(65537, 2048)
    for data in (b"", b"nonsense", certificate(None), certificate(b"short"), certificate(bytes(64), rsa_key)):
        with pytest.raises(ProtocolError):
            check_certificate(data, ALICE.peer_id)


@given(st.data())
def test_a_damaged_certificate_raises_nothing_but_a_protocol_error(data):
    damaged = bytearray(MADE)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        check_certificate(bytes(damaged), ALICE.peer_id)


MADE, KEY = make_certificate(ALICE)


def tls(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """A TLS handshake in memory."""
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = server.wrap_bio(a, b, server_side=True), client.wrap_bio(b, a)
    for _ in range(5):
        for end in (ends[1], ends[0]):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return ends


def test_tls_is_1_3_without_tickets_and_shows_the_certificate():
    server, client = tls(server_context(MADE, KEY), client_context())
    assert server.version() == client.version() == "TLSv1.3"
    assert client.getpeercert(binary_form=True) == MADE
    assert server.compression() is None
    server.write(b"x")
    assert client.read(1) == b"x"
    assert client.session is None or not client.session.has_ticket


def test_tls_1_2_is_refused():
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        tls(server_context(MADE, KEY), old)


def test_no_key_is_left_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    server_context(MADE, KEY)
    assert list(tmp_path.iterdir()) == []
