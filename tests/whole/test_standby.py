"""Peers that stand by: what they are sent, what a loss costs then, and that they never cost the text anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peer import service
from peer.effects import SessionLimits
from routing.errors import SwarmError
from swarm.client import SwarmClient
from swarm.frames import Frame, FrameType, Pages
from swarm.link import Link
from swarm.model import TextSession
from tests.whole.inprocess import InProcessModel, InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import SPARED, Text, running, used
from tests.whole.stand_ins import Tap, until

LONG = "Once upon a time there was " * 10


@asynccontextmanager
async def standing_by(
    folder: Path, local: Reference, spans: list[str] = SPARED, **options: Any
) -> AsyncIterator[tuple[InProcessSwarm, InProcessModel, TextSession, Text]]:
    """A long text whose standbys are warm."""
    async with running(folder, spans, standby="warm", **options) as (swarm, model), model.session() as session:
        text = Text(session, local, LONG)
        await text.more(1)
        assert not session.standbys, "the first token comes first"
        await text.more(2)
        await warm(swarm, session, 2)
        yield swarm, model, session, text


async def warm(swarm: InProcessSwarm, session: TextSession, count: int) -> None:
    driver = session._session.driver
    assert len(session.standbys) == count
    await until(lambda: all(driver.is_warm(hop) for hop in session.standbys))


async def test_a_lazy_standby_has_all_and_computes_nothing_until_it_is_called(tiny: Path, local: Reference) -> None:
    """As every session has it that does not say otherwise."""
    async with running(tiny, SPARED) as (swarm, _), swarm.model() as model, model.session() as session:
        text = Text(session, local, LONG)
        await text.more(3)
        await until(lambda: session.standbys_ready)
        await text.more(40)
        taking = [stand_in(swarm, session, hop) for hop in (0, 1)]
        before = [filled(peer) for peer in taking]
        assert all(count >= len(text.ids) + 40 for count in before)
        assert [peer.service.pipeline.passes for peer in taking] == [0, 0]
        for hop in (0, 1):
            await asyncio.to_thread(used(swarm, session, hop).kill)
            await text.more(5)
        assert [used(swarm, session, hop) for hop in (0, 1)] == taking
        assert all(filled(peer) - count < 20 for peer, count in zip(taking, before, strict=True))


async def test_lazy_standbys_keep_no_more_than_they_may(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, ["0:3"]) as swarm:
        await asyncio.gather(*(swarm.add("3:6", limits=SessionLimits(ahead_bytes=10_000)) for _ in range(2)))
        async with swarm.model() as model, model.session() as session:
            text = Text(session, local, LONG)
            await text.more(2)
            assert len(session.standbys) == 1
            await until(lambda: not session.standbys)
            await text.more(5)
            assert len(session.recoveries) == 1
        await swarm.all_closed()


def stand_in(swarm: InProcessSwarm, session: TextSession, hop: int) -> InProcessPeer:
    assert session.route is not None
    entry = session.route[hop].entry
    return swarm.by_id(next(other.peer_id for other in session.standbys if other.entry == entry))


def filled(peer: InProcessPeer) -> int:
    return peer.positions(FrameType.FILL) + peer.positions(FrameType.STEP)


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_lost_hop_is_replaced_by_its_standby_without_a_replay(hop: int, tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local) as (swarm, _, session, text):
        await text.more(5)
        lost, taking = used(swarm, session, hop), stand_in(swarm, session, hop)
        before = filled(taking)
        await asyncio.to_thread(lost.kill)
        await text.more(5)
        assert used(swarm, session, hop) is taking and len(session.recoveries) == 2
        assert filled(taking) - before < 40, "it was sent the text anew"


async def test_both_hops_lost_at_once_are_replaced_by_their_standbys(tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local) as (swarm, _, session, text):
        taking = [stand_in(swarm, session, hop) for hop in (0, 1)]
        before = [filled(peer) for peer in taking]
        await asyncio.gather(*(asyncio.to_thread(used(swarm, session, hop).kill) for hop in (0, 1)))
        await text.more(5)
        assert [used(swarm, session, hop) for hop in (0, 1)] == taking
        assert all(filled(peer) - count < 60 for peer, count in zip(taking, before, strict=True))


async def test_who_forgot_changes_places_with_its_standby(tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local) as (swarm, _, session, text):
        for hop in (1, 0, 1):
            forgot, taking = used(swarm, session, hop), stand_in(swarm, session, hop)
            forgot.host.call(lambda peer=forgot: [seat.evict() for each in peer.service.table.sessions.values()
                                                  for seat in each.seats.values()])  # fmt: skip
            await text.more(3)
            assert used(swarm, session, hop) is taking and stand_in(swarm, session, hop) is forgot
            await warm(swarm, session, 2)
        assert len(session.recoveries) == 4


async def test_a_standby_that_dies_costs_nothing_and_is_replaced(tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local, [*SPARED, "3:6"]) as (swarm, _, session, text):
        dead = stand_in(swarm, session, 1)
        await asyncio.to_thread(dead.kill)
        await until(lambda: dead.peer_id not in {hop.peer_id for hop in session.standbys})
        await text.more(5)
        assert len(session.recoveries) == 1, "the route did not change"
        await warm(swarm, session, 2)
        assert dead.peer_id not in {hop.peer_id for hop in session.standbys}


async def test_a_standby_that_was_evicted_catches_up(tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local) as (swarm, _, session, text):
        peer = stand_in(swarm, session, 1)
        [each] = peer.service.table.sessions.values()
        [seat] = each.seats.values()
        peer.host.call(seat.evict)
        await text.more(3)
        await until(lambda: seat.ready_to >= len(session.token_ids) - 1)


async def test_a_standby_without_room_is_let_go(tiny: Path, local: Reference) -> None:
    async with InProcessSwarm(tiny, ["0:3", "3:6"]) as swarm:
        small = await swarm.add("3:6", cache_bytes=1 << 15, announce=False)
        async with swarm.model(standby="warm") as model, model.session() as session:
            text = Text(session, local, LONG)
            await text.more(1)
            swarm.tell(small)
            await model.client.refresh()
            await model.client.probe()
            await text.more(1)
            assert any(seen.type is FrameType.OPEN for seen in small.tap.seen), "it was asked"
            await until(lambda: not session.standbys)
            await text.more(5)
            assert len(session.recoveries) == 1 and not session.standbys
        await swarm.all_closed()


async def test_a_text_taken_back_is_taken_back_at_the_standby_too(tiny: Path, local: Reference) -> None:
    async with standing_by(tiny, local) as (swarm, _, session, _text):
        # The same session, other words: what stands by must follow.
        session._session.rollback(40)
        ids = session.token_ids
        other = [7, 9, 11] * 30
        tokens = [t.id async for t in session.generate(other, max_new_tokens=4, ignore_eos=True)]
        peer = used(swarm, session, 1)
        await asyncio.to_thread(peer.kill)
        tokens += [t.id async for t in session.generate(tokens[-1:], max_new_tokens=4, ignore_eos=True)]
        local.check([*ids, *other], tokens, 8)


# -- peers that leave ---------------------------------------------------------------------------------------


async def written_on(text: Text, leaving: InProcessPeer, *most_s: float) -> None:
    """The text goes on while a peer hands over."""
    gone = asyncio.ensure_future(leaving.host.arun(leaving.service.hand_over(*most_s)))
    while not gone.done():
        await text.more(1)


@pytest.mark.parametrize("hop", [0, 1])
async def test_who_leaves_is_replaced_between_two_tokens(hop: int, tiny: Path, local: Reference) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session() as session:
        text = Text(session, local, LONG)
        await text.more(3)
        leaving = used(swarm, session, hop)
        await written_on(text, leaving)
        await text.more(3)
        assert leaving.peer_id not in session.route.peers and leaving.sessions == 0
        assert [recovery.reason for recovery in session.recoveries[1:]] == [f"{leaving.peer_id} leaves"]
        assert not model.client.health.banned_peers(time.monotonic())


async def test_a_session_that_says_nothing_is_moved_too(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "QUIET_S", 0.5)
    async with running(tiny, SPARED) as (swarm, model), model.session() as session:
        text = Text(session, local, LONG)
        await text.more(3)
        leaving = used(swarm, session, 1)
        await leaving.host.arun(leaving.service.hand_over())
        assert leaving.peer_id not in session.route.peers
        await text.more(3)
        assert leaving.sessions == 0, "it is let go when the new route has worked"


async def test_who_leaves_and_has_no_successor_serves_on_while_it_is_used(tiny: Path, local: Reference) -> None:
    async with running(tiny, SPARED[:2]) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(3)
        leaving = used(swarm, session, 1)
        await written_on(text, leaving, 0.5)
        assert len(session.recoveries) == 1
        # A new session is not taken any more.
        with pytest.raises(SwarmError):
            async for _ in model.generate("x", max_new_tokens=1, timeout_s=1):
                pass


# -- pages --------------------------------------------------------------------------------------------------


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is quicker than the arithmetic."""
    monkeypatch.setattr(SwarmClient, "transfer_pays", lambda *_: True)


@pytest.mark.parametrize("hop", [0, 1])
async def test_a_successor_takes_the_pages_of_who_leaves(hop: int, tiny: Path, local: Reference, near: None) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session(standby="none") as session:
        text = Text(session, local, LONG)
        await text.more(3)
        leaving = used(swarm, session, hop)
        await written_on(text, leaving)
        taking = used(swarm, session, hop)
        assert taking is not leaving and taking.positions(FrameType.PAGES) >= len(text.ids)
        assert filled(taking) < 60, "it was sent the text as well"
        await text.more(5)


def spoil_first(tap: Tap, spoil: Callable[[Frame], object]) -> None:
    """The first PAGES that come."""
    done: list[bool] = []

    def drop(link: Link, frame: Frame) -> bool:
        if frame.type is FrameType.PAGES and not done:
            done.append(True)
            return bool(spoil(frame))
        return False

    tap.drop = drop


def flipped(frame: Frame) -> None:
    data = bytearray(frame.body.data)
    data[len(data) // 2] ^= 1
    frame.body = msgspec.structs.replace(frame.body, data=bytes(data))


def empty(frame: Frame) -> None:
    frame.body = Pages()


@pytest.mark.parametrize("spoil", [flipped, empty, lambda frame: True], ids=["damaged", "not there", "lost"])
async def test_pages_that_cannot_be_had_are_computed(
    spoil: Callable[[Frame], object], tiny: Path, local: Reference, near: None
) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session(standby="warm") as session:
        for peer in swarm.peers:
            spoil_first(peer.tap, spoil)
        text = Text(session, local, LONG)
        await text.more(2)
        await warm(swarm, session, 2)
        taking = stand_in(swarm, session, 1)
        await asyncio.to_thread(used(swarm, session, 1).kill)
        await text.more(5)
        assert used(swarm, session, 1) is taking
        assert taking.positions(FrameType.FILL) >= len(text.ids)


async def test_what_a_wrong_peer_gave_is_not_trusted_in_who_took_it(tiny: Path, local: Reference, near: None) -> None:
    async with running(tiny, SPARED) as (swarm, model), model.session(standby="warm") as session:
        text = Text(session, local, LONG)
        await text.more(2)
        await warm(swarm, session, 2)
        wrong, taking = used(swarm, session, 1), stand_in(swarm, session, 1)
        assert taking.positions(FrameType.PAGES) > 0
        before = filled(taking)
        await session._session.exclude(wrong.peer_id)
        await text.more(3)
        assert used(swarm, session, 1) is taking
        assert filled(taking) - before >= len(text.ids), "it kept what the wrong peer had computed"


# -- prompt and answer on different peers -------------------------------------------------------------------


async def test_a_prompt_goes_where_it_is_quick_and_its_answer_moves_to_the_nearest(tiny: Path, near: None) -> None:
    local = Reference(tiny)
    async with InProcessSwarm(tiny, SPARED) as swarm:
        strong, quick = swarm.peers[:2], swarm.peers[2:]
        for peer in strong:
            swarm.tell(peer, prefill_s=1e-5, decode_s=5e-2)
        for peer in quick:
            swarm.tell(peer, prefill_s=1e-2, decode_s=1e-4)
        async with swarm.model() as model, model.session() as session:
            text = Text(session, local, LONG)
            await text.more(1)
            assert [used(swarm, session, hop) for hop in (0, 1)] == strong
            await text.more(1)
            await until(lambda: session.standbys_ready)
            await text.more(5)
            assert [used(swarm, session, hop) for hop in (0, 1)] == quick
            assert all(peer.positions(FrameType.PAGES) >= len(text.ids) for peer in quick)
            await until(lambda: not any(peer.sessions for peer in strong))
            # A short prompt is not worth it.
            async with model.session() as other:
                await Text(other, local, "Hi").more(2)
                assert [used(swarm, other, hop) for hop in (0, 1)] == quick
        await swarm.all_closed()
