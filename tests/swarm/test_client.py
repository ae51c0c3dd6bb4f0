"""What a client says when a session is over arrives, however often the connection breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routing.cost import CLIENT
from routing.types import Hop, PeerRecord, Span
from routing.view import TOMBSTONE_S
from swarm import goodbyes
from swarm.checkpoint import open_checkpoint
from swarm.client import ClientConfig, SwarmClient
from swarm.families import family_of
from swarm.frames import Frame, FrameType
from swarm.joincode import JoinCode
from swarm.session import HopTrace, StepTrace
from tests.tiny import make_tiny
from tests.whole.stand_ins import MemoryDirectory

PEER = "a peer"


class FakeLink:
    """A connection to PEER that remembers what was sent."""

    remote = PEER

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def send(self, frame: Frame) -> None:
        self.sent.append(frame)


class Connected:
    def __init__(self, client: SwarmClient, patch: pytest.MonkeyPatch):
        self.client = client
        self.now: FakeLink | None = None
        patch.setattr(client, "link", lambda peer_id: self.now)

    def opens(self) -> FakeLink:
        self.now = FakeLink()
        self.client.link_opened(self.now)  # type: ignore[arg-type]
        return self.now

    def breaks(self) -> None:
        link: Any = self.now
        self.now = None
        self.client.link_lost(link, "silent for 2.0 s")


@pytest.fixture
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connected:
    checkpoint = open_checkpoint(str(make_tiny("llama", tmp_path)))
    join = JoinCode(bootstrap=("/ip4/192.0.2.1/tcp/1/p2p/12D3KooW",), fingerprint=bytes(32))
    return Connected(SwarmClient(checkpoint, family_of(checkpoint.config), join, ClientConfig()), monkeypatch)


def goodbye(number: int) -> Frame:
    return Frame(type=FrameType.CLOSE, session=bytes([number]) * 16)


def test_it_is_said_again_when_the_connection_broke_and_when_there_was_none(connected: Connected) -> None:
    first = connected.opens()
    connected.client.say_goodbye(PEER, goodbye(1))
    assert first.sent == [goodbye(1)]
    connected.breaks()
    connected.client.say_goodbye(PEER, goodbye(2))
    second = connected.opens()
    assert second.sent == [goodbye(1), goodbye(2)]
    connected.breaks()
    assert connected.opens().sent == [goodbye(1), goodbye(2)]


def test_not_for_ever_and_not_without_bounds(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    connected.opens()
    for number in range(2 * goodbyes.MOST_GOODBYES):
        connected.client.say_goodbye(PEER, goodbye(number % 256))
    connected.breaks()
    assert len(connected.opens().sent) == goodbyes.MOST_GOODBYES
    monkeypatch.setattr(goodbyes, "GOODBYE_S", 0.0)
    connected.breaks()
    assert connected.opens().sent == []


def test_each_step_tells_what_its_hops_and_the_ways_between_them_take(connected: Connected) -> None:
    client = connected.client
    hops = (
        HopTrace(hop=Hop("a", 0, 2), queue_s=0.01, compute_s=0.02, network_s=0.004),
        HopTrace(hop=Hop("b", 2, 4), queue_s=0.0, compute_s=0.04, network_s=0.034, from_peer_s=0.03),
    )
    client.learn(StepTrace(at_s=1.0, total_s=0.2, tokens=1, epoch=0, hops=hops))
    costs, stranger = client.costs, PeerRecord(peer_id="b", span=Span(2, 4))
    assert costs.link_s("a", "b") == pytest.approx(0.03) and not costs.measured(CLIENT, "a")
    assert costs.block_s(stranger, 1) == pytest.approx(0.02)
    assert costs.queue_s(stranger) == pytest.approx(costs.settings.hop_s)


async def test_what_was_measured_of_a_peer_that_is_gone_for_long_is_forgotten(
    connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, now = connected.client, 0.0
    directory = MemoryDirectory()
    monkeypatch.setattr(client, "_directory", directory, raising=False)
    monkeypatch.setattr(client, "_dht_time", lambda: now)
    for generation in range(5):
        name = f"peer {generation}"
        directory.records = {name: PeerRecord(peer_id=name, span=Span(0, 2), sequence=1, expires_at=now + 60.0)}
        await client.refresh()
        client.costs.observe_rtt(CLIENT, name, 0.01)
        now += 61.0
        directory.records = {}
        await client.refresh()
        assert client.costs.measured(CLIENT, name), "it may come back at any moment"
        now += TOMBSTONE_S + 1.0
        await client.refresh()
        assert not client.costs.measured(CLIENT, name)
