"""Sessions of one client with the same beginning: it is neither sent nor computed again, and every text is right."""

from __future__ import annotations

import time
from pathlib import Path

from swarm.frames import FrameType
from tests.whole.inprocess import InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import until

SYSTEM = "You are one of many peers and answer every question. "
CHAIN = ["0:3", "3:6"]


def steps_to(swarm: InProcessSwarm) -> list[int]:
    """Positions that each peer was sent so far."""
    return [peer.positions(FrameType.STEP) + peer.positions(FrameType.FILL) for peer in swarm.peers]


async def test_a_second_question_costs_only_itself(tiny: Path, local: Reference) -> None:
    async with running(tiny, CHAIN) as (swarm, model):
        async with model.session() as session:
            await Text(session, local, SYSTEM + "Why?").more(6)
        before = steps_to(swarm)
        async with model.session() as session:
            text = Text(session, local, SYSTEM + "When?")
            await text.more(6)
            new = len(text.ids) - len(local.ids(SYSTEM + "Wh")) + 6
        assert all(after - earlier <= new + 1 for earlier, after in zip(before, steps_to(swarm), strict=True))


async def test_the_next_turn_of_a_chat_that_was_closed(tiny: Path, local: Reference) -> None:
    """All that the first session left is the beginning of the second: it changes hands without a copy."""
    async with running(tiny, CHAIN) as (swarm, model):
        async with model.session() as session:
            text = Text(session, local, SYSTEM)
            await text.more(8)
        before, used_bytes = steps_to(swarm), [peer.service.budget.used_bytes for peer in swarm.peers]
        async with model.session() as session:
            longer = Text(session, local)
            longer.ids = [*text.ids, *text.tokens, *local.ids(" And then?")]
            await longer.more(5)
            sent = [after - earlier for earlier, after in zip(before, steps_to(swarm), strict=True)]
            assert all(positions <= len(local.ids(" And then?")) + 5 + 1 for positions in sent)
            for peer, one in zip(swarm.peers, used_bytes, strict=True):
                assert peer.service.budget.used_bytes < 1.5 * one


async def test_open_sessions_share_too(tiny: Path, local: Reference) -> None:
    """The best of three: each begins with what the first one holds."""
    async with running(tiny, CHAIN) as (swarm, model):
        sessions = [model.session() for _ in range(3)]
        await Text(sessions[0], local, SYSTEM).more(1)
        before = steps_to(swarm)
        for session in sessions[1:]:
            await Text(session, local, SYSTEM).more(4)
        assert max(after - earlier for earlier, after in zip(before, steps_to(swarm), strict=True)) <= 2 * 5
        for session in sessions:
            await session.__aexit__()


async def test_a_wrong_guess_costs_time_and_no_text(tiny: Path, local: Reference) -> None:
    """The peers needed the room meanwhile, one of them or both."""
    async with running(tiny, CHAIN) as (swarm, model):
        for forgetful in (swarm.peers[:1], swarm.peers[1:], swarm.peers):
            async with model.session() as session:
                await Text(session, local, SYSTEM + "Why?").more(4)
            for peer in forgetful:
                while peer.host.call(peer.service.table.prefixes.drop_oldest):
                    pass
            async with model.session() as session:
                await Text(session, local, SYSTEM + "When?").more(4)
                assert len(session.recoveries) == 1


async def test_another_route_begins_anew(tiny: Path, local: Reference) -> None:
    async with running(tiny, SPARED) as (swarm, model):
        async with model.session() as session:
            await Text(session, local, SYSTEM + "Why?").more(4)
            first = used(swarm, session, 0)
        async with model.session() as session:
            await Text(session, local, SYSTEM + "Where?").more(4)
            assert used(swarm, session, 0) is first
        swarm.tell(first, decode_s=1.0)
        await model.client.refresh()
        async with model.session() as session:
            await Text(session, local, SYSTEM + "When?").more(4)
            assert used(swarm, session, 0) is not first


async def test_clients_share_nothing(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, CHAIN) as swarm:
        async with swarm.model(client="one") as one, one.session() as session:
            await Text(session, local, SYSTEM).more(4)
        before = steps_to(swarm)
        async with swarm.model(client="two") as two, two.session() as session:
            text = Text(session, local, SYSTEM)
            await text.more(4)
        assert all(b - a >= len(text.ids) for a, b in zip(before, steps_to(swarm), strict=True))
        await swarm.all_closed()


async def test_who_wants_to_be_alone_is(tiny: Path, local: Reference) -> None:
    async with running(tiny, CHAIN, share_prefixes=False) as (swarm, model):
        for _ in range(2):
            async with model.session() as session:
                before = steps_to(swarm)
                text = Text(session, local, SYSTEM)
                await text.more(4)
                assert all(b - a >= len(text.ids) for a, b in zip(before, steps_to(swarm), strict=True))
        assert not any(len(peer.service.table.prefixes) for peer in swarm.peers)


async def test_nothing_that_was_found_wrong_is_shared(tiny: Path, local: Reference) -> None:
    """Two sessions hold the same beginning when a peer before them is found to be wrong: a third begins anew."""
    async with running(tiny, ["0:2", "2:4", "2:4", "4:6"]) as (swarm, model):
        async with model.session() as session:
            await Text(session, local, SYSTEM).more(4)
            liar = used(swarm, session, 1)
        async with model.session() as session:
            await Text(session, local, SYSTEM).more(4)
            await session.exclude(liar.peer_id, from_position=0)
            before = swarm.by_span("4:6").positions(FrameType.STEP)
            async with model.session() as third:
                text = Text(third, local, SYSTEM)
                await text.more(4)
            assert swarm.by_span("4:6").positions(FrameType.STEP) - before >= len(text.ids)


async def test_what_is_kept_makes_room(tiny: Path, local: Reference) -> None:
    """Sessions that were closed never keep one out that is open."""
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:6", cache_bytes=200 * 4 * (2 * 2 * 16 * 6 + 64))
        async with swarm.model() as model:
            begun = time.monotonic()
            for index in range(6):
                async with model.session() as session:
                    await Text(session, local, f"{index}: " + SYSTEM).more(4)
                    assert len(session.recoveries) == 1
            assert time.monotonic() - begun < 10
            await until(lambda: not peer.sessions)
            assert 0 < len(peer.service.table.prefixes) < 6
            assert peer.service.free_cache_positions == peer.service.cache_positions
            assert peer.service.budget.free_bytes < peer.service.budget.limit_bytes
        await swarm.all_closed()
