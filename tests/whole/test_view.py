"""What the view costs a client: nothing on the path of a token, and a peer that vanished is not believed in."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import stdev

import pytest

from routing.types import PeerRecord
from swarm import client as client_module
from tests.whole.inprocess import FAST
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import until


async def test_no_token_reads_the_directory(tiny: Path, local: Reference) -> None:
    async with running(tiny, SPARED) as (swarm, model):
        reads = swarm.directory.reads
        async with model.session() as session:
            await Text(session, local).more(30)
        assert swarm.directory.reads == reads


async def test_no_token_waits_for_a_directory_that_hangs(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny, SPARED, refresh_s=0.01) as (swarm, model), model.session() as session:
        text, hangs = Text(session, local), asyncio.Event()

        async def refresh() -> list[PeerRecord]:
            hangs.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(swarm.directory, "refresh", refresh)
        await hangs.wait()
        await text.more(30)


async def test_who_uses_a_peer_that_vanishes_does_not_plan_with_it_any_more(tiny: Path, local: Reference) -> None:
    """The directory still has its record, for as long as the record lives."""
    async with running(tiny, SPARED, heartbeat=FAST) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(5)
        gone = used(swarm, session, 1)
        gone.freeze()
        begun = time.monotonic()
        await text.more(1)
        await until(lambda: model.client.link(gone.peer_id) is None)
        assert time.monotonic() - begun < 2.5
        await model.client.refresh()
        assert gone.peer_id in model.client.view.records
        assert model.client.health.banned(gone.peer_id, time.monotonic())
        assert gone.peer_id not in session.route.peers
        async with model.session() as other:
            await Text(other, local).more(1)
            assert gone.peer_id not in other.route.peers
        gone.thaw()
        await session.__aexit__()
        await model.client.probe()  # its session there goes when the client meets it again
        await until(lambda: not gone.sessions)


async def test_clients_do_not_read_in_step(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tiny, SPARED) as (_, model):
        pauses: list[float] = []

        class Slept(asyncio.CancelledError): ...

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            raise Slept

        with monkeypatch.context() as patch:
            patch.setattr(client_module.asyncio, "sleep", sleep)
            for _ in range(50):
                with pytest.raises(Slept):
                    await model.client._keep_fresh()
    usual = model.client.config.refresh_s
    assert 0.8 * usual <= min(pauses) and max(pauses) <= 1.2 * usual
    assert stdev(pauses) > 0.08 * usual
