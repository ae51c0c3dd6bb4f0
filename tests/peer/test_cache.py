"""What a seat holds survives growth, and the account of bytes is right whatever the order of things."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.cache import LARGEST_STEP, PAGE, CacheBudget, CacheShape, SeatCache
from routing.errors import BadInput, Overloaded

SHAPE = CacheShape(kv_heads=2, head_dim=4, hidden=8, dtype=torch.float32, device=torch.device("cpu"))


def fill(seat: SeatCache, positions: int) -> None:
    """Appends positions whose content says which they are."""
    end = seat.position + positions
    seat.reserve(end)
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
        expected = (marks + 1000 * block)[:, None].expand(2, -1, 4)
        if not (
            torch.equal(keys[0, :, : seat.position], expected) and torch.equal(values[0, :, : seat.position], -expected)
        ):
            return False
    return torch.equal(seat.rows(0, seat.position), marks[:, None].expand(-1, 8))


def test_growth_keeps_the_content_and_comes_in_doubled_pages():
    seat = SeatCache(3, 6, SHAPE)
    capacities = []
    for count in (1, 15, 1, 40, 1, 200):
        fill(seat, count)
        capacities.append(seat.capacity)
        assert holds(seat)
    assert capacities == [16, 16, 32, 64, 64, 272]
    assert all(capacity % PAGE == 0 for capacity in capacities)


def test_large_extents_grow_by_steps_not_by_doubling():
    seat = SeatCache(0, 1, SHAPE)
    fill(seat, 4096)
    fill(seat, 1)
    assert seat.capacity == 4096 + LARGEST_STEP


def test_bytes_are_those_of_the_tensors():
    seat = SeatCache(3, 6, SHAPE)
    fill(seat, 17)
    tensors = [seat.journal, *(tensor for block in range(3, 6) for tensor in seat.extents(block))]
    assert seat.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    assert seat.nbytes == seat.capacity * SHAPE.position_bytes(3)


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
    fill(seat, 20)  # two pages
    fill(other, 1)
    used = budget.used_bytes
    assert budget.free_bytes == 0
    assert not budget.can_hold(other, 17) and budget.can_hold(other, 16)
    with pytest.raises(Overloaded):
        other.reserve(17)
    assert (budget.used_bytes, other.capacity, other.position) == (used, 16, 1)
    assert holds(seat) and holds(other)
    seat.evict()
    assert seat.nbytes == 0 and seat.position == 0
    other.reserve(17)
    assert budget.used_bytes == other.nbytes


def test_a_claim_is_counted_before_it_is_allocated_and_counted_once():
    budget = CacheBudget(1 << 20)
    seat = SeatCache(0, 1, SHAPE, budget)
    assert budget.claim(seat, 100)
    counted = budget.used_bytes
    assert seat.nbytes == 0 and counted == 112 * SHAPE.position_bytes(1)
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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(["claim", "fill", "truncate", "evict"]), st.integers(1, 60)),
        max_size=40,
    )
)
def test_the_account_is_the_sum_of_what_was_granted(actions):
    budget = CacheBudget(12 * PAGE * SHAPE.position_bytes(1))
    seats = [SeatCache(0, 1, SHAPE, budget), SeatCache(1, 2, SHAPE, budget), SeatCache(0, 3, SHAPE, budget)]
    for index, action, amount in actions:
        seat = seats[index]
        if action == "claim":
            could = budget.can_hold(seat, seat.position + amount)
            assert budget.claim(seat, seat.position + amount) == could
        elif action == "fill" and budget.can_hold(seat, seat.position + amount):
            fill(seat, amount)
        elif action == "truncate":
            seat.truncate(min(seat.position, amount))
        elif action == "evict":
            seat.evict()
        assert budget.used_bytes == sum(seat.bytes_at(seat.granted) for seat in seats) <= budget.limit_bytes
        assert all(seat.position <= seat.capacity <= seat.granted for seat in seats)
        assert all(holds(seat) for seat in seats if seat.capacity)
