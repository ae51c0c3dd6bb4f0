"""What a seat holds survives growth, and the account of bytes is right whatever the order of things."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer import cache
from peer.cache import CacheBudget, CacheShape, SeatCache
from routing.errors import BadInput, Overloaded

SHAPE = CacheShape(kv_heads=2, head_dim=64, hidden=8, dtype=torch.float32, device=torch.device("cpu"))
PAGE = SHAPE.page
PLENTY = 1 << 30
WINDOWS = {0: 20, 2: 3 * PAGE}  # of blocks


def fill(seat: SeatCache, positions: int) -> None:
    """Appends positions whose content says which they are, as a pass does."""
    end = seat.position + positions
    seat.reserve(end)
    seat.drop_behind_windows()
    marks = torch.arange(seat.position, end, dtype=torch.float32)
    for block in range(seat.entry, seat.exit):
        keys, values = seat.extents(block)
        keys[:, :, seat.position : end] = (marks + 1000 * block)[:, None]
        values[:, :, seat.position : end] = -(marks + 1000 * block)[:, None]
    seat.journal[seat.position : end] = marks[:, None]
    seat.position = end


def holds(seat: SeatCache) -> bool:
    marks = torch.arange(seat.position, dtype=torch.float32)
    for block in range(seat.entry, seat.exit):
        keys, values = seat.extents(block)
        first = max(0, seat.position + 1 - WINDOWS[block]) if seat._windows and block in WINDOWS else 0
        expected = (marks[first:] + 1000 * block)[:, None].expand(2, -1, 64)
        for held, wanted in ((keys, expected), (values, -expected)):
            if not torch.equal(held[0, :, first : seat.position], wanted):
                return False
    return torch.equal(seat.rows(0, seat.position), marks[:, None].expand(-1, seat.shape.hidden))


def resident_bytes(seat: SeatCache) -> int:
    """What the system has really given for the mapping of a seat."""
    start = seat.extents(seat.entry)[0].data_ptr()
    with open("/proc/self/smaps") as maps:
        inside = False
        for line in maps:
            if "-" in (first := line.split(maxsplit=1)[0]) and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= start < end
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("the mapping is not there")


def test_growth_keeps_the_content_and_comes_in_pages():
    seat = SeatCache(3, 6, SHAPE)
    capacities = []
    for count in (1, PAGE - 1, 1, 40, 1, 200):
        fill(seat, count)
        capacities.append(seat.capacity // PAGE)
        assert holds(seat)
    assert capacities == [1, 1, 2, 4, 4, 17]


def test_nothing_moves_when_a_seat_grows():
    seat = SeatCache(0, 2, SHAPE)
    fill(seat, 1)
    before = [tensor.data_ptr() for tensor in (*seat.extents(0), *seat.extents(1), seat.journal)]
    fill(seat, 5000)
    assert [tensor.data_ptr() for tensor in (*seat.extents(0), *seat.extents(1), seat.journal)] == before


def test_more_than_was_expected_is_copied_once(monkeypatch):
    monkeypatch.setattr(cache, "ROOM", 32)
    seat = SeatCache(0, 2, SHAPE)
    for _ in range(9):
        fill(seat, 20)
        assert holds(seat)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.bfloat16, 128)])
def test_what_is_counted_is_what_the_system_gave(dtype, head_dim):
    """Also after growing, going back and giving up; beyond it at most a system's page for the journal."""
    shape = CacheShape(kv_heads=3, head_dim=head_dim, hidden=576, dtype=dtype, device=torch.device("cpu"))
    budget = CacheBudget(1 << 30)
    seat = SeatCache(0, 15, shape, budget)

    def wrote_to(position: int) -> None:
        seat.reserve(position)
        for block in range(15):
            for tensor in seat.extents(block):
                tensor[:, :, seat.position : position] = 1
        seat.journal[seat.position : position] = 1
        seat.position = position

    for step in (40, 1000, 1001):
        wrote_to(step)
        # All positions of the last page count, whether they are written or not.
        assert 0 <= budget.used_bytes - resident_bytes(seat) + mmap.PAGESIZE <= shape.page * shape.hidden * 8
        assert seat.capacity - seat.position < shape.page
    seat.truncate(500)
    assert abs(budget.used_bytes - resident_bytes(seat)) <= shape.page * shape.hidden * 8
    assert seat.capacity - seat.position < shape.page
    wrote_to(520)
    seat.evict()
    assert budget.used_bytes == 0


def test_a_prefix_can_be_taken_from_another_seat():
    budget = CacheBudget(4 * PAGE * SHAPE.position_bytes(2))
    seat, other = SeatCache(1, 3, SHAPE, budget), SeatCache(1, 3, SHAPE, budget)
    fill(other, 20)
    assert seat.copy_prefix(other, 18)
    assert seat.position == 18 and holds(seat) and holds(other)
    fill(seat, 5)
    assert holds(seat) and holds(other)
    third = SeatCache(1, 3, SHAPE, budget)
    assert not third.copy_prefix(other, 18)
    assert third.position == 0 and third.capacity == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_go_from_seat_to_seat_in_pieces(dtype):
    shape = replace(SHAPE, dtype=dtype)
    budget = CacheBudget(PLENTY)
    other, seat = SeatCache(1, 3, shape, budget), SeatCache(1, 3, shape, budget)
    fill(other, 100)
    for start, end in [(0, 16), (16, 17), (17, 90)]:
        assert seat.take_pages(start, end, *other.pages(start, end))
    assert seat.position == 90
    for held, wanted in zip(seat.extents(2), other.extents(2), strict=True):
        assert torch.equal(held[:, :, :90], wanted[:, :, :90])
    assert torch.equal(seat.rows(0, 90), other.rows(0, 90))
    assert budget.used_bytes == seat.nbytes + other.nbytes


def test_pages_that_do_not_fit_change_nothing():
    other, seat = SeatCache(1, 3, SHAPE), SeatCache(1, 3, SHAPE, CacheBudget(SHAPE.position_bytes(2) * PAGE))
    fill(other, 3 * PAGE)
    dtype, data = other.pages(0, PAGE)
    assert not seat.take_pages(0, PAGE, "bfloat16", data), "another dtype"
    assert not seat.take_pages(0, PAGE, dtype, data[:-4]), "bytes are missing"
    assert not seat.take_pages(1, PAGE + 1, dtype, data), "not what follows"
    assert not seat.take_pages(0, 3 * PAGE, *other.pages(0, 3 * PAGE)), "no room"
    assert seat.position == 0 and seat.take_pages(0, PAGE, dtype, data)
    assert other.pages(0, 3 * PAGE + 1) is None and other.pages(0, 0) is None


def test_a_seat_that_drops_what_is_behind_a_window_gives_no_pages():
    seat = SeatCache(0, 2, SHAPE, windows=WINDOWS)
    fill(seat, 10)
    assert seat.pages(0, 10) is None


def test_truncate_goes_back_only():
    seat = SeatCache(0, 2, SHAPE)
    fill(seat, 10)
    seat.truncate(4)
    assert seat.position == 4 and holds(seat)
    for wrong in (5, -1):
        with pytest.raises(BadInput):
            seat.truncate(wrong)
    fill(seat, 3)
    assert seat.position == 7 and holds(seat)


def test_rows_are_a_copy_of_what_is_held():
    seat = SeatCache(0, 1, SHAPE)
    fill(seat, 5)
    rows = seat.rows(1, 4)
    seat.journal.fill_(-7)
    assert rows[:, 0].tolist() == [1, 2, 3]
    assert seat.rows(2, 2).shape == (0, 8)
    for start, end in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(BadInput):
            seat.rows(start, end)


def test_a_full_budget_refuses_and_changes_nothing():
    budget = CacheBudget(3 * PAGE * SHAPE.position_bytes(1))
    seat, other = SeatCache(0, 1, SHAPE, budget), SeatCache(0, 1, SHAPE, budget)
    fill(seat, PAGE + 4)  # two pages
    fill(other, 1)
    used = budget.used_bytes
    assert budget.free_bytes == 0
    assert not budget.can_hold(other, PAGE + 1) and budget.can_hold(other, PAGE)
    with pytest.raises(Overloaded):
        other.reserve(PAGE + 1)
    assert (budget.used_bytes, other.capacity, other.position) == (used, PAGE, 1)
    assert holds(seat) and holds(other)
    seat.evict()
    assert seat.nbytes == 0 and seat.position == 0
    other.reserve(PAGE + 1)
    assert budget.used_bytes == other.nbytes


def test_a_claim_is_counted_before_it_is_allocated_and_counted_once():
    budget = CacheBudget(1 << 20)
    seat = SeatCache(0, 1, SHAPE, budget)
    assert budget.claim(seat, 100)
    counted = budget.used_bytes
    assert counted == -(-100 // PAGE) * PAGE * SHAPE.position_bytes(1)
    fill(seat, 3)
    assert budget.used_bytes == counted == seat.nbytes


def test_the_least_recently_used_seat_comes_first():
    budget = CacheBudget(1 << 20)
    first, second, third = (SeatCache(0, 1, SHAPE, budget) for _ in range(3))
    for seat in (first, second, third, first):
        assert budget.claim(seat, 5)
    assert list(budget.least_recent()) == [second, third, first]
    second.evict()
    assert list(budget.least_recent()) == [third, first]


@pytest.fixture
def little_slack(monkeypatch):
    monkeypatch.setattr(cache, "GO_BACK", 5)
    monkeypatch.setattr(cache, "DROP_LEAST", PAGE)


@pytest.mark.usefixtures("little_slack")
def test_what_lies_behind_a_window_is_given_back():
    budget = CacheBudget(10**9)
    windows: dict[int, int] = {}
    seat = SeatCache(0, 3, SHAPE, budget, windows)
    fill(seat, 39 * PAGE)
    before = resident_bytes(seat)  # its neighbours may be counted with it
    windows.update(WINDOWS)
    fill(seat, PAGE)
    assert holds(seat) and seat.position == 40 * PAGE
    dropped = (37 + 35) * PAGE  # 20 + 5 positions stay, or 3 pages + 5
    assert budget.used_bytes == seat.nbytes == seat.position * SHAPE.position_bytes(3) - dropped * SHAPE.block_bytes
    assert before - resident_bytes(seat) >= (dropped - 3 * PAGE) * SHAPE.block_bytes - mmap.PAGESIZE
    seat.evict()
    assert budget.used_bytes == 0 and seat.least_position == 0
    fill(seat, 5)
    assert holds(seat) and budget.used_bytes == seat.nbytes


@pytest.mark.usefixtures("little_slack")
def test_it_goes_back_a_little_or_all_the_way():
    seat = SeatCache(0, 3, SHAPE, CacheBudget(10**9), WINDOWS)
    for _ in range(9):
        fill(seat, PAGE)
    assert seat.truncate(8 * PAGE - 5) == 8 * PAGE - 5 and holds(seat)
    assert 0 < seat.least_position <= 8 * PAGE - 5
    assert seat.truncate(seat.least_position) == seat.position and holds(seat)
    assert seat.truncate(seat.least_position - 1) == 0 == seat.position == seat.nbytes
    fill(seat, 3 * PAGE)
    assert holds(seat)


@pytest.mark.usefixtures("little_slack")
def test_a_prefix_is_taken_from_what_has_dropped_a_part_if_it_has_the_rest():
    budget = CacheBudget(10**9)
    donor = SeatCache(0, 3, SHAPE, budget, WINDOWS)
    for _ in range(9):
        fill(donor, PAGE)
    short, long = (SeatCache(0, 3, SHAPE, budget, WINDOWS) for _ in range(2))
    assert not short.copy_prefix(donor, donor.least_position - 1) and short.position == 0
    assert long.copy_prefix(donor, donor.least_position) and holds(long)
    assert budget.used_bytes == donor.nbytes + long.nbytes
    assert long.least_position == donor.least_position
    assert not long.copy_prefix(donor, donor.position) and holds(long)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["claim", "fill", "fill", "truncate", "evict", "copy"]),
            st.integers(1, 60),
        ),
        max_size=40,
    )
)
def test_the_account_is_the_sum_of_what_was_granted(actions):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "GO_BACK", 5)
        patch.setattr(cache, "DROP_LEAST", PAGE)
        _check_account(actions)


def _check_account(actions):
    budget = CacheBudget(30 * PAGE * SHAPE.position_bytes(1))
    seats = [SeatCache(0, 1, SHAPE, budget), SeatCache(1, 2, SHAPE, budget), SeatCache(0, 3, SHAPE, budget, WINDOWS)]
    seats.append(SeatCache(0, 3, SHAPE, budget, WINDOWS))
    for index, action, amount in actions:
        seat = seats[index]
        if action == "claim":
            could = budget.can_hold(seat, seat.position + amount)
            assert budget.claim(seat, seat.position + amount) == could
        elif action == "fill" and budget.can_hold(seat, seat.position + amount):
            fill(seat, amount)
        elif action == "truncate":
            wanted = max(0, seat.position - amount)
            assert seat.truncate(wanted) in (0, wanted)
        elif action == "copy" and index >= 2:
            other = seats[5 - index]
            seat.copy_prefix(other, min(other.position, amount * 8))
        elif action == "evict":
            seat.evict()
        assert budget.used_bytes == sum(seat.nbytes for seat in seats) <= budget.limit_bytes
        assert all(seat.position <= seat.capacity for seat in seats)
        assert all(holds(seat) for seat in seats if seat.position)
