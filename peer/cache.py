"""Owns what a seat remembers (keys, values, and the journal of its outputs) and the account of its bytes.

A seat's memory is contiguous: a pass writes and reads it by slices. It is counted and granted in pages of 16
positions. Knows no session, no name, no network, and does not decide what to evict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from routing.errors import BadInput, Overloaded

PAGE = 16  # positions
LARGEST_STEP = 1024  # positions: extents double up to this, then grow by it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one position costs in one block, and in the journal."""

    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device

    def position_bytes(self, blocks: int) -> int:
        """Bytes of one position of a seat that covers `blocks` blocks."""
        return (2 * blocks * self.kv_heads * self.head_dim + self.hidden) * self.dtype.itemsize


class SeatCache:
    """Memory of one seat: one session in blocks `[entry, exit)`.

    Positions `[0, position)` are held. During a pass only the compute thread may touch it; between passes,
    its owner. `granted` is the capacity that a budget has allowed, `capacity` what is allocated: the executor
    allocates.
    """

    def __init__(self, entry: int, exit: int, shape: CacheShape, budget: CacheBudget | None = None):
        assert 0 <= entry < exit
        self.entry = entry
        self.exit = exit
        self.shape = shape
        self.budget = budget
        self.position = 0
        self.capacity = 0
        self.granted = 0
        self._extents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.journal = self._empty(0, shape.hidden)  # [capacity, hidden], outputs of block exit - 1

    def extents(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block, each [1, kv_heads, capacity, head_dim]; what lies behind `position` is not
        valid.
        """
        return self._extents[block - self.entry]

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A copy of the outputs at positions `[start, end)`, [end - start, hidden].

        Raises BadInput if they are not held.
        """
        if not 0 <= start <= end <= self.position:
            raise BadInput(f"positions {start}:{end} are not held here (0:{self.position} are)")
        # A later pass may overwrite the journal while this is being sent.
        return self.journal[start:end].clone()

    def truncate(self, position: int) -> None:
        """Forgets the positions from `position` on. Raises BadInput if it is not within what is held."""
        if not 0 <= position <= self.position:
            raise BadInput(f"cannot go back to position {position}: {self.position} are held")
        self.position = position

    def capacity_for(self, positions: int) -> int:
        """The capacity to grow to so that `positions` fit: doubled, in steps of whole pages."""
        held = max(self.capacity, self.granted)
        if positions <= held:
            return held
        return _whole_pages(max(positions, held + min(held, LARGEST_STEP)))

    def least_for(self, positions: int) -> int:
        """The least capacity in which `positions` fit: where there is no room for the next step."""
        return max(self.capacity, self.granted, _whole_pages(positions))

    def bytes_at(self, capacity: int) -> int:
        return capacity * self.shape.position_bytes(self.exit - self.entry)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.bytes_at(self.capacity)

    def reserve(self, positions: int) -> None:
        """Allocates room for `positions`.

        Raises Overloaded if the budget has no room; then nothing has changed.
        """
        if positions <= self.capacity:
            return
        if self.budget is not None and not self.budget.claim(self, positions):
            raise Overloaded(f"no room for {positions} positions in the cache")
        self._grow(self.capacity_for(positions))

    def _grow(self, capacity: int) -> None:
        held, shape = self.position, self.shape
        blocks = self.exit - self.entry
        if not self._extents:
            self._extents = [(self._empty(1, 0, 0, 0), self._empty(1, 0, 0, 0)) for _ in range(blocks)]
        # One block at a time: old and new lie side by side for one block only. Until the last is done,
        # `capacity` is the old one, which all extents have at least.
        for index, pair in enumerate(self._extents):
            wider = []
            for old in pair:
                new = self._empty(1, shape.kv_heads, capacity, shape.head_dim)
                if held:
                    new[:, :, :held] = old[:, :, :held]
                wider.append(new)
            self._extents[index] = (wider[0], wider[1])
        journal = self._empty(capacity, shape.hidden)
        journal[:held] = self.journal[:held]
        self.journal = journal
        self.capacity = capacity

    def evict(self) -> None:
        """Gives all memory back. The seat may be used again, from position 0."""
        if self.budget is not None:
            self.budget.release(self)
        self.position = self.capacity = self.granted = 0
        self._extents = []
        self.journal = self._empty(0, self.shape.hidden)

    def _empty(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.shape.dtype, device=self.shape.device)


class CacheBudget:
    """Bytes that all seats of a peer may hold together, accounted before they are allocated.

    What to do when there is no room (refuse, or evict some of `least_recent`) is its owner's decision.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._seats: OrderedDict[SeatCache, None] = OrderedDict()  # least recently used first

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def can_hold(self, seat: SeatCache, positions: int) -> bool:
        """Whether `seat` could grow to `positions` now."""
        return self._fits(seat, seat.least_for(positions))

    def claim(self, seat: SeatCache, positions: int) -> bool:
        """Grants `seat` room for `positions`, and marks it as used now. False, and no change, if there is no
        room.
        """
        capacity = seat.capacity_for(positions)
        if not self._fits(seat, capacity):
            capacity = seat.least_for(positions)
            if not self._fits(seat, capacity):
                return False
        self.used_bytes += seat.bytes_at(capacity) - seat.bytes_at(seat.granted)
        seat.granted = capacity
        self._seats[seat] = None
        self._seats.move_to_end(seat)
        return True

    def release(self, seat: SeatCache) -> None:
        """Takes back what was granted to `seat`; called by `SeatCache.evict`."""
        if seat in self._seats:
            del self._seats[seat]
            self.used_bytes -= seat.bytes_at(seat.granted)

    def least_recent(self) -> Iterator[SeatCache]:
        """The seats that hold memory, the one unused for longest first."""
        return iter(tuple(self._seats))

    def _fits(self, seat: SeatCache, capacity: int) -> bool:
        return self.used_bytes + seat.bytes_at(capacity) - seat.bytes_at(seat.granted) <= self.limit_bytes


def _whole_pages(positions: int) -> int:
    return -(-positions // PAGE) * PAGE
