"""Real processes on loopback: SIGKILL, SIGSTOP, SIGTERM and dead p2pds under SmolLM2, and real hivemind streams.

One swarm for all of it, which shrinks from test to test; the tests of a module run in the order in which they stand.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.checkpoint import open_checkpoint
from swarm.local import LocalPeer, LocalSwarm
from swarm.model import SwarmModel, TextSession
from tests.whole.family import Family, daemon_of
from tests.whole.reference import Reference
from tests.whole.stand_ins import until

pytestmark = pytest.mark.processes

PROMPT = "Explain in a few sentences why the sea is salt:"
SPANS = ["0:15", "15:30"] * 3
TOKENS = 32


@pytest.fixture(scope="module")
def family() -> Iterator[Family]:
    family = Family()
    yield family
    deadline = time.monotonic() + 10
    while (left := family.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"still running: {left}"
    assert any("p2pd" in name for name in family.seen.values())  # it has looked at what matters


@pytest.fixture(scope="module")
def smollm2() -> Reference:
    checkpoint = open_checkpoint("smollm2")
    return Reference.of(checkpoint.reference_model(torch.float32), checkpoint.tokenizer())


@pytest.fixture(scope="module")
def swarm(family: Family) -> Iterator[LocalSwarm]:
    with LocalSwarm("smollm2", SPANS) as swarm:
        family.look()
        yield swarm
        family.look()


def way_in(swarm: LocalSwarm) -> str:
    """Any living peer's code; the founder may be dead by now."""
    return next(peer for peer in swarm.peers if peer.alive).facts["join_code"]


@asynccontextmanager
async def answering(swarm: LocalSwarm, family: Family) -> AsyncIterator[tuple[SwarmModel, TextSession]]:
    swarm.join_code = way_in(swarm)
    async with SwarmModel.connect("smollm2", join=swarm.join_code) as model, model.session() as session:
        family.look()
        yield model, session


async def generate(
    session: TextSession, local: Reference, at: int, fault: Callable[[], Any], tokens: int = TOKENS
) -> float:
    """A whole answer, with a fault after token `at`; returns the longest time between two tokens, in seconds."""
    ids, got, times = local.ids(PROMPT), [], []
    session.rollback(0)
    async for token in session.generate(ids, max_new_tokens=tokens, ignore_eos=True):
        got.append(token.id)
        times.append(token.at_s)
        if len(got) == at:
            fault()
    local.check(ids, got, tokens)
    return max(after - before for before, after in pairwise(times))


def hop(swarm: LocalSwarm, session: TextSession, index: int) -> LocalPeer:
    assert session.route is not None
    return swarm.by_id(session.route[index].peer_id)


@pytest.mark.parametrize("index", [0, -1])
async def test_sigkill_of_a_hop_in_mid_answer(
    index: int, swarm: LocalSwarm, family: Family, smollm2: Reference
) -> None:
    async with answering(swarm, family) as (_, session):
        killed: list[LocalPeer] = []

        def kill() -> None:
            killed.append(hop(swarm, session, index))
            killed[0].kill()

        stall = await generate(session, smollm2, TOKENS // 2, kill)
        print(f"stall after SIGKILL: {1e3 * stall:.0f} ms")
        assert killed[0].peer_id not in session.route.peers
        # On a busy machine the session may have moved to a quicker peer besides.
        losses = [taken for taken in session.recoveries if not taken.reason.startswith("a cheaper route")]
        assert len(losses) == 2, [taken.reason for taken in session.recoveries]
        assert stall < 4


async def test_sigkill_of_two_hops_at_once(swarm: LocalSwarm, family: Family, smollm2: Reference) -> None:
    async with answering(swarm, family) as (_, session):

        def kill() -> None:
            both = [hop(swarm, session, index) for index in (0, 1)]
            for peer in both:
                peer.process.kill()
            for peer in both:
                peer.process.wait()

        stall = await generate(session, smollm2, TOKENS // 2, kill)
        print(f"stall after SIGKILL of both: {1e3 * stall:.0f} ms")
        assert sum(peer.alive for peer in swarm.peers) == 2


async def test_a_peer_restarted_with_the_same_identity(
    swarm: LocalSwarm, family: Family, smollm2: Reference
) -> None:
    """The last peer for some blocks dies, and comes back while its client waits."""
    async with answering(swarm, family) as (_, session):
        await generate(session, smollm2, 0, lambda: None, tokens=4)
        old = hop(swarm, session, 1)
        old.kill()
        swarm.join_code = way_in(swarm)
        new = swarm.add("15:30", identity=old.log.stem)
        family.look()
        assert new.peer_id == old.peer_id and new.pid != old.pid
        ids = smollm2.ids(PROMPT)
        held = session.token_ids
        session.rollback(len(held) - 1)
        got = [t.id async for t in session.generate(held[-1:], max_new_tokens=4, ignore_eos=True)]
        smollm2.check(held, got, 4)
        assert held[: len(ids)] == ids


async def test_sigstop_is_noticed_within_four_seconds(swarm: LocalSwarm, family: Family, smollm2: Reference) -> None:
    spare = swarm.add("15:30")
    family.look()
    async with answering(swarm, family) as (model, session):
        frozen: list[tuple[LocalPeer, float]] = []

        def freeze() -> None:
            peer = hop(swarm, session, 1)
            peer.freeze()
            frozen.append((peer, time.monotonic()))

        stall = await generate(session, smollm2, TOKENS // 2, freeze)
        peer, since = frozen[0]
        # The hop before it may have told us so sooner than our own connection did, and the text may be at its end.
        lost = model._client.links_lost
        (noticed,) = await until(lambda: [at for at, peer_id, _ in lost if peer_id == peer.peer_id])
        print(f"noticed after {noticed - since:.1f} s, stall {stall:.1f} s")
        assert noticed - since <= 4 and stall <= 6
        peer.thaw()
        assert spare.alive and peer.alive and peer.peer_id not in session.route.peers


async def test_a_peers_dead_p2pd_is_replaced(swarm: LocalSwarm, family: Family, smollm2: Reference) -> None:
    """The peer goes on serving meanwhile, and comes back in the directory."""
    async with answering(swarm, family) as (model, session):
        client = model._client

        def kill() -> None:
            daemon = daemon_of(peer.pid)
            assert daemon is not None
            daemon.kill()

        await generate(session, smollm2, 0, lambda: None, tokens=2)
        peer = hop(swarm, session, 1)
        before = client.view.records[peer.peer_id].sequence
        await generate(session, smollm2, TOKENS // 2, kill)
        assert [recovery.reason for recovery in session.recoveries] == ["first route"]
        assert peer.peer_id in session.route.peers
        await until(lambda: daemon_of(peer.pid), timeout_s=30)
        family.look()
        deadline = time.monotonic() + 30
        while client.view.records[peer.peer_id].sequence <= before:
            assert time.monotonic() < deadline, "it did not announce itself again"
            await client.refresh()
        assert peer.alive


async def test_the_clients_own_p2pd_may_die(swarm: LocalSwarm, family: Family, smollm2: Reference) -> None:
    async with answering(swarm, family) as (model, session):
        daemon = daemon_of()
        assert daemon is not None
        await generate(session, smollm2, TOKENS // 2, daemon.kill)
        assert [recovery.reason for recovery in session.recoveries] == ["first route"]
        await until(daemon_of, timeout_s=30)
        family.look()
        assert (await model.status()).uncovered == ()


async def test_sigterm_says_goodbye_and_harms_nobody(swarm: LocalSwarm, family: Family, smollm2: Reference) -> None:
    async with answering(swarm, family) as (model, session):
        client, left = model._client, []

        def leave() -> None:
            left.append(hop(swarm, session, 1))
            left[0].process.terminate()

        await generate(session, smollm2, TOKENS // 2, leave)
        assert left[0].process.wait(20) == 0
        await client.refresh()
        assert left[0].peer_id not in {record.peer_id for record in client.records()}
        assert left[0].peer_id not in session.route.peers


async def test_over_real_hivemind_streams(tiny: Path, local: Reference, family: Family) -> None:
    """No direct connection anywhere; a kill is survived as over TLS."""
    with LocalSwarm(str(tiny), ["0:3", "3:6", "3:6"], options=["--no-direct"]) as swarm:
        family.look()
        connect = SwarmModel.connect(str(tiny), join=swarm.join_code, direct=False)
        async with connect as model, model.session() as session:
            family.look()
            assert not any(record.addresses for record in model._client.records())
            await generate(session, local, TOKENS, lambda: None, 2 * TOKENS)
            await generate(session, local, TOKENS, lambda: hop(swarm, session, 1).kill(), 2 * TOKENS)
            assert len(session.recoveries) == 2
