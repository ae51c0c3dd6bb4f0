"""What a session holds on several devices: all or nothing, and the same positions on each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import cache
from peer.blocks import Blocks, Loading
from peer.cache import CacheBudget, SeatCache
from peer.executor import Executor, PassItem
from peer.spread import Spread, SpreadBudget, SpreadCache, SpreadLoading, names, position_bytes, seat_on
from routing.errors import BadInput, DeviceLost, NotEnoughMemory
from routing.types import Span
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.families import family_of
from tests.peer.test_cache import PAGE, PLENTY, SHAPE, WINDOWS, fill, holds
from tests.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(str(make_tiny("llama", tmp_path_factory.mktemp("llama"), layers=6)))


def loading(checkpoint: Checkpoint, span: str, shares: list[int]) -> SpreadLoading:
    def on(part: Span, device: str) -> Loading:
        return Loading(checkpoint, family_of(checkpoint.config), part, torch.float32, device)

    return SpreadLoading(on, Span.parse(span), ["cpu"] * len(shares), shares)


def on_one(checkpoint: Checkpoint, span: Span) -> Blocks:
    return Loading(checkpoint, family_of(checkpoint.config), span, torch.float32).load_all()


def load(checkpoint: Checkpoint, span: str, shares: list[int]) -> Spread:
    return loading(checkpoint, span, shares).load_all()


# -- blocks -------------------------------------------------------------------------------------------------


def test_each_device_has_its_blocks_in_order(llama: Checkpoint) -> None:
    whole = on_one(llama, Span(1, 6))
    blocks = load(llama, "1:6", [2, 0, 3])
    assert blocks.span == Span(1, 6) and [part.span for part in blocks.parts] == [Span(1, 3), Span(3, 6)]
    assert blocks.places == (0, 2) and blocks.nbytes == whole.nbytes
    assert blocks.bytes_by_device == (sum(whole.block_bytes[:2]), 0, sum(whole.block_bytes[2:]))
    assert names(blocks) == ("cpu (blocks 1:3)", "cpu (blocks 3:6)") and names(whole) == ("cpu",)


def test_a_position_costs_as_much_as_on_one_device_with_the_journal_at_the_end(llama: Checkpoint) -> None:
    blocks, whole = load(llama, "1:6", [2, 3]), on_one(llama, Span(1, 6))
    block, journal = whole.shape.block_bytes, 64 * 4
    assert position_bytes(blocks, 1, 6) == (2 * block, 3 * block + journal)
    assert position_bytes(blocks, 2, 3) == (block + journal, 0)
    assert position_bytes(blocks, 4, 5) == (0, block + journal)
    for entry, exit in ((1, 6), (2, 4), (3, 6)):
        assert sum(position_bytes(blocks, entry, exit)) == position_bytes(whole, entry, exit)[0]


def test_a_seat_lies_where_its_blocks_are(llama: Checkpoint) -> None:
    blocks, budget = load(llama, "1:6", [2, 3]), SpreadBudget([CacheBudget(PLENTY), CacheBudget(PLENTY)])
    found = {}
    for entry, exit in ((1, 6), (2, 4), (1, 3), (4, 5)):
        seat = seat_on(blocks, budget, entry, exit)
        found[entry, exit] = [(part.entry, part.exit, bool(part.shape.hidden)) for part in seat.parts]
        assert all(part.budget in budget.parts for part in seat.parts)
    assert found == {
        (1, 6): [(1, 3, False), (3, 6, True)], (2, 4): [(2, 3, False), (3, 4, True)],
        (1, 3): [(1, 3, True)], (4, 5): [(4, 5, True)],
    }  # fmt: skip
    for entry, exit in ((0, 2), (3, 7), (3, 3)):
        with pytest.raises(BadInput, match="are not served here"):
            seat_on(blocks, budget, entry, exit)


def test_part_after_part_computes_what_one_device_would(llama: Checkpoint) -> None:
    blocks, whole = load(llama, "0:6", [4, 2]), on_one(llama, Span(0, 6))
    rows = torch.randn(9, whole.shape.hidden)
    seat, alone = seat_on(blocks, SpreadBudget([CacheBudget(PLENTY)] * 2), 1, 6), whole.seat(1, 6)
    for some in rows.split([5, 1, 3]):
        hidden = some
        for part, held in zip(blocks.parts, seat.parts, strict=True):
            hidden = Executor(part).run([PassItem(held, hidden)]).outputs[0]
        torch.testing.assert_close(hidden, Executor(whole).run([PassItem(alone, some)]).outputs[0])
    assert seat.pages(0, 9)[0] == "float32" and seat.position == 9
    taken = whole.seat(1, 6)
    assert taken.take_pages(0, 9, *seat.pages(0, 9)), "one device takes what several give"
    torch.testing.assert_close(taken.rows(0, 9), alone.rows(0, 9))


@pytest.mark.parametrize(
    ("error", "named"),
    [(RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory"), NotEnoughMemory),
     (torch.AcceleratorError("CUDA error: unknown"), DeviceLost), (RuntimeError("a bug"), RuntimeError)],
)  # fmt: skip
def test_what_fails_while_blocks_load_is_of_the_device_that_they_go_to(
    llama: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: Exception, named: type[Exception]
) -> None:
    some, read = loading(llama, "0:4", [1, 3]), Loading.load_next

    def fails(self: Loading) -> None:
        if self.span.start:
            raise error
        read(self)

    monkeypatch.setattr(Loading, "load_next", fails)
    monkeypatch.setattr("peer.devices.computes", lambda device: named is RuntimeError)
    some._devices = ["cpu", "the second one"]
    some.load_next()
    assert some.loaded == 1 and not some.whole and some.pending_bytes > 0
    with pytest.raises(named, match="a bug" if named is RuntimeError else "the second one"):
        some.load_next()
    assert some.loaded == 1


# -- what a session holds -----------------------------------------------------------------------------------


def spread_seat(budgets: list[CacheBudget], windows: dict[int, int] | None = None) -> SpreadCache:
    """Of blocks 0:1, 1:2 and 2:3."""
    shapes = [SHAPE.without_journal, SHAPE.without_journal, SHAPE]
    return SpreadCache([
        SeatCache(index, index + 1, shape, budget, windows)
        for index, (shape, budget) in enumerate(zip(shapes, budgets, strict=True))
    ])  # fmt: skip


def budgets_of(*pages: int) -> list[CacheBudget]:
    shapes = [SHAPE.without_journal, SHAPE.without_journal, SHAPE]
    return [CacheBudget(count * PAGE * shape.position_bytes(1)) for count, shape in zip(pages, shapes, strict=True)]


def fill_all(seat: SpreadCache, positions: int) -> None:
    for part in seat.parts:
        fill(part, positions)


def right(seat: SpreadCache) -> bool:
    return all(part.position == seat.position and holds(part) for part in seat.parts)


@pytest.mark.parametrize("full", [0, 1, 2])
def test_a_claim_that_fails_on_one_device_claims_nothing_on_the_others(full: int) -> None:
    budgets = budgets_of(*(2 if index == full else 9 for index in range(3)))
    seat, other = spread_seat(budgets), spread_seat(budgets)
    assert seat.claim(PAGE) and other.claim(PAGE)
    before = [budget.used_bytes for budget in budgets]
    assert not seat.can_hold(PAGE + 1) and not seat.claim(PAGE + 1)
    assert [budget.used_bytes for budget in budgets] == before
    fill_all(other, PAGE)
    fill_all(seat, 1)
    other.evict()
    assert seat.can_hold(2 * PAGE) and seat.claim(2 * PAGE)


@pytest.fixture
def little_slack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache, "GO_BACK", 5)
    monkeypatch.setattr(cache, "DROP_LEAST", PAGE)
    yield


def test_all_parts_go_back_to_the_same_position_or_to_none(little_slack: None) -> None:
    """The first has dropped what is behind its window, the second nothing."""
    seat = spread_seat(budgets_of(99, 99, 99), WINDOWS)
    for _ in range(9):
        fill_all(seat, PAGE)
    first, second, _ = seat.parts
    least = first.least_position
    assert 0 == second.least_position < least == seat.least_position
    assert seat.truncate(least) == seat.position == least and right(seat)
    assert seat.truncate(least - 1) == seat.position == 0 and right(seat)
    assert [part.nbytes for part in seat.parts] == [0, 0, 0]
    for wrong in (1, -1):
        with pytest.raises(BadInput):
            seat.truncate(wrong)


def test_what_the_first_parts_have_computed_of_a_pass_that_failed_is_forgotten() -> None:
    seat = spread_seat(budgets_of(9, 9, 9))
    fill_all(seat, 10)
    for part in seat.parts[:2]:
        fill(part, PAGE)
    assert seat.position == 10 and seat.truncate(10) == 10 and right(seat)


def test_a_prefix_is_copied_on_all_devices_or_on_none(little_slack: None) -> None:
    budgets = budgets_of(99, 99, 99)
    donor, seat = spread_seat(budgets, WINDOWS), spread_seat(budgets, WINDOWS)
    for _ in range(9):
        fill_all(donor, PAGE)
    fill_all(seat, 3)
    assert not seat.copy_prefix(donor, donor.least_position - 1) and seat.position == 3 and right(seat)
    assert seat.copy_prefix(donor, donor.least_position) and seat.position == donor.least_position and right(seat)
    budgets[1].limit_bytes = budgets[1].used_bytes
    poor = spread_seat(budgets, WINDOWS)
    assert not poor.copy_prefix(donor, donor.least_position)
    assert poor.position == poor.nbytes == 0


def test_pages_that_do_not_fit_change_nothing_on_any_device() -> None:
    donor, seat = spread_seat(budgets_of(9, 9, 9)), spread_seat(budgets_of(9, 1, 9))
    fill_all(donor, 2 * PAGE)
    dtype, data = donor.pages(0, PAGE)
    assert donor.pages(0, 2 * PAGE + 1) is None
    for start, end, some, of in (
        (0, PAGE, data, "bfloat16"), (0, PAGE, data[:-4], dtype), (0, PAGE, data + b"0000", dtype),
        (1, PAGE + 1, data, dtype), (0, 2 * PAGE, donor.pages(0, 2 * PAGE)[1], dtype), (0, 0, b"", dtype),
    ):  # fmt: skip
        assert not seat.take_pages(start, end, of, some)
        assert [part.nbytes for part in seat.parts] == [0, 0, 0] and seat.position == 0
    assert seat.take_pages(0, PAGE, dtype, data) and seat.position == PAGE and right(seat)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["claim", "fill", "fill", "back", "evict", "copy", "pull"]),
                       st.integers(1, 60)), max_size=30),
    st.tuples(*[st.integers(3, 20)] * 3),
)  # fmt: skip
def test_parts_never_part(actions: list[tuple[int, str, int]], pages: tuple[int, int, int]) -> None:
    """Nor does an account know of anything else than what is held."""
    budgets = budgets_of(*pages)
    seats = [spread_seat(budgets), spread_seat(budgets)]
    for index, action, amount in actions:
        seat, other = seats[index], seats[1 - index]
        end = seat.position + amount
        if action == "claim":
            could = seat.can_hold(end)
            assert seat.claim(end) == could
        elif action == "fill" and seat.can_hold(end):
            fill_all(seat, amount)
        elif action == "back":
            assert seat.truncate(max(0, seat.position - amount)) == seat.position
        elif action == "evict":
            seat.evict()
        elif action == "copy":
            seat.copy_prefix(other, min(other.position, amount))
        elif action == "pull" and (given := other.pages(seat.position, end)) is not None:
            seat.take_pages(seat.position, end, *given)
        assert all(right(each) for each in seats)
        for place, budget in enumerate(budgets):
            assert budget.used_bytes == sum(each.parts[place].nbytes for each in seats) <= budget.limit_bytes
