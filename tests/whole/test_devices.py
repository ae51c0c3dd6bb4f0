"""A device that fails for good while sessions run: they go on elsewhere, and the peer ends with a word to its owner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import devices
from peer.service import Service
from routing.errors import DeviceLost
from swarm.frames import FrameType
from tests.whole.inprocess import InProcessPeer
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, spare, used

GONE = "CUDA error: unspecified launch failure"


def fail(peer: InProcessPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, as torch has it: also for the least task. Only the peer that fails looks."""

    def begin(items: Any) -> Any:
        raise torch.AcceleratorError(GONE)

    monkeypatch.setattr(peer.service.stages[0].executor, "begin", begin)
    monkeypatch.setattr(devices, "computes", lambda device: False)


async def last_words(service: Service) -> None:
    async with asyncio.timeout(10):
        await service.watch()


@pytest.mark.parametrize("hop", [0, 1])
async def test_the_text_goes_on_elsewhere_and_the_peer_ends(
    hop: int, tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        lost = used(swarm, session, hop)
        fail(lost, monkeypatch)
        await text.more(10)
        assert lost.peer_id not in session.route.peers and GONE in session.recoveries[-1].reason
        with pytest.raises(DeviceLost, match=GONE):
            await lost.host.arun(last_words(lost.service))


async def test_it_is_noticed_too_when_something_held_is_asked_for(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal lies on the device. Here the hop after it is lost, and the one that takes its place asks."""
    async with running(tiny, SPARED, standby="none") as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        holder, after = used(swarm, session, 0), used(swarm, session, 1)
        fail(holder, monkeypatch)

        def rows(*_: int) -> Any:
            raise torch.AcceleratorError(GONE)

        for each in holder.service.table.sessions.values():
            for seat in each.seats.values():
                monkeypatch.setattr(seat.store, "rows", rows)
        await asyncio.to_thread(after.kill)
        await text.more(10)
        assert holder.peer_id not in session.route.peers and used(swarm, session, 1).positions(FrameType.FILL)
        with pytest.raises(DeviceLost, match=GONE):
            await holder.host.arun(last_words(holder.service))


async def test_a_pass_that_fails_alone_ends_nobody(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        failing = used(swarm, session, 1)

        def begin(items: Any) -> Any:
            raise RuntimeError("an operator of torch's refuses these rows")

        with monkeypatch.context() as patch:
            patch.setattr(failing.service.stages[0].executor, "begin", begin)
            await text.more(5)
        assert used(swarm, session, 1) is spare(swarm, failing)
        with pytest.raises(TimeoutError):
            await failing.host.arun(asyncio.wait_for(failing.service.watch(), 0.05))
