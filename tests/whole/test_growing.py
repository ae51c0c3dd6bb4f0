"""Real nodes, DHT included: a peer serves the first of its blocks while it loads the others, and then all of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from peer.config import PeerConfig
from peer.peer import Peer
from routing.types import Span
from swarm.model import SwarmModel
from tests.whole.reference import Reference

BEFORE, AFTER = 6, 12  # tokens before the rest is loaded, and after another peer has left that served it


async def test_an_answer_goes_on_while_a_peer_grows_and_then_uses_all_of_it(tiny: Path, tmp_path: Path) -> None:
    local, told = Reference(tiny), []
    config = PeerConfig(model=str(tiny), host="127.0.0.1", threads=1, renew_s=1.0)

    def peer(number: int, **more: object) -> Peer:
        key = tmp_path / f"{number}.key"
        return Peer([replace(config, identity_path=key, **more)], grown=lambda model, span: told.append((model, span)))

    async with AsyncExitStack() as stack:
        leaves = await stack.enter_async_context(AsyncExitStack())
        runs: list[asyncio.Task[None]] = []

        async def start(peer: Peer, until: AsyncExitStack) -> Peer:
            await until.enter_async_context(peer)
            runs.append(asyncio.create_task(peer.run()))
            until.callback(runs[-1].cancel)
            return peer

        founder = await start(peer(0, blocks=Span(3, 6)), stack)
        join = founder.nodes[0].serving.join_code
        leaver = await start(peer(1, blocks=Span(1, 3), join=join), leaves)
        grows, may = peer(2, blocks=Span(0, 3), join=join, first_s=0.0), asyncio.Event()
        (node,) = grows.nodes

        async def fetch(part: Span) -> None:
            if part.start > 0:
                await may.wait()

        node._loader._fetch = fetch
        await start(grows, stack)
        assert (node.serving.span, node.serving.loads) == (Span(0, 1), Span(0, 3))
        assert (node.record().span, node.record().loads) == (Span(0, 1), Span(0, 3))
        async with SwarmModel.connect(str(tiny), join=join, threads=1) as model, model.session() as session:
            ids, got, leaving, left_at = local.ids("A text: "), [], None, 0
            async for token in session.generate(ids, max_new_tokens=400, ignore_eos=True):
                got.append(token.id)
                await asyncio.sleep(0.02)
                if len(got) == BEFORE:
                    assert [len(hop) for hop in session.route] == [1, 2, 3]
                    may.set()
                if told and leaving is None:
                    leaving = asyncio.create_task(leaves.aclose())
                if leaver.identity.peer_id not in session.route.peers:
                    left_at = left_at or len(got)
                    if len(got) == left_at + AFTER:
                        break
            assert left_at and {hop.peer_id for hop in session.route if hop.entry < 3} == {grows.identity.peer_id}
            local.check(ids, got, len(got))
        await leaving
        assert told == [(str(tiny), Span(0, 3))]
        assert (node.record().span, node.record().loads) == (Span(0, 3), None)
