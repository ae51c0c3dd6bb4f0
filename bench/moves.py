"""Owns the figures of moving: six peers choose their blocks, two leave and one comes, and nobody is to notice."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from itertools import pairwise

from bench.figures import Figure
from bench.setting import Setting
from routing.errors import SwarmError
from swarm.local import LocalPeer, LocalSwarm
from swarm.model import SwarmModel

OPTIONS = ("--most-blocks", "15", "--rebalance", "3")
PEERS, CLIENTS, TOKENS = 6, 3, 2000
QUIET_S, LONGEST_S = 12.0, 60  # after the last move; and at most, if they do not end


def moves(setting: Setting) -> list[Figure]:
    """One swarm, since it takes a minute: three answers run all the time."""
    gaps_s, dropped, moved = asyncio.run(_moves(setting.model))
    words = f"{PEERS} peers, two leave and one comes, {CLIENTS} answers under way"
    note = f"{moved} moves to other blocks"
    return [
        Figure.of_sum(f"{words}: answers broken off", "", [dropped], note),
        Figure(figure=f"{words}: longest time between two tokens", value=max(gaps_s), unit="s",
               runs=tuple(sorted(gaps_s)[-5:]), note=note),
    ]  # fmt: skip


async def _moves(name: str) -> tuple[list[float], int, int]:
    moved: list[float] = []
    with LocalSwarm(name, [None] * PEERS, options=OPTIONS) as swarm:
        for peer in swarm.peers:
            _listen(peer, moved)
        async with SwarmModel.connect(name, join=swarm.join_code, threads=1) as model:
            stop = asyncio.Event()
            answers = [asyncio.create_task(_answer(model, number, stop)) for number in range(CLIENTS)]
            await asyncio.sleep(QUIET_S / 2)
            for peer in swarm.peers[-2:]:
                peer.ask_to_leave()
            await asyncio.to_thread(swarm.add)
            _listen(swarm.peers[-1], moved)
            begun = time.monotonic()
            for _ in range(LONGEST_S):
                await asyncio.sleep(1.0)
                if time.monotonic() > max([begun, *moved]) + QUIET_S:
                    break
            stop.set()
            ended = await asyncio.gather(*answers, return_exceptions=True)
    dropped = sum(isinstance(each, SwarmError) for each in ended)
    gaps_s = [gap for each in ended if isinstance(each, list) for gap in each]
    return gaps_s, dropped, len(moved)


async def _answer(model: SwarmModel, number: int, stop: asyncio.Event) -> list[float]:
    """The times between its tokens."""
    times = []
    async with model.session() as session:
        prompt = model.encode(f"Tell a long story, number {number}:")
        async for token in session.generate(prompt, max_new_tokens=TOKENS, ignore_eos=True):
            times.append(token.at_s)
            if stop.is_set():
                break
    return [after - before for before, after in pairwise(times)]


def _listen(peer: LocalPeer, moved: list[float]) -> None:
    def read() -> None:
        assert peer.process.stdout is not None
        moved.extend(time.monotonic() for line in peer.process.stdout if json.loads(line)["event"] == "moved")

    threading.Thread(target=read, daemon=True).start()
