"""Owns what a seat remembers (keys, values, and the journal of its outputs) and the account of its bytes.

A seat's memory is contiguous: a pass writes and reads it by slices. On a CPU it is a stretch of address space of which
the system gives real pages as they are written and takes them back when they are given up: nothing is copied when a
seat grows, and what is counted is what is used. Counted and granted in pages of 16 positions or a few more. Of blocks
whose attention looks no further back than a window, keys and values behind it are given back. Knows no session, no
name, no network, and does not decide what to evict.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from routing.errors import BadInput, Overloaded

PAGE = 16  # positions, at least
ROOM = 16_384  # positions of address space to begin with
GO_BACK = 256  # positions that a seat can go back however small its window
DROP_LEAST = 256  # positions at once: each costs a system call a head
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux: address space is not counted as memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What one position costs in one block, and in the journal."""

    kv_heads: int
    head_dim: int
    hidden: int  # 0: no journal
    dtype: torch.dtype
    device: torch.device

    @property
    def page(self) -> int:
        """Positions of a page: 16, or of heads as small as 128 bytes as many as fill a page of the system."""
        row = self.head_dim * self.dtype.itemsize
        return max(PAGE, mmap.PAGESIZE // row) if row >= 128 and mmap.PAGESIZE % row == 0 else PAGE

    def position_bytes(self, blocks: int) -> int:
        """Bytes of one position of a seat that covers `blocks` blocks."""
        return blocks * self.block_bytes + self.hidden * self.dtype.itemsize

    @property
    def without_journal(self) -> CacheShape:
        """Of a seat whose outputs go on to further blocks of this peer, and are never asked for."""
        return replace(self, hidden=0)

    @property
    def block_bytes(self) -> int:
        """Bytes of one position's key and value in one block."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class SeatCache:
    """Memory of one seat: one session in blocks `[entry, exit)`.

    Positions `[0, position)` are held. During a pass only the compute thread may touch it; between passes, its owner.
    `capacity` is how many positions a budget has granted and may be written. `windows`: of the blocks that have one, in
    positions; may become known later.
    """

    def __init__(
        self,
        entry: int,
        exit: int,
        shape: CacheShape,
        budget: CacheBudget | None = None,
        windows: Mapping[int, int] | None = None,
    ):
        assert 0 <= entry < exit
        self.entry = entry
        self.exit = exit
        self.shape = shape
        self.budget = budget
        self.position = 0
        self.capacity = 0
        self._windows = {} if windows is None else windows
        self._dropped: dict[int, int] = {}  # block -> positions before this one are not held
        self._memory = _Memory.nothing(exit - entry, shape)

    @property
    def parts(self) -> tuple[SeatCache, ...]:
        """One for each device that it lies on; see `SpreadCache`."""
        return (self,)

    @property
    def journal(self) -> torch.Tensor:
        """Outputs of block exit - 1, [at least capacity, hidden]; what lies behind `position` is not valid."""
        return self._memory.journal

    def extents(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a block, each [1, kv_heads, at least capacity, head_dim]; what lies behind `position` is
        not valid.
        """
        return self._memory.extents[block - self.entry]

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A copy of the outputs at positions `[start, end)`, [end - start, hidden].

        Raises BadInput if they are not held.
        """
        if not 0 <= start <= end <= self.position:
            raise BadInput(f"positions {start}:{end} are not held here (0:{self.position} are)")
        # A later pass may overwrite the journal while this is being sent.
        return self.journal[start:end].clone()

    @property
    def least_position(self) -> int:
        """The least position to go back to, other than 0: before it, what a window reaches has been dropped."""
        return max((start + self._windows[block] - 1 for block, start in self._dropped.items()), default=0)

    def truncate(self, position: int) -> int:
        """Forgets the positions from `position` on, and gives their pages back. The position reached: 0 if what a
        window would reach is there no more. Raises BadInput if it is not within what is held.
        """
        if not 0 <= position <= self.position:
            raise BadInput(f"cannot go back to position {position}: {self.position} are held")
        if position < self.least_position:
            position = 0
        self.position = position
        self._shrink(self._whole_pages(position))
        return position

    def drop_behind_windows(self) -> None:
        """Gives back what blocks with a window will not look at again."""
        if self.shape.device.type != "cpu":
            return
        for block in range(self.entry, self.exit):
            window = self._windows.get(block)
            if window is None:
                continue
            start = self._dropped.get(block, 0)
            # Only pages that no row needs which may still be asked for.
            end = (self.position - window - GO_BACK) // self.shape.page * self.shape.page
            if end - start >= DROP_LEAST:
                self._memory.give_back_block(block - self.entry, start, end)
                self._drop(block, start, end)

    def _drop(self, block: int, start: int, end: int) -> None:
        self._dropped[block] = end
        if self.budget is not None:
            self.budget.count((start - end) * self.shape.block_bytes)

    def can_copy(self, other: SeatCache, positions: int) -> bool:
        """Whether neither of two seats of the same blocks has dropped what `copy_prefix` would need."""
        return not self._dropped and positions >= other.least_position

    def copy_prefix(self, other: SeatCache, positions: int) -> bool:
        """Takes the first `positions` of another seat of the same blocks, in place of what is held here. False, and
        nothing has changed, if the budget has no room, or one of the two has dropped what would be needed.
        """
        assert (self.entry, self.exit, self.shape) == (other.entry, other.exit, other.shape)
        assert positions <= other.position
        if not self.can_copy(other, positions):
            return False
        try:
            self.reserve(positions)
        except Overloaded:
            return False
        for block in range(self.entry, self.exit):
            start = other._dropped.get(block, 0)
            for new, old in zip(self.extents(block), other.extents(block), strict=True):
                new[:, :, start:positions] = old[:, :, start:positions]
            if start:
                self._drop(block, 0, start)
        self.journal[:positions] = other.journal[:positions]
        self.position = positions
        return True

    def pages(self, start: int, end: int) -> tuple[str, bytes] | None:
        """Keys and values [blocks, 2, kv_heads, end - start, head_dim], then the journal [end - start, hidden], of
        positions that are held, and their dtype. None where a block has a window: what is behind it may be gone.
        """
        drops = any(block in self._windows for block in range(self.entry, self.exit))
        if drops or not 0 <= start < end <= self.position:
            return None
        parts = self._memory.kv[..., start:end, :].reshape(-1), self.journal[start:end].reshape(-1)
        flat = torch.cat(parts).cpu().view(torch.uint8)
        return _dtype_name(self.shape.dtype), flat.numpy().tobytes()

    def could_take(self, start: int, end: int, dtype: str, nbytes: int) -> bool:
        """Whether pages of those positions follow what is held, and are of this seat's shape and dtype."""
        size = (end - start) * self.shape.position_bytes(self.exit - self.entry)
        return start == self.position and start < end and dtype == _dtype_name(self.shape.dtype) and nbytes == size

    def take_pages(self, start: int, end: int, dtype: str, data: bytes | memoryview) -> bool:
        """Appends what `pages` of another seat of the same blocks gave. False, and nothing has changed, if it is not of
        this seat's shape and dtype, or the budget has no room.
        """
        if not self.could_take(start, end, dtype, len(data)):
            return False
        try:
            self.reserve(end)
        except Overloaded:
            return False
        flat = torch.frombuffer(bytearray(data), dtype=self.shape.dtype).to(self.shape.device)
        kv = self._memory.kv[..., start:end, :]
        kv.copy_(flat[: kv.numel()].view(kv.shape))
        self.journal[start:end] = flat[kv.numel() :].view(end - start, self.shape.hidden)
        self.position = end
        return True

    def bytes_at(self, capacity: int) -> int:
        dropped = sum(min(start, capacity) for start in self._dropped.values())
        return capacity * self.shape.position_bytes(self.exit - self.entry) - dropped * self.shape.block_bytes

    def capacity_for(self, positions: int) -> int:
        """What is granted so that `positions` fit: whole pages; where growing must copy, twice as much as before."""
        if positions <= self.capacity:
            return self.capacity
        pages = self._whole_pages(positions)
        return pages if self.shape.device.type == "cpu" else max(pages, 2 * self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes granted."""
        return self.bytes_at(self.capacity)

    def can_hold(self, positions: int) -> bool:
        """Whether the budget has room for so many now."""
        return self.budget is None or self.budget.can_hold(self, positions)

    def claim(self, positions: int) -> bool:
        """Has room for `positions` granted. False, and no change, if there is none."""
        if self.budget is not None:
            return self.budget.claim(self, positions)
        self.capacity = self.capacity_for(positions)
        return True

    def reserve(self, positions: int) -> None:
        """Makes room for `positions`.

        Raises Overloaded if the budget has no room; then nothing has changed.
        """
        if positions > self.capacity and not self.claim(positions):
            raise Overloaded(f"no room for {positions} positions in the cache")
        if self.capacity > self._memory.room:
            self._memory = self._memory.larger(self.capacity, self.position)

    def evict(self) -> None:
        """Gives all memory back. The seat may be used again, from position 0."""
        self.position = 0
        self._shrink(0)
        self._memory = _Memory.nothing(self.exit - self.entry, self.shape)

    def _shrink(self, capacity: int) -> None:
        if capacity >= self.capacity:
            return
        self._memory.give_back(capacity, self.capacity)
        if self.budget is not None:
            self.budget.release(self, capacity)
        else:
            self.capacity = capacity
        if capacity == 0:
            self._dropped.clear()

    def _whole_pages(self, positions: int) -> int:
        return -(-positions // self.shape.page) * self.shape.page


class _Memory:
    """Keys, values and journal of `room` positions."""

    def __init__(self, blocks: int, shape: CacheShape, room: int):
        self._blocks, self._shape, self.room = blocks, shape, room
        kv_size, journal_size = 2 * blocks * shape.kv_heads * room * shape.head_dim, room * shape.hidden
        self._mapping: mmap.mmap | None = None
        if room and shape.device.type == "cpu":
            nbytes = (kv_size + journal_size) * shape.dtype.itemsize
            self._mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
            if hasattr(mmap, "MADV_NOHUGEPAGE"):
                # Each head of each block has its own stretch: a huge page a stretch would be 2 MiB for a few tokens.
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)
            flat = torch.frombuffer(self._mapping, dtype=shape.dtype)
        else:
            flat = torch.empty(kv_size + journal_size, dtype=shape.dtype, device=shape.device)
        self.kv = flat[:kv_size].view(blocks, 2, 1, shape.kv_heads, room, shape.head_dim)
        self.extents = [(self.kv[index, 0], self.kv[index, 1]) for index in range(blocks)]
        self.journal = flat[kv_size:].view(room, shape.hidden)

    @classmethod
    def nothing(cls, blocks: int, shape: CacheShape) -> _Memory:
        return cls(blocks, shape, 0)

    def larger(self, capacity: int, held: int) -> _Memory:
        """With room for `capacity`, and the first `held` positions of this one."""
        room = max(ROOM, capacity, 2 * self.room) if self._shape.device.type == "cpu" else capacity
        new = _Memory(self._blocks, self._shape, room)
        new.kv[..., :held, :] = self.kv[..., :held, :]
        new.journal[:held] = self.journal[:held]
        return new

    def give_back(self, start: int, end: int) -> None:
        """The system's pages of positions `[start, end)`."""
        for block in range(self._blocks):
            self.give_back_block(block, start, end)
        shape, size = self._shape, self._shape.dtype.itemsize
        journal = 2 * self._blocks * shape.kv_heads * self.room * shape.head_dim * size
        self._drop(journal, shape.hidden * size, start, end)

    def give_back_block(self, block: int, start: int, end: int) -> None:
        """The same of one block's keys and values."""
        shape = self._shape
        row, stretches = shape.head_dim * shape.dtype.itemsize, 2 * shape.kv_heads
        for index in range(block * stretches, (block + 1) * stretches):
            self._drop(index * self.room * row, row, start, end)

    def _drop(self, base: int, row: int, start: int, end: int) -> None:
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-(base + start * row) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (base + end * row) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)


class CacheBudget:
    """Bytes that all seats of a peer may hold together on one device, accounted before they are allocated.

    What to do when there is no room (refuse, or evict some of `least_recent`) is its owner's decision.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._seats: OrderedDict[SeatCache, None] = OrderedDict()  # least recently used first

    @property
    def parts(self) -> tuple[CacheBudget, ...]:
        """One for each device; see `SpreadBudget`."""
        return (self,)

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def can_hold(self, seat: SeatCache, positions: int) -> bool:
        """Whether `seat` could grow to `positions` now."""
        return positions <= seat.capacity or self.used_bytes + self._more(seat, positions) <= self.limit_bytes

    def claim(self, seat: SeatCache, positions: int) -> bool:
        """Grants `seat` room for `positions`, and marks it as used now. False, and no change, if there is no
        room.
        """
        if positions > seat.capacity:
            more = self._more(seat, positions)
            if self.used_bytes + more > self.limit_bytes:
                return False
            self.count(more)
            seat.capacity = seat.capacity_for(positions)
        self._seats[seat] = None
        self._seats.move_to_end(seat)
        return True

    def release(self, seat: SeatCache, capacity: int) -> None:
        """Takes back what was granted to `seat` beyond `capacity`; called by the seat."""
        self.count(seat.bytes_at(capacity) - seat.bytes_at(seat.capacity))
        seat.capacity = capacity
        if capacity == 0:
            del self._seats[seat]

    def count(self, nbytes: int) -> None:
        """So many more are held, or fewer. The event loop and the compute thread both count: nothing is called between
        reading the account and writing it, so neither loses what the other wrote."""
        self.used_bytes += nbytes

    def least_recent(self) -> Iterator[SeatCache]:
        """The seats that hold memory, the one unused for longest first."""
        return iter(tuple(self._seats))

    def _more(self, seat: SeatCache, positions: int) -> int:
        return seat.bytes_at(seat.capacity_for(positions)) - seat.bytes_at(seat.capacity)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
