"""Blocks of one span on several devices, one part after the other, and what a session holds on them.

Each part is what it would be on a device of its own (`Blocks`, `SeatCache`, `CacheBudget`); what is here does to all
of them what must be done to each, all or nothing. Knows no pass: a part's is `executor.py`'s, from part to part it is
`pipeline.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from peer.blocks import Blocks, Loading
from peer.cache import CacheBudget, CacheShape, SeatCache
from peer.devices import failure
from routing.errors import BadInput
from routing.types import Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Spread:
    """The blocks of `span`: those of each part follow those of the one before."""

    parts: tuple[Blocks, ...] = field(repr=False)
    places: tuple[int, ...]  # of each part: its device, by its number among the peer's
    devices: int  # of the peer; there may be some without blocks

    @property
    def span(self) -> Span:
        return Span(self.parts[0].span.start, self.parts[-1].span.end)

    @property
    def shape(self) -> CacheShape:
        """All agree but for the device; this one is where the outputs of the last block are."""
        return self.parts[-1].shape

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts)

    @property
    def bytes_by_device(self) -> tuple[int, ...]:
        held = dict(zip(self.places, (part.nbytes for part in self.parts), strict=True))
        return tuple(held.get(place, 0) for place in range(self.devices))


class SpreadLoading:
    """The blocks of a span, read in their order onto one device after the other. See `Loading`."""

    def __init__(
        self, begin: Callable[[Span, str], Loading], span: Span, devices: Sequence[str], shares: Sequence[int]
    ):
        """`begin` opens the loading of a span on one device; `shares`: how many blocks each gets."""
        assert sum(shares) == len(span) and len(shares) == len(devices)
        self.span, self._devices = span, devices
        self._places = tuple(place for place, share in enumerate(shares) if share)
        self._parts, start = [], span.start
        for place in self._places:
            part = Span(start, start + shares[place])
            self._parts.append(begin(part, devices[place]))
            start = part.end

    @property
    def loaded(self) -> int:
        return sum(part.loaded for part in self._parts)

    @property
    def whole(self) -> bool:
        return self.loaded == len(self.span)

    @property
    def pending_bytes(self) -> int:
        """That the blocks to come will take."""
        return sum(part.pending_bytes for part in self._parts)

    def load_next(self) -> None:
        """One block more. Raises what `Loading.load_next` raises, and NotEnoughMemory or DeviceLost of its device."""
        place, part = next(each for each in zip(self._places, self._parts, strict=True) if not each[1].whole)
        try:
            part.load_next()
        except (RuntimeError, MemoryError, OSError) as error:
            raise failure(error, self._devices[place]) or error from error

    def load_all(self) -> Spread:
        """What is missing yet. Raises what `load_next` raises."""
        while not self.whole:
            self.load_next()
        return self.blocks()

    def blocks(self) -> Spread:
        """All of them, once they are loaded."""
        assert self.whole
        parts = tuple(part.blocks() for part in self._parts)
        return Spread(parts=parts, places=self._places, devices=len(self._devices))


AnyBlocks = Blocks | Spread
AnyLoading = Loading | SpreadLoading


class SpreadCache:
    """Memory of one seat on several devices. Between passes all parts hold the same positions; while one is under way,
    those before the last may be ahead. Only the last has a journal: of the others' outputs nobody asks.
    """

    def __init__(self, parts: Sequence[SeatCache]):
        self.parts = tuple(parts)

    @property
    def position(self) -> int:
        return self.parts[-1].position

    @property
    def nbytes(self) -> int:
        """Bytes granted."""
        return sum(part.nbytes for part in self.parts)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """See `SeatCache.rows`."""
        return self.parts[-1].rows(start, end)

    @property
    def least_position(self) -> int:
        return max(part.least_position for part in self.parts)

    def truncate(self, position: int) -> int:
        """See `SeatCache.truncate`. All parts go back to the same position; one that cannot takes all to 0. What the
        first parts of a pass have computed that failed later is forgotten, too."""
        if not 0 <= position <= self.position:
            raise BadInput(f"cannot go back to position {position}: {self.position} are held")
        if position < self.least_position:
            position = 0
        for part in self.parts:
            part.truncate(position)
        return position

    def evict(self) -> None:
        """Gives all memory back. The seat may be used again, from position 0."""
        for part in self.parts:
            part.evict()

    def copy_prefix(self, other: SpreadCache, positions: int) -> bool:
        """See `SeatCache.copy_prefix`."""
        pairs = list(zip(self.parts, other.parts, strict=True))
        if not all(mine.can_copy(theirs, positions) for mine, theirs in pairs) or not self.claim(positions):
            return False
        for mine, theirs in pairs:
            copied = mine.copy_prefix(theirs, positions)
            assert copied, "there was room for it"
        return True

    def pages(self, start: int, end: int) -> tuple[str, bytes] | None:
        """The same as of a seat on one device: the blocks follow one another, and the journal is at the end."""
        found = [part.pages(start, end) for part in self.parts]
        given = [pages for pages in found if pages is not None]
        return (given[0][0], b"".join(data for _, data in given)) if len(given) == len(found) else None

    def take_pages(self, start: int, end: int, dtype: str, data: bytes) -> bool:
        """See `SeatCache.take_pages`."""
        pieces, at = [], 0
        for part in self.parts:
            size = (end - start) * part.shape.position_bytes(part.exit - part.entry)
            pieces.append(memoryview(data)[at : at + size])
            at += size
        pairs = list(zip(self.parts, pieces, strict=True))
        fits = all(part.could_take(start, end, dtype, len(piece)) for part, piece in pairs)
        if not fits or at != len(data) or not self.claim(end):
            return False
        for part, piece in pairs:
            taken = part.take_pages(start, end, dtype, piece)
            assert taken, "there was room for it"
        return True

    def can_hold(self, positions: int) -> bool:
        """Whether there is room for so many now, on each device."""
        return all(part.can_hold(positions) for part in self.parts)

    def claim(self, positions: int) -> bool:
        """Has room for `positions` granted. False, and no change, if there is none on one of the devices."""
        return self.can_hold(positions) and all([part.claim(positions) for part in self.parts])


class SpreadBudget:
    """The accounts of a span's parts, each of its device, as one."""

    def __init__(self, parts: Sequence[CacheBudget]):
        self.parts = tuple(parts)

    @property
    def limit_bytes(self) -> int:
        return sum(part.limit_bytes for part in self.parts)

    @property
    def used_bytes(self) -> int:
        return sum(part.used_bytes for part in self.parts)

    @property
    def free_bytes(self) -> int:
        return sum(part.free_bytes for part in self.parts)


def seat_on(
    blocks: AnyBlocks, budget: CacheBudget | SpreadBudget, entry: int, exit: int
) -> SeatCache | SpreadCache:
    """Empty memory for a session that runs `[entry, exit)` of these blocks, on the devices that have them. Raises
    BadInput."""
    if not blocks.span.start <= entry < exit <= blocks.span.end:
        raise BadInput(f"blocks {entry}:{exit} are not served here ({blocks.span} are)")
    caches = [
        part.seat(first, end, own, journal=end == exit)
        for part, own in zip(blocks.parts, budget.parts, strict=True)
        for first, end in [_common(part.span, entry, exit)]
        if first < end
    ]
    return SpreadCache(caches) if len(caches) > 1 else caches[0]


def position_bytes(blocks: AnyBlocks, entry: int, exit: int) -> tuple[int, ...]:
    """What one position of a session in `[entry, exit)` takes of the memory of each part's device."""
    costs = []
    for part in blocks.parts:
        first, end = _common(part.span, entry, exit)
        shape = part.shape if end == exit else part.shape.without_journal
        costs.append(shape.position_bytes(end - first) if first < end else 0)
    return tuple(costs)


def names(blocks: AnyBlocks) -> tuple[str, ...]:
    """Of the parts' devices, before their owner: of several, with what each has."""
    if len(blocks.parts) == 1:
        return (str(blocks.shape.device),)
    return tuple(f"{part.shape.device} (blocks {part.span})" for part in blocks.parts)


def _common(span: Span, entry: int, exit: int) -> tuple[int, int]:
    return max(entry, span.start), min(exit, span.end)
