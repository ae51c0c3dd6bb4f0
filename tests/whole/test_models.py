"""One peer with two models of unlike families: sessions of both at once, each with the text of its local model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peer.switchboard import Switchboard
from routing.errors import BadInput, TimedOut
from swarm.frames import FrameType, new_session
from tests.tiny import make_tiny
from tests.whole.inprocess import InProcessModel, InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference
from tests.whole.scenes import Text
from tests.whole.stand_ins import until
from tests.whole.test_limits import room_for

FIRST, SECOND = b"a" * 32, b"b" * 32
OTHER_BLOCKS = 4


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt2 of four blocks."""
    return make_tiny("gpt2", tmp_path_factory.mktemp("other"), layers=OTHER_BLOCKS, tokenizer=True, seed=1)


@pytest.fixture(scope="session")
def other_local(other: Path, local: Reference) -> Reference:
    """After the first reference, which sees to the threads."""
    return Reference(other)


class Two:
    """Two swarms, and a peer that serves all blocks of both models."""

    def __init__(self, first: InProcessSwarm, second: InProcessSwarm, both: InProcessPeer, beside: Any):
        self.first, self.second, self.both = first, second, both
        self.services = (both.service, beside)


@asynccontextmanager
async def two_models(tiny: Path, other: Path, **options: Any) -> AsyncIterator[Two]:
    async with (
        InProcessSwarm(tiny, fingerprint=FIRST) as first,
        InProcessSwarm(other, fingerprint=SECOND) as second,
    ):
        both = await first.add("0:6", **options)
        yield Two(first, second, both, await both.serve_too(second, f"0:{OTHER_BLOCKS}"))


@asynccontextmanager
async def clients(two: Two) -> AsyncIterator[tuple[InProcessModel, InProcessModel]]:
    key = f"{two.first._keys.name}/client"  # a user has one identity
    async with two.first.model(client=key) as first, two.second.model(client=key) as second:
        yield first, second


async def test_both_at_once_with_the_texts_of_their_local_models(
    tiny: Path, other: Path, local: Reference, other_local: Reference
) -> None:
    async with two_models(tiny, other) as two, clients(two) as (first, second):
        assert first.client.peer_id == second.client.peer_id, "not even the client tells them apart"
        async with first.session() as one, second.session() as another, first.session() as third:
            texts = [Text(one, local), Text(another, other_local), Text(third, local, "Another text")]
            for count in (5, 20):
                await asyncio.gather(*(text.more(count) for text in texts))
            assert [len(service.table.sessions) for service in two.services] == [2, 1]
            assert len(two.both.endpoint.links) == 2  # one to each client, and for both models
            positions = [text.session.token_ids for text in texts]
            shapes = [service.blocks.shape.position_bytes(len(service.blocks.span)) for service in two.services]
            least = sum(map(len, positions)) * min(shapes)
            assert least <= two.both.service.budget.used_bytes, "both are in one account"
        await until(lambda: not any(service.table.sessions for service in two.services))
        for service in two.services:
            while service.table.prefixes.drop_oldest():
                pass
        assert two.both.service.budget.used_bytes == 0


async def test_what_one_model_left_makes_room_for_the_other(
    tiny: Path, other: Path, local: Reference, other_local: Reference
) -> None:
    async with two_models(tiny, other, cache_bytes=room_for(48)) as two, clients(two) as (first, second):
        async with first.session() as session:
            await Text(session, local, "The first of two texts").more(4)
        await until(lambda: not two.services[0].table.sessions)
        assert two.both.service.budget.used_bytes
        async with second.session() as session:
            assert two.services[1].free_cache_positions == two.services[1].cache_positions
            await Text(session, other_local, "Another one").more(4)
        assert two.services[0].table.counts.prefixes_evicted == 1
        assert not two.services[1].table.counts.prefixes_evicted


async def test_a_long_prompt_of_one_model_is_left_between_blocks_for_tokens_of_the_other(
    tiny: Path, other: Path, local: Reference, other_local: Reference
) -> None:
    """Each block of the prompt takes until the other model has work."""
    async with two_models(tiny, other) as two, clients(two) as (first, second):
        order: list[str] = []
        for service, name in zip(two.services, ("prompt", "token"), strict=True):
            waits_for = two.services[1].stages[0].lane if name == "prompt" else None
            _note_blocks(service, name, order, waits_for)
        async with first.session() as one, second.session() as another:
            token = Text(another, other_local)
            await token.more(2)
            del order[:]
            prompt = Text(one, local, "A long prompt. " * 8)
            await asyncio.gather(prompt.more(1), token.more(12))
        blocks = [index for index, name in enumerate(order) if name == "prompt"]
        assert len(blocks) == 6
        between = [order[at + 1 : after] for at, after in pairwise(blocks)]
        assert all(between), order


def _note_blocks(service: Any, name: str, order: list[str], waits_for: Any) -> None:
    begin = service.stages[0].executor.begin

    def noted(items: Any) -> Any:
        packed = begin(items)
        steps = packed._steps

        def noting() -> Iterator[None]:
            for _ in steps:
                order.append(name)
                deadline = time.monotonic() + 5
                while waits_for is not None and not waits_for.jobs and time.monotonic() < deadline:
                    time.sleep(0.001)
                yield

        packed._steps = noting()
        return packed

    service.stages[0].executor.begin = noted


def test_a_session_says_whose_it_is_and_a_model_cannot_be_there_twice() -> None:
    one, another = new_session(FIRST), new_session(FIRST)
    assert one != another and one[:4] == another[:4] == FIRST[:4] and len(one) == 16
    switchboard, model = Switchboard(), type("Model", (), {"current": type("Service", (), {})()})
    switchboard.add(FIRST, model)  # type: ignore[arg-type]
    switchboard.add(SECOND, model)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="twice"):
        switchboard.add(FIRST, model)  # type: ignore[arg-type]


async def test_who_asks_for_a_model_that_is_not_here_is_refused(tiny: Path, other: Path, local: Reference) -> None:
    async with two_models(tiny, other) as two:
        stranger = InProcessSwarm(tiny, fingerprint=b"c" * 32)
        stranger.tell(two.both)
        async with stranger.model(recovery_s=0.5) as model, model.session() as session:
            with pytest.raises(TimedOut, match="no model with such sessions"):
                await Text(session, local).more(1)
        assert not any(service.table.sessions for service in two.services)
        assert FrameType.OPEN in {seen.type for seen in two.both.tap.seen}
