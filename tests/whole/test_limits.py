"""Room, time and routes come to an end: others are tried, a clear error follows in time, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from peer.effects import SessionLimits
from routing.errors import NoRoute, Overloaded, TimedOut
from swarm.frames import Frame, FrameType
from swarm.link import Link
from tests.whole.inprocess import InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import until

# -- room ---------------------------------------------------------------------------------------------------


def room_for(positions: int, blocks: int = 6) -> int:
    """Bytes of a tiny model's cache: 2 KV heads of 16, hidden 64, fp32."""
    return positions * 4 * (2 * 2 * 16 * blocks + 64)


async def test_where_one_peer_is_full_another_is_used(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        full = await swarm.add("0:6", cache_bytes=room_for(16))
        roomy = await swarm.add("0:6")
        swarm.tell(full, decode_s=1e-5)  # the better choice, were it not full
        async with swarm.model() as model, model.session() as session:
            text = Text(session, local)
            await text.more(20)
            assert used(swarm, session, 0) is roomy
            assert not model.client.health.banned(full.peer_id, time.monotonic())
            assert full.tap.seen
        await swarm.all_closed()


async def test_a_peer_that_fills_up_in_mid_answer_is_left(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        small = await swarm.add("3:6", cache_bytes=room_for(32, blocks=3))
        await swarm.add("0:3")
        await swarm.add("3:6")
        swarm.tell(small, decode_s=1e-5)
        async with swarm.model() as model, model.session() as session:
            text = Text(session, local)
            await text.more(3)
            assert used(swarm, session, 1) is small
            await text.more(30)
            assert used(swarm, session, 1) is not small
            assert not model.client.health.banned(small.peer_id, time.monotonic())
            assert len(session.recoveries) == 2
        await swarm.all_closed()


async def test_what_fits_exactly_fits(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        await swarm.add("0:6", cache_bytes=room_for(112))
        async with swarm.model() as model, model.session() as session:
            await Text(session, local).more(90)
            assert len(session.recoveries) == 1
        await swarm.all_closed()


async def test_a_full_swarm_says_so_within_its_bound(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:6", cache_bytes=room_for(16), limits=SessionLimits(retry_after_ms=100))
        async with swarm.model(recovery_s=0.8) as model:
            async with model.session() as session:
                begun = time.monotonic()
                with pytest.raises(Overloaded):
                    await Text(session, local, "More than sixteen positions").more(1)
                assert 0.5 < time.monotonic() - begun < 3
                assert 2 < len(session.recoveries) < 20
            assert not model.client.health.banned(peer.peer_id, time.monotonic())
            async with model.session() as session:
                await Text(session, local, "It fits").more(4)
        await swarm.all_closed()


async def test_who_waits_for_room_gets_it(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        await swarm.add("0:6", cache_bytes=room_for(48), limits=SessionLimits(retry_after_ms=50))
        async with swarm.model() as model:
            first, second = model.session(), model.session()
            await Text(first, local).more(4)
            waiting = asyncio.ensure_future(Text(second, local, "Another text, for which").more(4))
            await until(lambda: len(second.recoveries) > 2)
            await first.__aexit__()
            await waiting
            await second.__aexit__()
        await swarm.all_closed()


async def test_an_idle_session_that_was_evicted_heals(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:6", cache_bytes=room_for(48))
        async with swarm.model() as model:
            first, second = model.session(), model.session()
            text, other = Text(first, local), Text(second, local, "Another text, for which")
            await text.more(4)

            def grow_old() -> None:
                for session in peer.service.table.sessions.values():
                    session.heard_at -= 60

            peer.host.call(grow_old)
            await other.more(4)
            seats = [seat for s in peer.service.table.sessions.values() for seat in s.seats.values()]
            assert sorted(seat.position for seat in seats)[0] == 0  # the first one's were taken
            await second.__aexit__()
            await text.more(10)
            assert len(first.recoveries) == 1  # it was no error, and no change of route
            await first.__aexit__()
        await swarm.all_closed()


# -- the end of sessions ------------------------------------------------------------------------------------


async def test_close_reaches_every_peer_that_was_ever_opened(tiny: Path, local: Reference) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(5)
        before = [used(swarm, session, hop) for hop in (0, 1)]
        # The connection between the two breaks; both live, and the route leads elsewhere.
        before[0].host.call(lambda: before[0].endpoint.link(before[1].peer_id).lose("cut"))
        await text.more(5)
        left = [peer for peer in before if peer.peer_id not in session.route.peers]
        assert left and all(peer.sessions == 1 for peer in left)
        assert not model.client.health.banned_peers(time.monotonic())
        await session.__aexit__()
        await swarm.all_closed()


@pytest.mark.parametrize("turns", [0, 3, 8, 20, 45])
async def test_a_cancelled_generation_leaves_nothing(turns: int, tiny: Path, local: Reference) -> None:
    """Cancelled wherever it stands, its peers are free at once, and the next one is right."""
    async with running(tiny, ["0:3", "3:6"]) as (swarm, model):

        async def talk() -> None:
            async with model.session() as session:
                await Text(session, local).more(50)

        task = asyncio.ensure_future(talk())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await swarm.all_closed()
        async with model.session() as session:
            await Text(session, local).more(3)


@pytest.mark.parametrize("direct", [True, False], ids=["tls", "streams"])
async def test_eight_sessions_at_once(direct: bool, tiny: Path, local: Reference) -> None:
    """From one client, of unlike lengths; in an older system they hung."""
    async with running(tiny, SPARED, learns=True, direct=direct) as (swarm, model):
        sessions = [model.session() for _ in range(8)]
        texts = [Text(session, local, "abcdefgh"[i:] * (1 + 5 * i)) for i, session in enumerate(sessions)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(text.more(24) for text in texts))
            await asyncio.to_thread(used(swarm, sessions[0], 0).kill)
            await asyncio.gather(*(text.more(4) for text in texts))
        for session in sessions:
            await session.__aexit__()


# -- routes that are not there ------------------------------------------------------------------------------


async def test_blocks_that_nobody_serves_are_named(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:2", "4:6"]) as (swarm, model), model.session() as session:
        with pytest.raises(NoRoute) as caught:
            await Text(session, local).more(1)
        assert caught.value.blocks == (2, 3) and "2" in str(caught.value) and caught.value.advice
        assert (await model.status()).uncovered == (2, 3)
        # The session is as good as new once they are there.
        await swarm.add("2:4")
        await Text(session, local).more(5)


async def test_who_waits_is_served_by_a_peer_that_comes_later(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3"], wait_s=30.0) as (swarm, model), model.session() as session:
        waiting = asyncio.ensure_future(Text(session, local).more(5))
        await until(lambda: swarm.directory.reads > 2)
        assert not waiting.done()
        await swarm.add("3:6")
        await waiting


async def test_waiting_ends(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3"], wait_s=0.5) as (_, model), model.session() as session:
        begun = time.monotonic()
        with pytest.raises(NoRoute):
            await Text(session, local).more(1)
        assert 0.5 <= time.monotonic() - begun < 3


async def test_recovery_ends(tiny: Path, local: Reference) -> None:
    """The only peer is frozen: an error within the bound; it wakes, and the session goes on."""
    options = {"deadline_s": 0.3, "recovery_s": 1.0}
    async with running(tiny, ["0:3", "3:6"], **options) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(5)
        swarm.peers[1].freeze()
        begun = time.monotonic()
        with pytest.raises(TimedOut):
            await text.more(1)
        assert time.monotonic() - begun < 4
        swarm.peers[1].thaw()
        await text.more(5)


async def test_a_route_that_breaks_again_and_again_is_given_up(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:3", "3:6"], recovery_s=1.0) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(5)
        first, last = used(swarm, session, 0), used(swarm, session, 1)

        def cut(link: Link, frame: Frame) -> bool:
            if frame.type is FrameType.STEP:
                link.lose("cut")
            return frame.type is FrameType.STEP

        last.tap.drop = cut
        begun = time.monotonic()
        with pytest.raises(TimedOut):
            await text.more(1)
        assert time.monotonic() - begun < 4
        assert len(session.recoveries) < 20
        assert not {first.peer_id, last.peer_id} & model.client.health.banned_peers(time.monotonic())
        last.tap.drop = lambda link, frame: False
        await text.more(5)
