"""128 greedy tokens equal the local model's, whoever is killed and when; over TLS and over streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.whole.inprocess import InProcessSwarm
from tests.whole.reference import Reference

TOKENS = 128
PROMPT = "Peers come and go, and the text goes on: "
LAYOUTS = {
    "two-spans": ["0:3", "3:6"] * 2,
    "three-spans": ["0:2", "2:4", "4:6"] * 2,
    "overlapping": ["0:3", "2:5", "4:6", "0:2", "1:4", "3:6"],  # no two share both boundaries
}
VICTIMS = {"first": [0], "middle": [1], "last": [-1], "two": [0, 1]}
CASES = [
    (layout, victims, at)
    for layout in LAYOUTS
    for victims in VICTIMS
    for at in (1, 64, 127)
    if (layout, victims) != ("two-spans", "middle")
]
# Over streams only the bytes' way differs: every victim once.
STREAM_CASES = [case for case in CASES if case[2] == 64]


async def generate_and_kill(swarm: InProcessSwarm, local: Reference, victims: list[int], at: int | None) -> None:
    ids = local.ids(PROMPT)
    tokens: list[int] = []
    killed: list[str] = []
    async with swarm.model() as model, model.session() as session:
        async for token in session.generate(ids, max_new_tokens=TOKENS, ignore_eos=True):
            tokens.append(token.id)
            if len(tokens) == at:
                assert session.route is not None
                # A route of two hops has no middle: then its last is as good.
                hops = [session.route[max(-len(session.route), min(v, len(session.route) - 1))] for v in victims]
                killed = [hop.peer_id for hop in hops]
                await asyncio.gather(*(asyncio.to_thread(swarm.by_id(peer_id).kill) for peer_id in killed))
        local.check(ids, tokens, TOKENS)
        assert len(session.recoveries) == 1 + bool(killed) or len(killed) > 1
        assert not session.route.peers & set(killed)
    await swarm.all_closed()


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_undisturbed(layout: str, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout]) as swarm:
        await generate_and_kill(swarm, local, [], None)


@pytest.mark.parametrize(("layout", "victims", "at"), CASES)
async def test_kill(layout: str, victims: str, at: int, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout]) as swarm:
        await generate_and_kill(swarm, local, VICTIMS[victims], at)


@pytest.mark.parametrize(("layout", "victims", "at"), STREAM_CASES)
async def test_kill_over_streams(layout: str, victims: str, at: int, tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, LAYOUTS[layout], direct=False) as swarm:
        await generate_and_kill(swarm, local, VICTIMS[victims], at)
        assert all(carrier.opened for carrier in swarm.net.values())  # type: ignore[union-attr]
