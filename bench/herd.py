"""Owns the figure of a herd: sixteen clients that start at the same moment, on two equal peers for each block.

All in one process, with real services, sockets and sessions. Peers sleep for what a pass should take instead of
computing for so long: two cores would hide what the choice of peers does.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from bench.figures import Figure
from bench.setting import Setting
from tests.tiny import make_tiny
from tests.whole.inprocess import InProcessModel, InProcessSwarm
from tests.whole.scenes import drag

BLOCKS, CHAIN = 6, ("0:3", "3:6")
CLIENTS = 16
START_S, RUN_S = 1.0, 15.0
PASS_S, ROW_S = 0.04, 0.01  # a pass, and each row in it
MOST_NEW = 450


def herd(setting: Setting) -> list[Figure]:
    """Tokens a second of all, over the ideal split's: twice what half of the clients get of half of the peers."""
    shares, moves = [], []
    with tempfile.TemporaryDirectory(prefix="herd-") as name:
        folder = Path(name, "model")
        make_tiny("llama", folder, layers=BLOCKS, tokenizer=True)
        for _ in range(setting.rounds):
            half, _ = asyncio.run(_run(folder, list(CHAIN), CLIENTS // 2))
            whole, moved = asyncio.run(_run(folder, [*CHAIN, *CHAIN], CLIENTS))
            shares.append(whole / (2 * half))
            moves.append(float(moved))
    note = f"{CLIENTS} clients within {START_S:g} s, {RUN_S:g} s in all; peers sleep {1e3 * PASS_S:g} ms a pass and " \
           f"{1e3 * ROW_S:g} ms a row"  # fmt: skip
    return [
        Figure.of_median("herd on two equal peers a block: tokens/s over the ideal split", "", shares, note),
        Figure.of_median("herd on two equal peers a block: moves", "in all", moves, note),
    ]


async def _run(folder: Path, spans: list[str], clients: int) -> tuple[float, int]:
    """Tokens a second of all together, and how often a session moved."""
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(InProcessSwarm(folder, spans))
        for peer in swarm.peers:
            drag(peer, lambda rows: PASS_S + ROW_S * rows)
            swarm.tell(peer, decode_s=(PASS_S + ROW_S) * len(spans) / BLOCKS, prefill_s=ROW_S / BLOCKS)
        models = [
            await stack.enter_async_context(
                swarm.model(client=f"client-{number}", learns=True, refresh_s=5.0, standby="none")
            )
            for number in range(clients)
        ]
        begun = time.monotonic()
        ended = [_generate(model, number, begun) for number, model in enumerate(models)]
        results = await asyncio.gather(*ended)
    return sum(tokens for tokens, _ in results) / RUN_S, sum(moves for _, moves in results)


async def _generate(model: InProcessModel, number: int, begun: float) -> tuple[int, int]:
    await asyncio.sleep(START_S * number / CLIENTS)
    tokens = 0
    async with model.session() as session:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(begun + RUN_S - time.monotonic()):
                async for _ in session.generate(f"Client {number}: ", max_new_tokens=MOST_NEW, ignore_eos=True):
                    tokens += 1
        return tokens, len(session.recoveries) - 1
