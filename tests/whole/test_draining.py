"""Real nodes, DHT included: one that has no memory for two spans takes the blocks of one that leaves, in mid-answer."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from peer.config import PeerConfig
from peer.node import Node
from peer.peer import Peer
from routing.types import PeerState, Span
from swarm.model import SwarmModel
from tests.tiny import make_tiny
from tests.whole.reference import Reference

WIDE = {"hidden_size": 256, "intermediate_size": 512}
BLOCK_BYTES = 1_771_520  # of such a block in fp32
AFTER = 8  # tokens that must still come on the new route


async def test_who_has_no_memory_for_both_spans_drains_and_then_takes_what_nobody_serves(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model", layers=6, tokenizer=True, **WIDE)
    local = Reference(folder)
    config = PeerConfig(model=str(folder), host="127.0.0.1", threads=1, rebalance_s=0.2)
    options = (
        {"most_blocks": 3, "max_memory_bytes": 7 * BLOCK_BYTES},  # three and their cache, not six
        {"blocks": Span(0, 3)},
        {"blocks": Span(3, 6)},
    )
    async with AsyncExitStack() as stack:
        nodes: list[Node] = []
        for number, more in enumerate(options):
            join = nodes[0].serving.join_code if nodes else None
            peer = Peer([replace(config, identity_path=tmp_path / f"{number}.key", join=join, **more)])
            nodes += (await stack.enter_async_context(peer)).nodes
        mover, keeper, leaver = nodes
        assert mover.serving.span == Span(0, 3)
        runs = [asyncio.create_task(node.run()) for node in (keeper, leaver)]
        stack.callback(lambda: [run.cancel() for run in runs])
        blocks = weakref.ref(mover._service.blocks)
        async with SwarmModel.connect(str(folder), join=keeper.serving.join_code, threads=1) as model:
            session = await stack.enter_async_context(model.session())
            ids, got, times, moved_at, leaving = local.ids("A text: "), [], [], 0, None
            async for token in session.generate(ids, max_new_tokens=450, ignore_eos=True):
                got.append(token.id)
                times.append(token.at_s)
                if leaving is None:
                    leaving = asyncio.create_task(leaver.hand_over())
                    runs.append(asyncio.create_task(mover.run()))
                await asyncio.sleep(0.02)
                if not moved_at and mover._peer.identity.peer_id == session.route[-1].peer_id:
                    moved_at = len(got)
                if moved_at and len(got) >= moved_at + AFTER:
                    break
            assert moved_at and session.route[0].peer_id == keeper._peer.identity.peer_id
            local.check(ids, got, len(got))
            print(f"moved after {moved_at} tokens; longest gap {1e3 * max(b - a for a, b in pairwise(times)):.0f} ms")
            await asyncio.wait_for(leaving, 5.0)
            assert mover.record().span == Span(3, 6) and mover.record().state is PeerState.SERVING
            gc.collect()
            assert blocks() is None, "what it gave up is still in memory"
            await session.__aexit__()
