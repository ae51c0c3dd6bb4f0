"""The first blocks are there soon, the rest follows, and together they are what loading all at once gives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peer import loading
from peer.blocks import Loading
from peer.executor import Executor, PassItem
from peer.loading import Loader
from routing.errors import DamagedWeights, Unreachable
from routing.types import Span
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.families import family_of
from tests.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SPAN = Span(1, 4)


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "mixtral"])  # plain, with windows, with experts
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny(request.param, tmp_path_factory.mktemp(request.param))))


class Setting:
    """A loader of a small model's blocks, what it asked for, and what may go wrong: the next reads of the disk, the
    next fetches."""

    def __init__(self, checkpoint: Any, first_s: float):
        self.checkpoint, self.family = checkpoint, family_of(checkpoint.config)
        self.fetched: list[Span] = []
        self.failing: Iterator[Exception] = iter(())
        self.loader = Loader(self.begin, self.fetch, self.run, first_s)

    def begin(self, span: Span, check: Any) -> Loading:
        return Loading(self.checkpoint, self.family, span, torch.float32, check=check)

    async def fetch(self, span: Span) -> None:
        self.fetched.append(span)
        for error in self.failing:
            raise error

    async def run(self, work: Any, *arguments: Any) -> Any:
        return work(*arguments)


async def test_where_there_is_time_all_are_loaded_at_once(checkpoint: Any) -> None:
    setting = Setting(checkpoint, first_s=60.0)
    blocks = await setting.loader.first(SPAN, None)
    assert blocks.span == SPAN and setting.loader.pending_bytes == 0
    assert setting.fetched == [Span(1, 2), Span(2, 3), Span(3, 4)]
    await setting.loader.rest(pytest.fail)


async def test_else_the_first_ones_are_and_the_rest_follows(checkpoint: Any) -> None:
    setting, grown = Setting(checkpoint, first_s=0.0), []
    first = await setting.loader.first(SPAN, None)
    whole = Loading(checkpoint, setting.family, SPAN, torch.float32).load_all()
    assert first.span == Span(1, 2)
    assert first.nbytes + setting.loader.pending_bytes == pytest.approx(whole.nbytes, rel=0.01)
    await setting.loader.rest(grown.append)
    assert [blocks.span for blocks in grown] == [Span(1, 3), SPAN] and setting.loader.pending_bytes == 0
    rows = torch.randn(5, whole.shape.hidden)
    outputs = [Executor(blocks).run([PassItem(blocks.seat(1, 4), rows)]).outputs[0] for blocks in (grown[-1], whole)]
    assert torch.equal(*outputs)


async def test_a_seat_of_the_first_blocks_goes_on_when_there_are_more(checkpoint: Any) -> None:
    setting, grown = Setting(checkpoint, first_s=0.0), []
    blocks = await setting.loader.first(SPAN, None)
    seat, other = blocks.seat(1, 2), blocks.seat(1, 2)
    rows = torch.randn(4, blocks.shape.hidden)
    Executor(blocks).run([PassItem(seat, rows[:3])])
    await setting.loader.rest(grown.append)
    later = Executor(grown[-1]).run([PassItem(seat, rows[3:]), PassItem(grown[-1].seat(1, 4), rows)])
    alone = Executor(blocks).run([PassItem(other, rows)])
    torch.testing.assert_close(later.outputs[0], alone.outputs[0][3:])


async def test_what_fails_later_is_told_and_tried_again(
    checkpoint: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "RETRY_S", 0.0)
    setting, grown = Setting(checkpoint, first_s=0.0), []
    await setting.loader.first(SPAN, None)
    setting.failing = iter([Unreachable("nobody lends block 2")] * 2)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(setting.loader.rest(grown.append), 10.0)
    assert grown[-1].span == SPAN and setting.fetched[1:4] == [Span(2, 3)] * 3
    assert caplog.text.count("1 of blocks 1:4 are loaded, the next one is not: nobody lends block 2") == 1


def test_a_block_that_could_not_be_read_is_read_anew(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family, read = family_of(checkpoint.config), type(checkpoint).load
    broken = Loading(checkpoint, family, SPAN, torch.bfloat16, quantization="int8")
    broken.load_next()

    def damaged(self: Any, *arguments: Any) -> Any:
        stored = read(self, *arguments)
        stored[next(reversed(stored))] = torch.zeros(3)
        return stored

    with monkeypatch.context() as patch, pytest.raises(DamagedWeights):
        patch.setattr(type(checkpoint), "load", damaged)
        broken.load_next()
    assert broken.loaded == 1
    while not broken.whole:
        broken.load_next()
    sound = Loading(checkpoint, family, SPAN, torch.bfloat16, quantization="int8").load_all()
    for mine, theirs in zip(broken.blocks().layers, sound.layers, strict=True):
        for name, weight in theirs.state_dict().items():
            assert torch.equal(mine.state_dict()[name], weight), name


async def test_what_goes_wrong_before_anything_is_served_is_raised(checkpoint: Any) -> None:
    setting = Setting(checkpoint, first_s=0.0)
    setting.failing = iter([Unreachable("nobody lends block 1")])
    with pytest.raises(Unreachable):
        await setting.loader.first(SPAN, None)
