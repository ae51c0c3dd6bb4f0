"""Owns one packed pass: rows of many sessions, some in prefill and some in decode, through the blocks they
need.

Sessions enter and leave the span at any block. Knows no scheduling, no session rule, no thread and no
network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
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
    seconds: float  # of the whole pass


class Executor:
    """Runs passes over `blocks`. Not for more than one thread at a time."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    @torch.inference_mode()
    def run(self, items: Sequence[PassItem]) -> PassResult:
        """One packed pass. Afterwards each seat holds its T new positions (keys, values and journal).

        All or nothing: if it raises, no seat has advanced. At most one item a seat. Raises BadInput (a shape
        that does not fit), Overloaded (the cache's budget has no room).
        """
        begun = time.perf_counter()
        self._check(items)
        for item in items:
            item.seat.reserve(item.seat.position + item.hidden.shape[0])
        outputs = self._through_blocks(items)
        for item, output in zip(items, outputs, strict=True):
            seat, end = item.seat, item.seat.position + output.shape[0]
            seat.journal[seat.position : end] = output
        finite = [_all_finite(output) for output in outputs]
        for item, output in zip(items, outputs, strict=True):
            item.seat.position += output.shape[0]
        return PassResult(outputs=outputs, finite=finite, seconds=time.perf_counter() - begun)

    def _check(self, items: Sequence[PassItem]) -> None:
        span, hidden = self.blocks.span, self.blocks.shape.hidden
        assert len({id(item.seat) for item in items}) == len(items), "a seat twice in one pass"
        for item in items:
            assert span.start <= item.entry < item.exit <= span.end, "a seat of other blocks"
            if item.hidden.ndim != 2 or item.hidden.shape[0] == 0 or item.hidden.shape[1] != hidden:
                raise BadInput(f"rows of shape {tuple(item.hidden.shape)}: [positions, {hidden}] expected")

    def _through_blocks(self, items: Sequence[PassItem]) -> list[torch.Tensor]:
        """The rows of every item after its last block. Between two boundaries the same items run together."""
        dtype, device = self.blocks.shape.dtype, self.blocks.shape.device
        rows = [item.hidden.to(device=device, dtype=dtype) for item in items]
        boundaries = sorted({boundary for item in items for boundary in (item.entry, item.exit)})
        for start, end in pairwise(boundaries):
            active = [index for index, item in enumerate(items) if item.entry <= start and end <= item.exit]
            if not active:
                continue
            packed = rows[active[0]] if len(active) == 1 else torch.cat([rows[index] for index in active])
            packed = self._run_layers(packed[None], start, end, [items[index] for index in active])[0]
            for index, part in zip(active, packed.split([rows[index].shape[0] for index in active]), strict=True):
                rows[index] = part
        return rows

    def _run_layers(self, hidden: torch.Tensor, start: int, end: int, items: Sequence[PassItem]) -> torch.Tensor:
        """hidden [1, T, hidden] through blocks `[start, end)`. Does what the library's model wrapper does
        around its layers: position embeddings by the kind of layer, no mask, no cache of the library's.
        """
        segments, offset = [], 0
        for item in items:
            count = item.hidden.shape[0]
            segments.append(Segment(item.seat, offset, count, item.seat.position))
            offset += count
        pack = Pack(segments)
        rotary = self.blocks.rotary.rows([(segment.past, segment.end) for segment in segments])
        first = self.blocks.span.start
        for index in range(start - first, end - first):
            layer, kind = self.blocks.layers[index], self.blocks.rotary_kinds[index]
            # `forward` itself: these layers have no hooks, and are not trained here.
            if kind is None:
                hidden = layer.forward(hidden, attention_mask=None, pack=pack)
            else:
                hidden = layer.forward(hidden, attention_mask=None, position_embeddings=rotary[kind], pack=pack)
        return hidden


def _all_finite(rows: torch.Tensor) -> bool:
    """A sum in fp32 is finite only if all its terms are; if it is not, it may also have overflowed."""
    return math.isfinite(rows.sum(dtype=torch.float32).item()) or bool(torch.isfinite(rows).all())
