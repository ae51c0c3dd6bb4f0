"""Hidden states that lose something on the wire: where, when, who never gets them, and what a lost peer changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.session import PeerSession
from routing.cost import CLIENT
from routing.errors import BadInput
from routing.types import Hop, Route
from swarm.frames import Codec
from swarm.session import SessionConfig
from tests.whole.inprocess import InProcessModel, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import until

CHAIN = ["0:3", "3:6"]
MBIT = 1e6 / 8
LONG = "The peers that stay say again what they said before, byte for byte: "


def as_slow(model: InProcessModel, swarm: InProcessSwarm, mbit: float, client_mbit: float = 0.0) -> None:
    """All ways were measured to take so much."""
    ids = [peer.peer_id for peer in swarm.peers]
    model.client.costs.advance(time.monotonic())
    for source in [CLIENT, *ids]:
        for target in ids:
            rate = client_mbit or mbit if source == CLIENT else mbit
            model.client.costs.observe_bandwidth(source, target, rate * MBIT)


async def outputs(model: InProcessModel, ids: list[int], harm: Any = None, at: int = 0, **options: Any) -> torch.Tensor:
    """Of the last block, for each position from the half on; harm comes before position `at`."""
    found = []
    async with model.session(**options) as session:
        half, steps = len(ids) // 2, session._session
        for index, part in enumerate((ids[:half], *([token] for token in ids[half:]))):
            if harm is not None and index == at:
                harm(session)
            found.append(await steps.step(part))
        if harm is not None:
            assert len(session.recoveries) > 1
    return torch.cat(found)


@pytest.mark.parametrize("standby", ["none", "inputs", "warm"])
@pytest.mark.parametrize("hop", [0, 1])
async def test_a_loss_changes_nothing_of_what_8_bits_left(hop: int, standby: str, tiny: Path, local: Reference) -> None:
    ids = (local.ids(LONG) + local.greedy(local.ids(LONG), 60))[:80]
    async with running(tiny, SPARED, wire="int8", share_prefixes=False) as (swarm, model):
        clean = await outputs(model, ids, standby=standby)
        model._session_config = SessionConfig(wire="exact", share_prefixes=False)
        exact = await outputs(model, ids)
        model._session_config = SessionConfig(wire="int8", share_prefixes=False)
        hurt = await outputs(model, ids, lambda s: used(swarm, s, hop).kill(), at=20, standby=standby)
    lost = (clean - exact).abs().mean()
    assert 1e-3 * exact.std() < lost < 0.1 * exact.std()
    assert (hurt - clean).abs().mean() < 1e-2 * lost  # what is left is arithmetic's last digits


async def test_auto_loses_nothing_until_a_way_is_known_to_be_slow(tiny: Path, local: Reference) -> None:
    own = {"wire": "auto", "share_prefixes": False}
    async with running(tiny, CHAIN, **own) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        assert set(session._session.driver.codecs.values()) == {Codec.FP32}
        as_slow(model, swarm, mbit=1.0)
        async with model.session() as other:
            await other._session.step(local.ids(LONG))
            assert other._session.driver.codecs == {0: Codec.INT8, 3: Codec.INT8}
            assert other._session.driver.numeric_class == Codec.INT8
        await text.more(10)
        assert set(session._session.driver.codecs.values()) == {Codec.FP32}  # for as long as it lives


async def test_a_slow_way_is_taken_where_8_bits_relieve_it(tiny: Path, local: Reference) -> None:
    """A row of 256 bytes takes 2 s, 98 bytes take 0.8 s; a block takes the other peer 1.3 s."""
    async with running(tiny, ["0:6", "0:6"]) as (swarm, model):
        near, elsewhere = (peer.peer_id for peer in swarm.peers)
        for wire, best in (("exact", elsewhere), ("auto", near), ("int8", near)):
            model._session_config = SessionConfig(wire=wire, standby="none", share_prefixes=False)
            model.client.costs.advance(time.monotonic())
            model.client.costs.observe_bandwidth(CLIENT, near, 0.001 * MBIT)
            model.client.costs.observe_decode(elsewhere, 1.3)
            async with model.session() as session:
                await session._session.step(local.ids(LONG)[:3])
                assert session.route is not None and session.route[0].peer_id == best, wire


async def test_a_peer_that_writes_8_bits_slowly_says_so_and_is_sent_more(tiny: Path) -> None:
    async with running(tiny, ["0:6", "0:6"]) as (swarm, model):
        client = model.client
        usual, slow = (peer.peer_id for peer in swarm.peers)
        swarm.tell(swarm.by_id(slow), int8_value_s=1e-3 / client.head.hidden_size)
        await client.refresh()
        client.costs.advance(time.monotonic())
        for peer_id in (usual, slow):
            client.costs.observe_bandwidth(CLIENT, peer_id, 256 / 4e-3)
        assert [client.choose_codec(CLIENT, peer_id) for peer_id in (usual, slow)] == [Codec.INT8, Codec.BF16]
        await until(lambda: CLIENT in client.wire.row_s)
        assert 0 < client.wire.row_s[CLIENT] < 1e-2, "the client's own is measured too"


@pytest.mark.parametrize(
    ("client_mbit", "mbit", "codecs"),
    [(1.0, 1e4, [Codec.INT8, Codec.FP32]), (1e4, 1.0, [Codec.FP32, Codec.INT8])],
    ids=["the client's uplink", "a hop's uplink"],
)
async def test_each_way_has_a_codec_of_its_own(
    client_mbit: float, mbit: float, codecs: list[Codec], tiny: Path, local: Reference
) -> None:
    async with running(tiny, CHAIN, wire="auto") as (swarm, model):
        as_slow(model, swarm, mbit, client_mbit)
        async with model.session() as session:
            await session._session.step(local.ids(LONG))
            assert session._session.driver.codecs == {0: codecs[0], 3: codecs[1]}
            into = [codec.name.lower() for codec in (*codecs, Codec.FP32)]
            told = [(into[0], into[1]), (into[1], into[2])]
            assert [(hop.wire_in, hop.wire_out) for hop in session.traces[-1].hops] == told
            assert [(term.wire_in, term.wire_out) for term in session.explain().chosen.terms] == told
            for hop in (0, 1):
                (there,) = used(swarm, session, hop).service.table.sessions.values()
                assert [there.codec_from(place) for place in (-1, 0)] == codecs
                assert there.codec_from(1) is Codec.FP32  # results lose nothing


async def test_exact_is_exact_on_slow_ways_and_takes_nothing_that_was_lost(tiny: Path, local: Reference) -> None:
    """One client, the same prompt: first in 8 bits, then as it is. What is left of the first helps its own kind."""

    def adopted(swarm: InProcessSwarm) -> int:
        return sum(peer.service.table.counts.adopted for peer in swarm.peers)

    async with running(tiny, CHAIN, wire="auto") as (swarm, model):
        for times in range(2):
            as_slow(model, swarm, mbit=1.0)  # which this kind of client forgets after a step
            async with model.session() as session:
                await session._session.step(local.ids(LONG))
                assert session._session.driver.numeric_class == Codec.INT8
            assert bool(adopted(swarm)) == bool(times)
        before = adopted(swarm)
        as_slow(model, swarm, mbit=1.0)
        with_losses = session._session.driver.names.slice(0, 0)
        model._session_config = SessionConfig(wire="exact")
        async with model.session() as session:
            assert session._session.driver.names.slice(0, 0) != with_losses
            await Text(session, local, LONG).more(20)  # the local model's text
        assert adopted(swarm) == before


async def test_who_sends_in_another_codec_than_was_said_is_left(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, liars = PeerSession.codec_from, set[str]()

    def codec_from(self: PeerSession, place: int) -> Codec:
        mine = place >= 0 and self.places[place].peer_id == self.table.me
        return Codec.INT8 if mine and self.table.me in liars else real(self, place)

    monkeypatch.setattr(PeerSession, "codec_from", codec_from)
    for hop in (0, 1):
        async with running(tiny, SPARED) as (swarm, model), model.session(standby="none") as session:
            text = Text(session, local)
            await text.more(5)
            liar = used(swarm, session, hop).peer_id
            liars.add(liar)
            await text.more(15)
            assert session.route is not None and liar not in session.route.peers
            liars.clear()


async def test_two_hops_on_one_peer_lose_what_two_peers_lose(tiny: Path, local: Reference) -> None:
    """After a loss they may be two peers, or were."""
    ids, found = (local.ids(LONG) + local.greedy(local.ids(LONG), 20))[:60], []
    for spans in (["0:6"], CHAIN):
        async with running(tiny, spans, wire="int8") as (swarm, model):
            peers = [swarm.peers[0].peer_id, swarm.peers[-1].peer_id]
            route = Route((Hop(peers[0], 0, 3), Hop(peers[1], 3, 6)))
            model.client.plan = lambda request, route=route, client=model.client, **_: client.price(route, request)
            found.append(await outputs(model, ids))
    assert (found[0] - found[1]).abs().max() < 1e-4 * found[0].std()


async def test_a_session_that_was_saved_goes_on_with_its_codecs(tiny: Path, local: Reference, tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    async with InProcessSwarm(tiny, CHAIN) as swarm, swarm.model(wire="auto") as model:
        as_slow(model, swarm, mbit=1.0)
        said = []
        async with model.session() as session:
            async for token in session.generate(LONG, max_new_tokens=20, ignore_eos=True, save_to=path):
                said.append(token.id)
                if len(said) == 10:
                    break
            codecs = dict(session._session.driver.codecs)
            said += [token.id async for token in session.rest()]
        async with swarm.model(wire="auto") as other:  # which has measured nothing
            resumed = other.resume(path)
            assert resumed._session.driver.codecs == codecs
            assert [token.id async for token in resumed.rest()] == said[10:]
            await resumed.__aexit__()
        async with swarm.model(wire="exact") as exact:
            resumed = exact.resume(path)
            assert resumed._session.driver.codecs == {}
            await resumed.__aexit__()


def test_a_wire_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadInput, match="wire is one of auto, exact, int8"):
        SessionConfig(wire="fp8")
