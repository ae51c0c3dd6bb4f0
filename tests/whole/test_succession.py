"""Two services of one peer: a session is served to its end by the one that has it, and new ones go to the other. Or
one after the other, where there is no memory for both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peer import succession
from peer.blocks import Loading
from peer.cache import CacheBudget
from peer.service import Service
from peer.succession import Succession
from routing.types import Span
from swarm.frames import Frame, FrameType
from tests.whole.inprocess import PLENTY, SPEED, InProcessModel, InProcessPeer
from tests.whole.reference import Reference
from tests.whole.scenes import Text, running
from tests.whole.stand_ins import until


class Moving:
    """A peer of the swarm that goes to serve other blocks."""

    def __init__(self, peer: InProcessPeer):
        self.peer, self.succession = peer, Succession(peer.service)
        peer.tap.service = self.succession

    async def succeed(self, span: str) -> Service:
        return await self.peer.host.arun(self._succeed(Span.parse(span)))

    async def _succeed(self, span: Span) -> Service:
        swarm, former = self.peer.swarm, self.peer.service
        thread = former.stages[0].lane.thread
        blocks = await thread.run(Loading(swarm.checkpoint, swarm.family, span, swarm.dtype).load_all)
        service = Service(me=former.me, blocks=blocks, budget=CacheBudget(PLENTY), threads=[thread], speed=SPEED)
        self.peer._stack.push_async_callback(service.close)
        self.succession.succeed(service, self.peer.endpoint)
        self.peer.service, self.peer.span = service, span
        return service

    async def retire(self, late_s: float = 0.0) -> None:
        await self.peer.host.arun(self.succession.retire(late_s))

    async def vacate(self, may: bool = True) -> bool:
        async def is_asked() -> bool:
            return may

        return await self.peer.host.arun(self.succession.vacate(is_asked))


async def takes_over(
    model: InProcessModel, text: Text, moving: Moving, service: Service, other: InProcessPeer
) -> None:
    """Its new blocks, of which it is the only peer once `other` is dead."""
    moving.peer.swarm.tell(moving.peer)
    await model.client.refresh()
    await model.client.probe()
    await asyncio.to_thread(other.kill)
    await text.more(4)
    assert text.session.route[1].peer_id == moving.peer.peer_id and len(service.table.sessions) == 1


async def test_who_has_a_spare_is_handed_over_and_new_sessions_use_the_new_blocks(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3", "3:6", "0:3"]) as (swarm, model):
        text = Text(model.session(), local, "A text: ")
        await text.more(4)
        route = text.session.route
        assert route is not None
        moving = Moving(swarm.by_id(route[0].peer_id))
        former = moving.peer.service
        service = await moving.succeed("3:6")
        assert moving.succession.services == [service, former]
        await text.more(2)  # as if nothing had happened
        assert text.session.route == route and len(former.table.sessions) == 1 and not service.table.sessions
        retiring = asyncio.create_task(moving.retire())
        while not retiring.done():
            await text.more(1)
        await retiring
        assert text.session.route is not None and moving.peer.peer_id not in text.session.route.peers
        assert moving.succession.services == [service]
        await until(lambda: moving.peer.peer_id not in model.client.leaving)  # its connection is a new one
        await takes_over(model, text, moving, service, swarm.by_id(route[1].peer_id))
        await text.session.__aexit__()


async def test_who_comes_late_for_the_old_blocks_is_served(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3", "3:6"]) as (swarm, model):
        moving = Moving(swarm.by_span("0:3"))
        former = moving.peer.service
        await moving.succeed("3:6")
        retiring = asyncio.create_task(moving.retire(late_s=1.0))
        async with model.session() as session:  # its view is of before
            await Text(session, local).more(3)
            assert len(session.recoveries) == 1 and len(former.table.sessions) == 1
        await retiring


async def test_who_has_no_memory_for_both_hands_over_first_and_is_away_until_it_has_the_others(
    tiny: Path, local: Reference
) -> None:
    async with running(tiny, ["0:3", "3:6", "0:3"]) as (swarm, model):
        text = Text(model.session(), local, "A text: ")
        await text.more(4)
        route = text.session.route
        assert route is not None
        moving = Moving(swarm.by_id(route[0].peer_id))
        vacating = asyncio.create_task(moving.vacate())
        while not vacating.done():
            await text.more(1)
        assert await vacating and not moving.succession.services and not moving.succession.sessions
        assert moving.peer.peer_id not in text.session.route.peers
        await until(lambda: moving.peer.peer_id not in model.client.leaving)
        # The directory still says what it served: whoever asks it for that is sent on.
        async with model.session() as other:
            await Text(other, local, "Another: ").more(3)
            assert other.route[0].peer_id != moving.peer.peer_id
        service = await moving.succeed("3:6")
        assert moving.succession.services == [service]
        await takes_over(model, text, moving, service, swarm.by_id(route[1].peer_id))
        await text.session.__aexit__()


async def test_who_cannot_hand_all_over_serves_on(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "RETIRE_S", 0.3)
    async with running(tiny, ["0:3", "3:6"]) as (swarm, model):
        text = Text(model.session(), local, "A text: ")
        await text.more(4)
        moving = Moving(swarm.by_span("0:3"))
        vacating = asyncio.create_task(moving.vacate())
        while not vacating.done():
            await text.more(1)
        assert not await vacating and moving.succession.services == [moving.peer.service]
        async with model.session() as other:
            await Text(other, local, "Another: ").more(3)
        await text.more(3)
        assert len(text.session.recoveries) == 1, "only the first route"
        await text.session.__aexit__()


async def test_who_may_not_go_when_all_are_handed_over_takes_sessions_again(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3", "3:6"]) as (swarm, model):
        moving = Moving(swarm.by_span("0:3"))
        assert not await moving.vacate(may=False)
        async with model.session() as session:
            await Text(session, local).more(3)


def test_what_is_answered_while_nothing_is_served() -> None:
    away = Succession.__new__(Succession)
    away._current = away._former = None
    said: list[tuple[FrameType, bytes, int]] = []
    link: Any = SimpleNamespace(send=lambda frame: said.append((frame.type, frame.session, frame.epoch)))
    for kind in (FrameType.OPEN, FrameType.STEP, FrameType.CLOSE, FrameType.UNKNOWN):
        away.frame_received(link, Frame(type=kind, session=b"s" * 16, epoch=3))
    assert said == [(FrameType.BUSY, b"s" * 16, 3), (FrameType.UNKNOWN, b"s" * 16, 3)]
