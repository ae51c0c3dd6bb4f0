"""Two services of one peer: a session is served to its end by the one that has it, and new ones go to the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from peer.blocks import Blocks
from peer.cache import CacheBudget
from peer.service import Service
from peer.succession import Succession
from routing.types import Span
from tests.whole.inprocess import PLENTY, SPEED, InProcessPeer
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
        blocks = await former._lane.thread.run(Blocks.load, swarm.checkpoint, swarm.family, span, swarm.dtype, "cpu")
        service = Service(
            me=former.me, blocks=blocks, budget=CacheBudget(PLENTY), thread=former._lane.thread, speed=SPEED
        )
        self.peer._stack.push_async_callback(service.close)
        self.succession.succeed(service, self.peer.endpoint)
        self.peer.service, self.peer.span = service, span
        return service

    async def retire(self) -> None:
        await self.peer.host.arun(self.succession.retire())


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
        swarm.tell(moving.peer)
        await model.client.refresh()
        await model.client.probe()
        # Only the mover has those blocks now.
        await asyncio.to_thread(swarm.by_id(route[1].peer_id).kill)
        await text.more(4)
        assert text.session.route[1].peer_id == moving.peer.peer_id and len(service.table.sessions) == 1
        await text.session.__aexit__()
