from __future__ import annotations

import random
import zlib

import base58
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from routing.errors import BadInput, BadJoinCode
from swarm.identity import Identity
from swarm.joincode import JoinCode, _checksum

PEERS = [Identity.generate().peer_id for _ in range(3)]
FINGERPRINT = bytes(range(100, 132))
PLAIN = JoinCode(
    bootstrap=(f"/ip4/192.168.1.20/tcp/31337/p2p/{PEERS[0]}", f"/ip6/2001:db8::1/tcp/31337/p2p/{PEERS[0]}"),
    fingerprint=FINGERPRINT,
    swarm_key=bytes(range(32)),
    invite=b"invite",
)
TEXT = PLAIN.encode()
ALPHABET = base58.BITCOIN_ALPHABET.decode() + "0OIl -_\n"

addresses = st.one_of(
    st.builds(
        "/{}/tcp/{}/p2p/{}".format,
        st.one_of(
            st.ip_addresses(v=4).map(lambda ip: f"ip4/{ip}"),
            st.ip_addresses(v=6).map(lambda ip: f"ip6/{ip}"),
            st.just("dns4/a-peer.example.org"),
            st.just("ip6/2001:DB8:0::1"),  # not how we would write it: stays as it is
        ),
        st.integers(0, 65535),
        st.sampled_from([*PEERS, "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]),
    ),
    st.just(f"/ip4/10.0.0.1/tcp/1/p2p/{PEERS[0]}/p2p-circuit/p2p/{PEERS[1]}"),
    st.just("/ip4/10.0.0.1/tcp/99999/p2p/nonsense"),
)


@given(
    bootstrap=st.lists(addresses, min_size=1, max_size=6),
    fingerprint=st.binary(min_size=32, max_size=32),
    swarm_key=st.binary(max_size=32),
    invite=st.binary(max_size=100),
)
def test_a_code_comes_back_as_it_was_on_one_line_of_letters_and_digits(
    bootstrap, fingerprint, swarm_key, invite
):
    code = JoinCode(bootstrap=tuple(bootstrap), fingerprint=fingerprint, swarm_key=swarm_key, invite=invite)
    text = code.encode()
    assert text.isascii() and text.isalnum()
    assert JoinCode.parse(text) == code
    assert JoinCode.parse(f" \t{text}\r\n") == code


def test_a_code_is_short():
    code = JoinCode(bootstrap=(f"/ip4/192.168.1.20/tcp/31337/p2p/{PEERS[0]}",), fingerprint=FINGERPRINT)
    assert len(str(code)) < 130


def broken(text: str) -> None:
    with pytest.raises(BadJoinCode):
        JoinCode.parse(text)


@given(at=st.integers(0, len(TEXT) - 1), other=st.sampled_from(ALPHABET))
def test_a_wrong_character_is_noticed(at, other):
    assume(TEXT[at] != other and not (other.isspace() and at in (0, len(TEXT) - 1)))
    broken(TEXT[:at] + other + TEXT[at + 1 :])


@pytest.mark.parametrize("edge", [0, len(TEXT) - 1], ids=["first", "last"])
def test_a_character_lost_to_white_space_at_an_edge_is_noticed(edge):
    broken(TEXT[:edge] + " " + TEXT[edge + 1 :])


@given(at=st.integers(0, len(TEXT) - 1), other=st.sampled_from(ALPHABET))
def test_an_added_character_is_noticed(at, other):
    assume(not (other.isspace() and at == 0))
    broken(TEXT[:at] + other + TEXT[at:])


def test_every_missing_or_swapped_character_is_noticed():
    for at in range(len(TEXT)):
        broken(TEXT[:at] + TEXT[at + 1 :])
        if TEXT[at : at + 1] != TEXT[at + 1 : at + 2] and at + 1 < len(TEXT):
            broken(TEXT[:at] + TEXT[at + 1] + TEXT[at] + TEXT[at + 2 :])


@given(st.text(max_size=200))
def test_any_other_text_is_no_code(text):
    broken(text)


def test_text_without_end_is_refused_before_it_is_decoded():
    broken("2" * 10_000_000)


def forged(data: bytes) -> str:
    return base58.b58encode(data + _checksum(data)).decode()


def test_another_version_says_so():
    with pytest.raises(BadJoinCode, match="version 2"):
        JoinCode.parse(forged(b"\x02anything"))


@given(packing=st.sampled_from([0, 1]), body=st.binary(max_size=200))
def test_a_code_with_a_right_checksum_and_a_wrong_body_is_refused(packing, body):
    broken(forged(bytes((1, packing)) + body))


def test_a_body_that_inflates_without_end_is_refused():
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(bytes(2_000_000)) + packer.flush()
    with pytest.raises(BadJoinCode, match="too long"):
        JoinCode.parse(forged(b"\x01\x01" + bomb))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bootstrap": ()}, "1 to 16"),
        ({"bootstrap": ("127.0.0.1:80",)}, "multiaddr"),
        ({"fingerprint": b"short"}, "32 bytes"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_maker(change, reason):
    with pytest.raises(BadInput, match=reason):
        JoinCode(**{"bootstrap": PLAIN.bootstrap, "fingerprint": FINGERPRINT, **change})


def test_more_than_fits_is_refused_by_its_maker():
    for invite in (random.Random(0).randbytes(4000), bytes(20_000)):  # the second deflates to almost nothing
        with pytest.raises(BadInput, match="more than a join code holds"):
            JoinCode(bootstrap=PLAIN.bootstrap, fingerprint=FINGERPRINT, invite=invite).encode()
