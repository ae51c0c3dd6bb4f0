"""Real peers, DHT included: those that join at the same moment do not all fill the same gap."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from peer.config import PeerConfig
from peer.peer import Peer
from routing.types import Span


async def test_of_three_peers_that_start_together_one_takes_the_gap(tiny: Path, tmp_path: Path) -> None:
    config = PeerConfig(model=str(tiny), most_blocks=3, host="127.0.0.1", threads=1, identity_path=tmp_path / "0.key")
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(Peer([config]))
        config = replace(config, join=founder.nodes[0].serving.join_code)
        others = [Peer([replace(config, identity_path=tmp_path / f"{number}.key")]) for number in (1, 2, 3)]
        await asyncio.gather(*(stack.enter_async_context(peer) for peer in others))
        spans = sorted(peer.nodes[0].serving.span for peer in others)
        assert spans != [Span(3, 6)] * 3 and spans[-1] == Span(3, 6)
