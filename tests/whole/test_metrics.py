"""What peers tell Prometheus while a swarm generates, loses one and shares beginnings: each figure against what
happened."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from peer.counts import Spread
from peer.metrics import CONTENT_TYPE, Metrics
from peer.scrape import MetricsServer
from routing.types import PeerRecord, PeerState, Span
from swarm.client import SwarmClient
from swarm.frames import Frame, FrameType, Lost
from tests.whole.inprocess import InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import until
from tests.whole.test_limits import room_for

CHAIN = ["0:3", "3:6"]
MODEL = {"model": "tiny", "swarm": "00000000"}
SWARM = bytes(32)
Figures = Callable[..., float]


def parsed(page: str) -> Figures:
    """`figures("links", to="peer")`."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        named = [s for s in samples if s.name == f"swarm_peer_{name}"]
        (found,) = [s.value for s in named if s.labels == labels or s.labels == labels | MODEL]
        return found

    return value


async def figures(peer: InProcessPeer) -> Figures:
    metrics = Metrics()
    metrics.watch_process(peer.endpoint, SimpleNamespace(restarts=1))  # type: ignore[arg-type]
    metrics.watch_service("tiny", SWARM, lambda: peer.service)
    return parsed(await asyncio.to_thread(lambda: peer.host.call(metrics.page).decode()))


async def test_a_text_is_counted_on_both_hops_and_costs_no_more_than_that(tiny: Path, local: Reference) -> None:
    async with running(tiny, CHAIN) as (swarm, model):
        async with model.session() as session:
            text = Text(session, local, "Once upon a time there was ")
            await text.more(9)
            prompt = len(text.ids)
            for peer in swarm.peers:
                value = await figures(peer)
                assert value("sessions") == value("sessions_in_use") == value("sessions_opened_total") == 1
                assert value("seats", role="hop") == 1 and value("seats", role="standby") == 0
                # The first new token comes of the prompt's last row; the ninth is not sent.
                assert value("tokens_total", kind="decode") == value("pass_rows_count", kind="decode") == 8
                assert value("tokens_total", kind="prefill") == prompt
                assert value("step_queue_seconds_count", kind="decode") == 8
                assert value("step_compute_seconds_bucket", kind="decode", le="+Inf") == 8
                spent = value("step_compute_seconds_sum", kind="decode")
                assert 0 < spent == value("busy_seconds_total", kind="decode")
                held = value("cache_used_positions")
                assert prompt + 8 <= held < prompt + 8 + 64 and held < value("cache_limit_positions")
                assert value("steps_refused_total", reason="busy") == value("gaps_total") == 0
                assert value("traffic_frames_total", direction="in") >= 9
                assert value("traffic_bytes_total", direction="in") > 4 * 64 * (prompt + 8)  # fp32 rows of 64
                assert value("links", to="peer") == 1
            assert (await figures(swarm.peers[0]))("links", to="client") == 1
            assert (await figures(swarm.peers[0]))("p2pd_restarts_total") == 1
        await until(lambda: not any(peer.sessions for peer in swarm.peers))
        for peer in swarm.peers:
            value = await figures(peer)
            assert value("sessions") == 0 and value("seats", role="hop") == 0
            assert 0 < value("cache_kept_positions") == value("cache_used_positions")
            assert value("tokens_total", kind="decode") == 8


async def test_a_loss_shows_in_who_paid_and_who_took_over(tiny: Path, local: Reference) -> None:
    """The second hop is killed: its standby is called in, and had been sent all by the first hop."""
    async with running(tiny, SPARED) as (swarm, _), swarm.model() as model, model.session() as session:
        text = Text(session, local, "Once upon a time there was ")
        await text.more(3)
        await until(lambda: session.standbys_ready)
        first, lost = used(swarm, session, 0), used(swarm, session, 1)
        (taking,) = [swarm.by_id(hop.peer_id) for hop in session.standbys if hop.entry == lost.span.start]
        assert (await figures(taking))("seats", role="standby") == 1
        assert (await figures(first))("standby_positions_total") >= len(text.ids)
        await asyncio.to_thread(lost.kill)
        await text.more(3)
        value = await figures(taking)
        assert value("takeovers_total") == value("seats", role="hop") == 1 and value("seats", role="standby") == 0


async def test_a_replay_is_counted_where_it_is_paid(tiny: Path, local: Reference) -> None:
    async with running(tiny, [*CHAIN, "3:6"], standby="none") as (swarm, model), model.session() as session:
        text = Text(session, local, "Once upon a time there was ")
        await text.more(3)
        first, lost = used(swarm, session, 0), used(swarm, session, 1)
        assert (await figures(first))("replayed_positions_total") == 0
        await asyncio.to_thread(lost.kill)
        await text.more(3)
        assert (await figures(first))("replayed_positions_total") >= len(text.ids)
        assert (await figures(first))("tokens_total", kind="prefill") == len(text.ids), "it computed nothing twice"


async def test_a_peer_that_leaves_hands_over_sessions_and_pages(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwarmClient, "transfer_pays", lambda *_: True)
    async with running(tiny, SPARED) as (swarm, model), model.session(standby="none") as session:
        text = Text(session, local, "Once upon a time there was " * 10)
        await text.more(3)
        leaving = used(swarm, session, 1)
        gone = asyncio.ensure_future(leaving.host.arun(leaving.service.hand_over()))
        await until(lambda: leaving.service.table.leaving)
        while not gone.done():
            await text.more(1)
        taking = used(swarm, session, 1)
        assert taking is not leaving
        value, other = await figures(leaving), await figures(taking)
        assert value("hand_overs_total") == 1 and other("hand_overs_total") == 0
        assert value("pages_positions_total", direction="out") >= len(text.ids)
        assert other("pages_positions_total", direction="in") == value("pages_positions_total", direction="out")
        assert value("pages_positions_total", direction="in") == 0 and other("takeovers_total") == 1


async def test_what_was_refused_and_evicted_for_want_of_room(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:6", cache_bytes=room_for(48))
        async with swarm.model() as model:
            for prompt in ("The first of two texts", "Another one of those texts"):
                async with model.session() as session:
                    await Text(session, local, prompt).more(4)
                await until(lambda: not peer.sessions)
            value = await figures(peer)
            assert value("evictions_total", of="prefix") == 1 and value("evictions_total", of="seat") == 0
            assert value("sessions_refused_total") == 0
            first, second = model.session(), model.session()
            await Text(first, local).more(4)
            waiting = asyncio.ensure_future(Text(second, local, "Another text, for which").more(4))
            await until(lambda: peer.service.table.counts.sessions_refused)
            await first.__aexit__()
            await waiting
            assert (await figures(peer))("sessions_refused_total") >= 1
            await second.__aexit__()
        await swarm.all_closed()


async def test_a_step_without_room_is_refused(tiny: Path, local: Reference) -> None:
    """A peer that fills up in mid-answer is left."""
    async with InProcessSwarm(tiny) as swarm:
        small, _ = await swarm.add("0:6", cache_bytes=room_for(48)), await swarm.add("0:6")
        swarm.tell(small, decode_s=1e-5)  # the better choice
        async with swarm.model(standby="none") as model, model.session() as session:
            await Text(session, local, "A text that is longer than").more(40)
            left = [recovery for recovery in session.recoveries if "room" in recovery.reason]
            # Those of a later trial, too, where all takes long.
            assert len(left) == 1 and (await figures(small))("steps_refused_total", reason="busy") >= 1
        await swarm.all_closed()


async def test_an_idle_session_makes_room_and_a_frame_for_clients_is_refused(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:6", cache_bytes=room_for(48))
        async with swarm.model() as model:
            first, second = model.session(), model.session()
            await Text(first, local, "The first of the two").more(4)

            def grow_old() -> None:
                for session in peer.service.table.sessions.values():
                    session.heard_at -= 60

            peer.host.call(grow_old)
            await Text(second, local, "Another text, for which").more(4)
            value = await figures(peer)
            assert value("evictions_total", of="seat") == 1 and value("frames_refused_total") == 0
            link = model.client.link(peer.peer_id)
            assert link is not None
            link.send(Frame(type=FrameType.LOST, session=bytes(16), body=Lost("a", "b", "for clients")))
            await until(lambda: peer.service.table.counts.frames_refused)
            assert (await figures(peer))("frames_refused_total") == 1
            await first.__aexit__()
            await second.__aexit__()
        await swarm.all_closed()


async def test_a_shared_beginning_is_adopted(tiny: Path, local: Reference) -> None:
    async with running(tiny, CHAIN) as (swarm, model):
        for question in ("Why?", "When?"):
            async with model.session() as session:
                text = Text(session, local, "You are one of many peers and answer. " + question)
                await text.more(3)
            await until(lambda: not any(peer.sessions for peer in swarm.peers))
        for peer in swarm.peers:
            value = await figures(peer)
            assert value("adopted_positions_total") == len(local.ids("You are one of many peers and answer. Wh"))
            assert value("sessions_opened_total") == 2


async def test_it_is_read_over_http_from_the_peers_own_loop(tiny: Path) -> None:
    async with InProcessSwarm(tiny, ["0:6"]) as swarm:
        host, service = swarm.peers[0].host, swarm.peers[0].service
        metrics = Metrics()
        server = MetricsServer(metrics.page, CONTENT_TYPE)
        url = await host.arun(server.listen("127.0.0.1"))

        def read() -> tuple[str, str]:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.headers["Content-Type"], answer.read().decode()

        kind, page = await asyncio.to_thread(read)
        assert kind == CONTENT_TYPE and "process_cpu_seconds_total" in page and "swarm_peer" not in page
        metrics.watch_service("tiny", SWARM, lambda: service)
        _, page = await asyncio.to_thread(read)
        assert parsed(page)("sessions") == 0
        await host.arun(server.close())
    well_named(page)


def well_named(page: str) -> None:
    """https://prometheus.io/docs/practices/naming/"""
    families = [each for each in text_string_to_metric_families(page) if each.name.startswith("swarm_")]
    assert families
    for family in families:
        assert family.name.startswith("swarm_peer") and family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_mib", "_total", "_count", "_sum"))
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)


# -- apart from a swarm ------------------------------------------------------------------------------------------


def test_a_spread_counts_a_bound_as_within() -> None:
    spread = Spread((1, 2, 4))
    for value in (0, 1, 1.5, 2, 3, 4, 4.5, 100):
        spread.add(value)
    assert spread.counts == [2, 2, 2, 2] and spread.sum == 116


def test_the_record() -> None:
    record = PeerRecord(peer_id="12D3KooWx", span=Span(3, 6), state=PeerState.DRAINING, sequence=7, expires_at=140.0)
    announcer: Any = SimpleNamespace(announced=None, failures=2)
    hive: Any = SimpleNamespace(dht_time=lambda: 100.0)
    metrics = Metrics()
    metrics.watch_directory("tiny", SWARM, lambda: record, announcer, hive)
    assert "record_sequence" not in metrics.page().decode()
    announcer.announced = record
    value = parsed(metrics.page().decode())
    assert value("record_sequence") == 7 and value("record_expires_in_seconds") == 40
    assert value("record_failures_total") == 2
    assert value("state", swarm_peer_state="draining") == 1 and value("state", swarm_peer_state="serving") == 0
    assert value("info", peer_id="12D3KooWx", blocks="3:6") == 1
    well_named(metrics.page().decode())
