"""128 greedy tokens equal the local model's, whoever is killed and when; over TLS and over streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarm.model import TextSession
from tests.whole.inprocess import InProcessSwarm
from tests.whole.reference import Reference

TOKENS = 128
KILL_AT = (127, 64, 1)
PROMPTS = ("Peers come and go, and the text goes on: ", "A span, ", "What is a hop?")
LAYOUTS = {
    "two-spans": ["0:3", "3:6"] * 2,
    "three-spans": ["0:2", "2:4", "4:6"] * 2,
    "overlapping": ["0:3", "2:5", "4:6", "0:2", "1:4", "3:6"],  # a spare always has other boundaries
}
VICTIMS = {"first": [0], "middle": [1], "last": [-1], "two": [0, 1]}
CASES = [
    (layout, victims) for layout in LAYOUTS for victims in VICTIMS if (layout, victims) != ("two-spans", "middle")
]
# Frames and rule are the same over streams; how the end of one is noticed is not.
STREAM_CASES = [("two-spans", "two"), ("overlapping", "first"), ("overlapping", "middle"), ("overlapping", "last")]


class Text:
    """One generation of TOKENS tokens that can be led up to a token, and then on to its end."""

    def __init__(self, session: TextSession, local: Reference, prompt: str):
        self.session, self._local, self._ids = session, local, local.ids(prompt)
        local.greedy(self._ids, TOKENS)  # once for each prompt: what transformers' own loop gives
        self._stream = session.generate(self._ids, max_new_tokens=TOKENS, ignore_eos=True)
        self.tokens: list[int] = []

    async def to(self, count: int) -> None:
        while len(self.tokens) < count:
            self.tokens.append((await anext(self._stream)).id)

    async def finish(self) -> None:
        await self.to(TOKENS)
        await self._stream.aclose()
        self._local.check(self._ids, self.tokens, TOKENS)


async def kill_in_mid_answer(swarm: InProcessSwarm, local: Reference, victims: list[int]) -> None:
    """Three sessions on one route, which have had 127, 64 and 1 tokens when hops of it are killed."""
    async with swarm.model() as model, model.session() as one, model.session() as two, model.session() as three:
        texts = [Text(session, local, prompt) for session, prompt in zip((one, two, three), PROMPTS, strict=True)]
        await texts[0].to(63)
        await asyncio.gather(texts[0].to(126), texts[1].to(63))
        await asyncio.gather(*(text.to(count) for text, count in zip(texts, KILL_AT, strict=True)))
        route = one.route
        assert route is not None and two.route == three.route == route
        killed = {route[victim % len(route)].peer_id for victim in victims}
        await asyncio.gather(*(asyncio.to_thread(swarm.by_id(peer_id).kill) for peer_id in killed))
        await asyncio.gather(*(text.finish() for text in texts))
        for session in (one, two, three):
            assert len(session.recoveries) > 1 and session.route is not None
            assert not session.route.peers & killed
    await swarm.all_closed()


@pytest.mark.parametrize(("layout", "direct"), [*((layout, True) for layout in LAYOUTS), ("overlapping", False)])
async def test_undisturbed(layout: str, direct: bool, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout], direct=direct) as swarm:
        async with swarm.model() as model, model.session() as session:
            await Text(session, local, PROMPTS[0]).finish()
            assert len(session.recoveries) == 1
        assert bool(swarm.net and swarm.net.opened) != direct
        await swarm.all_closed()


@pytest.mark.parametrize(("layout", "victims"), CASES)
async def test_kill(layout: str, victims: str, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout]) as swarm:
        await kill_in_mid_answer(swarm, local, VICTIMS[victims])


@pytest.mark.parametrize(("layout", "victims"), STREAM_CASES)
async def test_kill_over_streams(layout: str, victims: str, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout], direct=False) as swarm:
        await kill_in_mid_answer(swarm, local, VICTIMS[victims])
