from __future__ import annotations

import os
import stat
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.errors import BadInput, ProtocolError, StartError
from swarm.identity import Identity, fields, public_key_of, verify
from tests.full_disk import full_disk

# The Ed25519 key pair among the test vectors of the libp2p peer id specification.
KNOWN_SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
KNOWN_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
KNOWN_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def known(tmp_path) -> Identity:
    path = tmp_path / "known"
    path.write_bytes(bytes.fromhex("08011240") + KNOWN_SEED + KNOWN_PUBLIC)
    return Identity.load_or_create(path)


def test_a_known_key_has_its_known_peer_id(tmp_path):
    assert known(tmp_path).peer_id == KNOWN_ID


def test_the_public_key_is_read_from_the_id_alone():
    identity = Identity.generate()
    verify(identity.peer_id, b"domain-1", b"message", identity.sign(b"domain-1", b"message"))


@given(flip=st.integers(0, 64 * 8 - 1))
def test_a_changed_signature_is_refused(flip):
    identity = Identity.generate()
    signature = bytearray(identity.sign(b"d", b"m"))
    signature[flip // 8] ^= 1 << flip % 8
    with pytest.raises(ProtocolError):
        verify(identity.peer_id, b"d", b"m", bytes(signature))


def test_a_signature_holds_for_its_signer_domain_and_message_only():
    one, two = Identity.generate(), Identity.generate()
    signature = one.sign(b"domain", b"message")
    for peer_id, domain, message, sent in (
        (two.peer_id, b"domain", b"message", signature),
        (one.peer_id, b"other", b"message", signature),
        (one.peer_id, b"domainm", b"essage", signature),
        (one.peer_id, b"domain", b"messag", signature),
        (one.peer_id, b"domain", b"message", signature[:-1]),
        (one.peer_id, b"domain", b"message", b""),
    ):
        with pytest.raises(ProtocolError):
            verify(peer_id, domain, message, sent)


@pytest.mark.parametrize("domain", [b"", bytes(256)])
def test_a_domain_has_a_sensible_length(domain):
    with pytest.raises(BadInput):
        Identity.generate().sign(domain, b"")


def test_secrets_follow_from_key_and_label(tmp_path):
    one, two = known(tmp_path), Identity.generate()
    assert one.secret(b"names") == known(tmp_path).secret(b"names")
    assert len({one.secret(b"names"), one.secret(b"other"), two.secret(b"names")}) == 3
    assert len(one.secret(b"names")) == 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "client",
        KNOWN_ID[:-1],
        KNOWN_ID + "1",
        KNOWN_ID + "\n",
        " " + KNOWN_ID,
        "1" * 10_000,
        "é" * 38,
        "0OIl",  # not base58
        "QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG",  # the id of an RSA key
    ],
)
def test_what_is_not_an_ed25519_peer_id_is_refused(text):
    with pytest.raises(ProtocolError):
        public_key_of(text)


@given(st.text(max_size=60))
def test_no_text_raises_anything_else(text):
    with pytest.raises(ProtocolError):
        public_key_of(text)


def test_load_or_create_writes_once_and_privately(tmp_path):
    path = tmp_path / "deep" / "identity"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(path.parent) == ["identity"], "a draft was left behind"


def test_save_replaces_and_loads_again(tmp_path):
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    other = Identity.generate()
    other.save(path)
    assert Identity.load_or_create(path).peer_id == other.peer_id
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_processes_that_start_at_once_agree(tmp_path):
    path, found, gate = tmp_path / "identity", [], threading.Barrier(8)

    def start() -> None:
        gate.wait()
        found.append(Identity.load_or_create(path).peer_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize("damage", [b"", b"text", bytes(68), bytes.fromhex("08011240") + bytes(64)])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "identity"
    path.write_bytes(damage)
    with pytest.raises(BadInput, match="identity"):
        Identity.load_or_create(path)
    assert path.read_bytes() == damage, "the file was overwritten"


def test_on_a_full_disk_none_is_made_and_nothing_left(tmp_path):
    with full_disk(), pytest.raises(StartError, match="cannot write the identity file"):
        Identity.load_or_create(tmp_path / "identity")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_not_an_identity(tmp_path):
    with pytest.raises(BadInput):
        Identity.load_or_create(tmp_path)


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.binary(max_size=9), max_size=5))
def test_fields_are_unambiguous(one, two):
    assert (fields(*one) == fields(*two)) == (one == two)
