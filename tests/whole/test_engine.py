"""Many sessions on peers with little room and little time: none starves, none is lost, nothing is left over."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import psutil
import pytest

from peer.effects import SessionLimits
from tests.whole.inprocess import InProcessModel, InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import Text, running
from tests.whole.stand_ins import Deaf

pytestmark = pytest.mark.beside
CHAIN = ["0:3", "3:6"]
SLOW_S = 0.2


def slow_prefill(peer: InProcessPeer) -> None:
    """Each block takes its time over a chunk, and none over a decode step."""
    peer.service.blocks.fused.get = lambda offset: None  # type: ignore[method-assign]
    for layer in peer.service.blocks.layers:
        real = layer.forward

        def forward(hidden, *, real=real, **more):
            if hidden.shape[1] > 8:
                time.sleep(SLOW_S)
            return real(hidden, **more)

        layer.forward = forward  # type: ignore[method-assign]


async def test_a_long_prompt_does_not_hold_up_the_tokens_of_others(tiny: Path, local: Reference) -> None:
    """It takes 1.2 s; a decode step waits for one block of it at most, at each hop."""
    async with running(tiny, CHAIN) as (swarm, model):
        talking, reading = model.session(), model.session()
        text, prompt = Text(talking, local, "Say on: "), Text(reading, local, "A long prompt. " * 7)
        await text.more(1)
        for peer in swarm.peers:
            slow_prefill(peer)
        first_token = asyncio.ensure_future(prompt.more(1))
        begun, said = time.monotonic(), 0
        while not first_token.done():
            await text.more(1)
            said += 1
        seconds = time.monotonic() - begun
        assert said >= 4, f"{said} tokens in {seconds:.2f} s beside a long prompt"
        assert seconds < 6 * SLOW_S + said * 0.3, "and the prompt is not starved by them"
        for session in (talking, reading):
            await session.__aexit__()


async def test_sessions_that_do_not_fit_together_all_go_on(tiny: Path, local: Reference) -> None:
    """64 idle sessions, room for a quarter of them; then all speak again at once, and nobody is banned."""
    room = 16 * 64 * 4 * (2 * 2 * 16 * 3 + 64)
    async with InProcessSwarm(tiny) as swarm:
        for span in CHAIN:
            await swarm.add(span, cache_bytes=room, limits=SessionLimits(idle_s=0.05, retry_after_ms=50))
        async with swarm.model() as model:
            sessions = [model.session() for _ in range(64)]
            texts = [Text(session, local, f"Session {index} says: ") for index, session in enumerate(sessions)]
            for text in texts:
                await text.more(3)
            held = [sum(bool(s.position) for x in p.service.table.sessions.values() for s in x.seats.values())
                    for p in swarm.peers]  # fmt: skip
            assert max(held) < 40
            await asyncio.gather(*(text.more(6) for text in texts))
            assert not model.client.health.banned_peers(time.monotonic())
            for session in sessions:
                await session.__aexit__()
        await swarm.all_closed()


async def test_a_soak_of_two_hundred_sessions_leaves_nothing(tiny: Path, local: Reference) -> None:
    """Of eight clients; some sessions are cancelled anywhere, and two clients vanish without a word."""
    limits = SessionLimits(client_gone_s=0.3, silent_s=1.0, kept_s=2.0, idle_s=0.2)
    rng = random.Random(4)
    done = cancelled = 0
    async with InProcessSwarm(tiny) as swarm:
        for span in CHAIN:
            await swarm.add(span, limits=limits)

        async def talk(model: InProcessModel, index: int) -> None:
            nonlocal done
            async with model.session() as session:
                await Text(session, local, f"{index % 5} of many: ").more(1 + index % 7)
                done += 1

        async def client(number: int, sessions: int) -> None:
            nonlocal cancelled
            async with swarm.model(client=f"client {number}") as model:
                for index in range(sessions):
                    task = asyncio.ensure_future(talk(model, 10 * index + number))
                    if rng.random() < 0.25:
                        await asyncio.sleep(rng.uniform(0, 0.05))
                        task.cancel()
                        cancelled += 1
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                if number >= 6:
                    leaving = asyncio.ensure_future(talk(model, number))
                    await asyncio.sleep(0.03)
                    for channel in list(model.client._endpoint._channels):
                        channel.sink = Deaf()
                        channel.abort()
                    leaving.cancel()
                    await asyncio.gather(leaving, return_exceptions=True)

        await asyncio.gather(*(client(number, 5) for number in range(8)))
        process = psutil.Process()
        before = process.memory_info().rss
        await asyncio.gather(*(client(number, 20) for number in range(8)))
        assert done > 100 and cancelled > 20
        await swarm.all_closed(timeout_s=10)
        grown = (process.memory_info().rss - before) / 2**20
        assert grown < 64, f"{grown:.0f} MiB more than after the first forty sessions"
        for peer in swarm.peers:
            assert not peer.service.table.sessions and not peer.service.pipeline.waiting
            assert peer.service.budget.used_bytes == 0 and not list(peer.service.budget.least_recent())
