"""Peers whose blocks lie on several devices: two parts of the processor, with an account and a compute thread each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peer import devices
from peer.batch import Batch
from peer.cache import SeatCache
from peer.effects import SessionLimits
from peer.spread import SpreadCache
from peer.stage import Kind
from routing.errors import DeviceLost
from swarm.client import SwarmClient
from swarm.frames import FrameType
from tests.whole.inprocess import InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import Text, running, used
from tests.whole.stand_ins import until
from tests.whole.test_metrics import figures
from tests.whole.test_standby import warm

LONG = "Once upon a time there was " * 10
GONE = "CUDA error: unspecified launch failure"


def stores(peer: InProcessPeer) -> list[Any]:
    return [seat.store for session in peer.service.table.sessions.values() for seat in session.seats.values()]


def parts_of(peer: InProcessPeer) -> set[tuple[tuple[int, int], ...]]:
    """The blocks of each seat here, by device."""
    return {tuple((part.entry, part.exit) for part in store.parts) for store in stores(peer)}


def in_step(peer: InProcessPeer) -> bool:
    """Whether all devices hold as much of each session."""
    return all(part.position == store.position for store in stores(peer) for part in store.parts)


# -- the same text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", [["0:4+4:6"], ["0:1+1:2+2:3", "3:5+5:6"], ["0:3", "3:4+4:6"]])
async def test_texts_and_a_long_prompt_beside_them(spans: list[str], tiny: Path, local: Reference) -> None:
    async with running(tiny, spans) as (swarm, model):
        sessions = [model.session() for _ in range(5)]
        texts = [Text(session, local, f"Session {index}: ") for index, session in enumerate(sessions[:4])]
        for count in (1, 12):
            await asyncio.gather(*(text.more(count) for text in texts))
        await asyncio.gather(Text(sessions[4], local, LONG).more(3), *(text.more(12) for text in texts))
        for session in sessions[1:]:
            await session.__aexit__()
        await texts[0].more(5)
        for peer in swarm.peers:
            assert parts_of(peer) == {tuple((part.start, part.end) for part in peer.parts)} and in_step(peer)
        await sessions[0].__aexit__()


async def test_a_prompt_that_was_edited_goes_back_on_all_devices(tiny: Path, local: Reference) -> None:
    ids, other = local.ids(LONG), local.ids("something else")
    async with running(tiny, ["0:2+2:6"]) as (swarm, model), model.session() as session:
        [peer] = swarm.peers

        async def greedy(prompt: list[int]) -> list[int]:
            return [token.id async for token in session.generate(prompt, max_new_tokens=10, ignore_eos=True)]

        tokens = await greedy(ids)
        session.rollback(len(ids) + 4)
        local.check([*ids, *tokens[:4], *other], await greedy(other), 10)
        for back_to in (5, 0):
            session.rollback(back_to)
            local.check([*ids[:back_to], *other], await greedy(other), 10)
            [store] = stores(peer)
            assert in_step(peer) and store.position < back_to + len(other) + 11
        assert len(session.recoveries) == 1


async def test_sessions_enter_and_leave_in_the_middle_of_parts(tiny: Path, local: Reference) -> None:
    """Which blocks of the two peers a route uses follows from who is quicker when it is chosen."""
    async with InProcessSwarm(tiny, ["0:3+3:5", "1:4+4:6"]) as swarm:
        first, last = swarm.peers
        swarm.tell(first, decode_s=1e-5)
        async with swarm.model() as fast:
            swarm.tell(first, decode_s=1e-3)
            async with swarm.model(client="another") as slow:
                one, two = Text(fast.session(), local), Text(slow.session(), local, LONG)
                await one.more(3)
                assert (parts_of(first), parts_of(last)) == ({((0, 3), (3, 5))}, {((5, 6),)})
                await asyncio.gather(one.more(20), two.more(20))
                assert parts_of(first) == {((0, 3), (3, 5)), ((0, 1),)}
                assert parts_of(last) == {((5, 6),), ((1, 4), (4, 6))}
                assert {type(store) for store in stores(first)} == {SeatCache, SpreadCache}
                assert in_step(first) and in_step(last)
                for text in (one, two):
                    await text.session.__aexit__()
        await swarm.all_closed()


async def test_the_journal_is_with_the_last_blocks_alone(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:2+2:6"]) as (swarm, model), model.session() as session:
        await Text(session, local).more(4)
        [store] = stores(swarm.peers[0])
        first, last = store.parts
        assert first.nbytes == first.capacity * 2 * 2 * 2 * 16 * 4
        assert last.nbytes == last.capacity * (4 * 2 * 2 * 16 + 64) * 4
        assert [budget.used_bytes for budget in swarm.peers[0].service.budget.parts] == [first.nbytes, last.nbytes]


async def test_a_token_counts_once_whatever_devices_it_passes(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:2+2:6"]) as (swarm, model), model.session() as session:
        [peer] = swarm.peers
        text = Text(session, local)
        await text.more(9)
        value = await figures(peer)
        assert value("tokens_total", kind="decode") == value("pass_rows_count", kind="decode") == 8
        assert value("tokens_total", kind="prefill") == len(text.ids)
        assert value("step_queue_seconds_count", kind="decode") == 8
        spent = value("busy_seconds_total", kind="decode")
        assert spent == value("step_compute_seconds_sum", kind="decode") > 0
        budget = peer.service.budget
        assert value("cache_used_bytes") == budget.used_bytes == sum(part.used_bytes for part in budget.parts)
        assert value("cache_limit_positions") == peer.service.cache_positions
        assert len(text.ids) + 8 <= value("cache_used_positions") < len(text.ids) + 8 + 32


# -- room ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tight", [0, 1])
async def test_what_does_not_fit_on_one_device_is_evicted_on_both(tight: int, tiny: Path, local: Reference) -> None:
    """Room for a third of the sessions on one device, for all on the other."""
    limits = SessionLimits(idle_s=0.05, retry_after_ms=50)
    async with InProcessSwarm(tiny) as swarm:
        peer = await swarm.add("0:3+3:6", limits=limits)
        budget = peer.service.budget.parts[tight]
        budget.limit_bytes = 4 * 64 * 4 * (2 * 2 * 16 * 3 + 64 * tight)
        async with swarm.model() as model:
            sessions = [model.session() for _ in range(12)]
            texts = [Text(session, local, f"Session {index} says: ") for index, session in enumerate(sessions)]
            for text in texts:
                await text.more(3)
            held = [store for store in stores(peer) if store.position]
            assert 0 < len(held) <= 8 and in_step(peer), "a page each, of 32 positions"
            assert all(part.nbytes == 0 for store in stores(peer) if not store.position for part in store.parts)
            await asyncio.gather(*(text.more(6) for text in texts))
            assert budget.used_bytes <= budget.limit_bytes and in_step(peer)
            positions = peer.service.cache_positions
            assert positions == 4 * 64
            assert peer.service.free_cache_positions <= positions
            for session in sessions:
                await session.__aexit__()
        await swarm.all_closed()
        assert peer.service.free_cache_positions == positions


# -- what others hold ---------------------------------------------------------------------------------------


async def test_a_second_question_costs_only_itself(tiny: Path, local: Reference) -> None:
    async with running(tiny, ["0:2+2:3", "3:6"]) as (swarm, model):
        peer = swarm.peers[0]
        async with model.session() as open_one, model.session() as session:
            await Text(open_one, local, LONG + "Why?").more(6)
            await Text(session, local, LONG + "When?").more(6)  # copied from an open one
            adopted = peer.service.table.counts.adopted
            assert adopted >= len(local.ids(LONG)) and in_step(peer)
        async with model.session() as session:
            await Text(session, local, LONG + "Where?").more(6)  # of one that was closed
            assert peer.service.table.counts.adopted >= adopted + len(local.ids(LONG))


@pytest.mark.parametrize("spans", [["0:3", "0:2+2:3"], ["0:2+2:3", "0:3"], ["0:1+1:3", "0:2+2:3"]])
async def test_pages_go_from_any_devices_to_any_others(
    spans: list[str], tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SwarmClient, "transfer_pays", lambda *_: True)
    async with InProcessSwarm(tiny, [*spans, "3:6"]) as swarm:
        giving, taking, _ = swarm.peers
        swarm.tell(giving, decode_s=1e-5)
        async with swarm.model(standby="warm") as model, model.session() as session:
            text = Text(session, local, LONG)
            await text.more(3)
            assert used(swarm, session, 0) is giving
            await warm(swarm, session, 1)
            assert taking.positions(FrameType.PAGES) >= len(text.ids) and in_step(taking)
            await asyncio.to_thread(giving.kill)
            await text.more(8)
            assert used(swarm, session, 0) is taking and in_step(taking)
        await swarm.all_closed()


# -- failures -----------------------------------------------------------------------------------------------


def fail(peer: InProcessPeer, place: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(items: Any) -> Any:
        raise error

    monkeypatch.setattr(peer.service.stages[place].executor, "begin", begin)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_pass_that_fails_on_one_device_leaves_no_seat_ahead(
    place: int, tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny, ["0:2+2:6"] * 2) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        failing = used(swarm, session, 0)
        positions = {id(store): store.position for store in stores(failing)}
        with monkeypatch.context() as patch:
            fail(failing, place, RuntimeError("an operator of torch's refuses these rows"), patch)
            await text.more(5)
        assert used(swarm, session, 0) is not failing
        assert {id(store): store.position for store in stores(failing)} == positions and in_step(failing)
        with pytest.raises(TimeoutError):
            await failing.host.arun(asyncio.wait_for(failing.service.watch(), 0.05))


@pytest.mark.parametrize("place", [0, 1])
async def test_values_that_are_not_finite_on_one_device_leave_no_seat_ahead(
    place: int, tiny: Path, local: Reference
) -> None:
    async with running(tiny, ["0:2+2:6"] * 2) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(5)
        failing = used(swarm, session, 0)
        executor, [store] = failing.service.stages[place].executor, stores(failing)
        begin, before = executor.begin, store.position

        def spoilt(items: Any) -> Any:
            return begin([replace(item, hidden=torch.full_like(item.hidden, float("nan"))) for item in items])

        executor.begin = spoilt  # type: ignore[method-assign]
        await text.more(5)
        assert used(swarm, session, 0) is not failing
        assert store.position == before and in_step(failing)
        assert "the output has values that are not finite" in session.recoveries[-1].reason, "it came in well"


async def test_a_device_that_is_lost_is_named(
    tiny: Path, local: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny, ["0:2+2:6"] * 2) as (swarm, model), model.session() as session:
        text = Text(session, local)
        await text.more(10)
        lost = used(swarm, session, 0)
        fail(lost, 1, torch.AcceleratorError(GONE), monkeypatch)
        monkeypatch.setattr(devices, "computes", lambda device: False)
        await text.more(10)
        assert lost.peer_id not in session.route.peers and GONE in session.recoveries[-1].reason

        async def last_words() -> None:
            async with asyncio.timeout(10):
                await lost.service.watch()

        with pytest.raises(DeviceLost, match=rf"cpu \(blocks 2:6\) does not compute any more: {GONE}"):
            await lost.host.arun(last_words())


# -- at the same time ---------------------------------------------------------------------------------------


class Meeting:
    """Decode passes of a peer with two devices. The first so many on either last until there is one on the other, too:
    the n-th on the second device beside the next one on the first."""

    def __init__(self, peer: InProcessPeer, meetings: int):
        self.met, self._meetings = 0, meetings
        self._begun, self._change = [0, 0], threading.Condition()
        for place, stage in enumerate(peer.service.stages):
            stage.advance = partial(self._advance, place, stage.advance)  # type: ignore[method-assign]

    def _advance(self, place: int, advance: Callable[[Batch, float], bool], batch: Batch, least_s: float) -> bool:
        with self._change:
            self._begun[place] += 1
            mine, other = self._begun[place], 1 - place
            self._change.notify_all()
            if mine <= self._meetings + (place == 0):
                needed = mine + 1 if place == 1 else mine - 1
                met = self._change.wait_for(lambda: self._begun[other] >= needed, 10)
                self.met += met
        return advance(batch, least_s)


@pytest.mark.parametrize("count", [2, 5])
async def test_both_devices_compute_at_a_time(count: int, tiny: Path, local: Reference) -> None:
    """If passes came one after the other, nobody would meet anybody."""
    async with running(tiny, ["0:3+3:6"]) as (swarm, model):
        sessions = [model.session() for _ in range(count)]
        texts = [Text(session, local, f"Session {index}: ") for index, session in enumerate(sessions)]
        for text in texts:
            await text.more(2)
        meeting = Meeting(swarm.peers[0], meetings=6)
        await asyncio.gather(*(text.more(12) for text in texts))
        assert meeting.met == 6 + 7, "of them the very first on the first device meets nobody, and does not wait"
        for session in sessions:
            await session.__aexit__()


async def test_the_first_device_does_not_run_ahead(tiny: Path, local: Reference) -> None:
    """What would wait for the second could have taken along what comes meanwhile. Each session wants one token more, so
    that nothing but the second device says when the first may go on."""
    async with running(tiny, ["0:3+3:6"]) as (swarm, model):
        first, second = swarm.peers[0].service.stages
        sessions = [model.session() for _ in range(9)]
        texts = [Text(session, local, f"Session {index}: ") for index, session in enumerate(sessions)]
        await asyncio.gather(*(text.more(2) for text in texts))
        advance, go_on = second.advance, threading.Event()
        second.advance = lambda *pass_: go_on.wait(30) and advance(*pass_)  # type: ignore[method-assign]
        alone = asyncio.ensure_future(texts[0].more(1))
        await until(lambda: len(second.here[Kind.DECODE]) == 1)
        others = [asyncio.ensure_future(text.more(1)) for text in texts[1:]]

        def all_are_here() -> bool:
            batches = [batch for stage in (first, second) for batch in stage.here[Kind.DECODE]]
            return sum(len(batch.done) for batch in batches) + len(first.scheduler) == 9

        await until(all_are_here)
        await until(lambda: len(second.here[Kind.DECODE]) == 2)
        assert len(first.scheduler) >= 3 and not first.here[Kind.DECODE], "five at most are half of nine"
        go_on.set()
        await asyncio.wait_for(asyncio.gather(alone, *others), 10)
        for session in sessions:
            await session.__aexit__()
