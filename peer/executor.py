"""Owns one packed pass: rows of many sessions, some in prefill and some in decode, through the blocks they
need.

Sessions enter and leave the span at any block. Knows no scheduling, no session rule, no thread and no
network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from peer.attention import Pack, Segment
from peer.blocks import Blocks
from peer.cache import SeatCache
from routing.errors import BadInput


@dataclass(frozen=True, slots=True, eq=False)
class PassItem:
    """The next rows of one seat: hidden states [T, hidden] at the positions that follow those it holds, T >
    0.
    """

    seat: SeatCache
    hidden: torch.Tensor
    long: bool = False  # its sequence is in longrope's long regime

    @property
    def entry(self) -> int:
        return self.seat.entry

    @property
    def exit(self) -> int:
        return self.seat.exit


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PassResult:
    """Of one pass, in the order of its items."""

    outputs: list[torch.Tensor]  # each [T, hidden]
    finite: list[bool]  # whether all values of each output are finite
    seconds: float  # of computing, without what ran in between


class Pass:
    """One packed pass under way: `advance` takes it through one block after another. Afterwards each seat holds its T
    new positions (keys, values and journal); before that, and if it raises, no seat has advanced.
    """

    def __init__(self, blocks: Blocks, items: Sequence[PassItem]):
        """At most one item a seat. Raises BadInput (a shape that does not fit), Overloaded (no room in the cache)."""
        begun = time.perf_counter()
        self._blocks, self._items = blocks, items
        _check(blocks, items)
        for item in items:
            item.seat.reserve(item.seat.position + item.hidden.shape[0])
            item.seat.drop_behind_windows()  # not after the pass, which may have to be taken back
        dtype, device = blocks.shape.dtype, blocks.shape.device
        self._rows = [item.hidden.to(device=device, dtype=dtype) for item in items]
        self._steps = self._through_blocks()
        self.result: PassResult | None = None
        self._seconds = time.perf_counter() - begun

    @torch.inference_mode()
    def advance(self, enough: Callable[[float], bool] = lambda seconds: False) -> bool:
        """Runs until the end, or after any block until `enough`, which is told the seconds of this call. Whether the
        end was reached; then `result` is there.
        """
        assert self.result is None, "the pass has ended"
        begun = time.perf_counter()
        for _ in self._steps:
            if enough(time.perf_counter() - begun):
                self._seconds += time.perf_counter() - begun
                return False
        outputs = self._rows
        for item, output in zip(self._items, outputs, strict=True):
            seat, end = item.seat, item.seat.position + output.shape[0]
            if seat.shape.hidden:
                seat.journal[seat.position : end] = output
        finite = [_all_finite(output) for output in outputs]
        for item, output in zip(self._items, outputs, strict=True):
            item.seat.position += output.shape[0]
        self._seconds += time.perf_counter() - begun
        self.result = PassResult(outputs=outputs, finite=finite, seconds=self._seconds)
        return True

    def _through_blocks(self) -> Iterator[None]:
        """The rows of every item after its last block. Between two boundaries the same items run together."""
        items, rows = self._items, self._rows
        boundaries = sorted({boundary for item in items for boundary in (item.entry, item.exit)})
        for start, end in pairwise(boundaries):
            active = [index for index, item in enumerate(items) if item.entry <= start and end <= item.exit]
            if not active:
                continue
            packed = rows[active[0]] if len(active) == 1 else torch.cat([rows[index] for index in active])
            counts = [rows[index].shape[0] for index in active]
            layers = self._run_layers(packed[None], start, end, [items[index] for index in active])
            for hidden in layers:
                packed = hidden[0]
                yield
            for index, part in zip(active, packed.split(counts), strict=True):
                rows[index] = part

    def _run_layers(
        self, hidden: torch.Tensor, start: int, end: int, items: Sequence[PassItem]
    ) -> Iterator[torch.Tensor]:
        """hidden [1, T, hidden] after each of the blocks `[start, end)`. Does what the library's model wrapper does
        around its layers: position embeddings by the kind of layer, no mask, no cache of the library's.
        """
        segments, offset = [], 0
        for item in items:
            count = item.hidden.shape[0]
            segments.append(Segment(item.seat, offset, count, item.seat.position))
            offset += count
        pack = Pack(segments)
        blocks, first = self._blocks, self._blocks.span.start
        stretches = [(segment.past, segment.end, item.long) for segment, item in zip(segments, items, strict=True)]
        rotary = blocks.rotary.rows(stretches)
        index = start - first
        while index < end - first:
            hidden, done = blocks.fused.run(hidden, rotary, pack, index, end - first)
            if not done:
                hidden, done = self._run_layer(index, hidden, rotary, pack), 1
                if pack.window is not None:
                    blocks.windows[first + index] = pack.window
            index += done
            yield hidden

    def _run_layer(
        self, index: int, hidden: torch.Tensor, rotary: dict[str, tuple[torch.Tensor, torch.Tensor]], pack: Pack
    ) -> torch.Tensor:
        layer, kind = self._blocks.layers[index], self._blocks.rotary_kinds[index]
        # `forward` itself: these layers have no hooks, and are not trained here.
        if kind is None:
            return layer.forward(hidden, attention_mask=None, pack=pack)
        return layer.forward(hidden, attention_mask=None, position_embeddings=rotary[kind], pack=pack)


class Executor:
    """Runs passes over `blocks`. Not for more than one thread at a time; between two `advance` of a pass others may
    run, of other seats."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def begin(self, items: Sequence[PassItem]) -> Pass:
        return Pass(self.blocks, items)

    def run(self, items: Sequence[PassItem]) -> PassResult:
        """A whole pass. Raises what `Pass` raises."""
        packed = self.begin(items)
        packed.advance()
        assert packed.result is not None
        return packed.result


def _check(blocks: Blocks, items: Sequence[PassItem]) -> None:
    span, hidden = blocks.span, blocks.shape.hidden
    assert len({id(item.seat) for item in items}) == len(items), "a seat twice in one pass"
    for item in items:
        assert span.start <= item.entry < item.exit <= span.end, "a seat of other blocks"
        if item.hidden.ndim != 2 or item.hidden.shape[0] == 0 or item.hidden.shape[1] != hidden:
            raise BadInput(f"rows of shape {tuple(item.hidden.shape)}: [positions, {hidden}] expected")


def _all_finite(rows: torch.Tensor) -> bool:
    """A sum in fp32 is finite only if all its terms are; if it is not, it may also have overflowed."""
    return math.isfinite(rows.sum(dtype=torch.float32).item()) or bool(torch.isfinite(rows).all())
