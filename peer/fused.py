"""Blocks built like llama's by the native kernels: decode rows in one call, longer chunks in a dozen.

The library's layer is some sixty operations, and on one core they cost as much as half of its products. Whether a layer
can be run so is found out by running it so: a layer with the right parts is compared with the library's own forward on
rows of its own, and what does not agree runs as the library has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from peer.attention import Pack, Run, Segment, packed_attention
from peer.cache import CacheShape, SeatCache
from swarm import native
from swarm.few_rows import FewRows, FewRowsLinear, FewRowsNorm, few_rows_linear

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest value
PACKED_TOLERANCE = 2e-3  # at least, with packed weights: their kernels take rows in 16 bits
SAMPLES = (((5, 1), (0, 1), (40, 1)), ((5, 3), (0, 20), (40, 1)))  # (positions held, rows) of each session of a pass
Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [1, rows, width]


class FusedBlock:
    """Not for more than one thread at a time."""

    def __init__(self, layer: Any, index: int):
        """Raises AttributeError, TypeError or ValueError if the layer has not the parts."""
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self._attention = index, attention
        self.window, self.scale = 0, 0.0  # as the layer tells its attention when it is compared
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        norms = [norm for norm in (first, second, *head_norms) if norm is not None]
        if not all(isinstance(norm, FewRowsNorm) for norm in norms):
            raise TypeError("norms of another kind")
        if not all(isinstance(product, FewRowsLinear) for product in products):
            raise TypeError("products of another kind")
        (self.epsilon,) = {norm.epsilon for norm in norms}
        self._few_rows: FewRows = products[0].few_rows
        self._packed = products[0].weight.dtype == torch.uint8
        if any(product.bias is not None for product in products[4:]):
            raise TypeError("biases of another kind")
        self._norms = first.weight, second.weight
        self._head_norms = [None if norm is None else norm.weight for norm in head_norms]
        self._products = [(product.weight, product.bias) for product in products]
        none = products[0].weight.new_empty(0)
        q, k, v, o, gate, up, down = (product.weight for product in products)
        biases = [none if product.bias is None else product.bias for product in products[:4]]
        q_norm, k_norm = (none if weight is None else weight for weight in self._head_norms)
        # In the order of `Part` in kernels/blocks.h.
        self.parts = [first.weight, q, k, v, o, second.weight, gate, up, down, *biases, q_norm, k_norm]

    @classmethod
    def of(
        cls, layer: torch.nn.Module, index: int, shape: CacheShape, tables: Callable[[Sequence[Segment]], Tables]
    ) -> FusedBlock | None:
        """None if the layer is of another kind. `tables` are the rotary ones of some segments. The kernels must be
        loaded.
        """
        try:
            fused = cls(layer, index)
        except (AttributeError, TypeError, ValueError):
            return None
        try:
            same = all(fused._agrees(layer, shape, sample, tables) for sample in SAMPLES)
        except (RuntimeError, TypeError) as error:  # of the kernels, about shapes; of a layer that wants other keywords
            log.debug("block %d runs as the library has it: %s", index, error)
            return None
        return fused if same else None

    def run(self, hidden: torch.Tensor, tables: Tables, pack: Pack) -> torch.Tensor:
        """hidden [1, rows, size], the rows of `pack` -> the same shape. Writes their keys and values."""
        if self.in_one_call(pack):
            return run_in_one_call([self], hidden, tables, pack.runs[0])
        rows = hidden.shape[1]
        kernels, (cos, sin) = native.kernels(), tables
        (q, k, v, o, gate, up, down), (first, second) = self._products, self._norms
        normed = kernels.rms_norm(hidden, first, self.epsilon)
        heads = [self._product(normed, weights).view(1, rows, -1, cos.shape[2]) for weights in (q, k, v)]
        for index, norm in enumerate(self._head_norms):
            if norm is not None:
                heads[index] = kernels.rms_norm(heads[index], norm, self.epsilon)
            heads[index] = kernels.rotated(heads[index], cos, sin)
        query, key, value = (some.transpose(1, 2) for some in heads)
        attended, _ = packed_attention(
            self._attention, query, key, value, None,
            pack=pack, scaling=self.scale, sliding_window=self.window or None,
        )  # fmt: skip
        hidden = hidden + self._product(attended.reshape(1, rows, -1), o)
        normed = kernels.rms_norm(hidden, second, self.epsilon)
        opened = kernels.gated(self._product(normed, gate), self._product(normed, up))
        return self._product(opened, down).add_(hidden)

    def in_one_call(self, pack: Pack) -> bool:
        return len(pack.runs) == 1 and pack.runs[0].single and pack.runs[0].rows <= self._few_rows.most

    def _product(self, x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        return few_rows_linear(x, *weights, self._few_rows)

    def _agrees(
        self,
        layer: torch.nn.Module,
        shape: CacheShape,
        sample: Sequence[tuple[int, int]],
        tables: Callable[[Sequence[Segment]], Tables],
    ) -> bool:
        make = torch.Generator().manual_seed(self.index)
        hidden = torch.randn(1, sum(rows for _, rows in sample), shape.hidden, generator=make).to(shape.dtype)
        outputs = []
        for fused in (False, True):
            pack = Pack(_sample_segments(self.index, shape, sample))
            rotary = tables(pack.segments)
            if fused:
                out = self.run(hidden, rotary, pack)
            else:
                out = layer.forward(hidden, attention_mask=None, position_embeddings=rotary, pack=pack)
                self.window = pack.window or 0
                self.scale = shape.head_dim**-0.5 if pack.scaling is None else pack.scaling
            written = [
                tensor[:, :, segment.past : segment.end]
                for segment in pack.segments
                for tensor in segment.seat.extents(self.index)
            ]
            outputs.append([out, *written])
        tolerance = max(TOLERANCE[shape.dtype], PACKED_TOLERANCE if self._packed else 0.0)
        return all(_near(mine, theirs, tolerance) for theirs, mine in zip(*outputs, strict=True))


def run_in_one_call(blocks: Sequence[FusedBlock], hidden: torch.Tensor, tables: Tables, run: Run) -> torch.Tensor:
    """Through blocks that take the same tables; `run` is all of the pack."""
    parts, keys, values = [], [], []
    for block in blocks:
        parts += block.parts
        more_keys, more_values = run.held(block.index)
        keys += more_keys
        values += more_values
    windows, epsilons, scales = zip(*((block.window, block.epsilon, block.scale) for block in blocks), strict=True)
    return native.kernels().blocks(hidden, *tables, parts, keys, values, run.pasts, windows, epsilons, scales)


def _sample_segments(index: int, shape: CacheShape, sample: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, offset = [], 0
    for past, rows in sample:
        seat = SeatCache(index, index + 1, shape)
        seat.reserve(past + rows)
        make = torch.Generator().manual_seed(past)
        for tensor in seat.extents(index):
            held = tensor[:, :, :past]
            held.copy_(torch.randn(held.shape, generator=make).to(shape.dtype))
        seat.position = past
        segments.append(Segment(seat, offset, rows, past))
        offset += rows
    return segments


def _near(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    largest = theirs.float().abs().max()
    return bool((mine.float() - theirs.float()).abs().max() <= tolerance * largest)


class FusedBlocks:
    """The fused blocks of a span, made when they are first wanted: the kernels may come later than the blocks."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        kinds: Sequence[str | None],
        rotary_rows: Callable[[Sequence[tuple[int, int, bool]]], dict[str, Tables]],
        first: int,
        shape: CacheShape,
        windows: dict[int, int],
    ):
        """`kinds` of rotary embedding of each layer; `rotary_rows` as of RotaryTables; `first` is the first index.
        Enters into `windows` those of the fused blocks.
        """
        self._layers, self._kinds, self._rotary_rows = layers, kinds, rotary_rows
        self._first, self._shape, self._windows = first, shape, windows
        self._made: dict[int, FusedBlock | None] = {}

    def run(
        self, hidden: torch.Tensor, tables: dict[str, Tables], pack: Pack, start: int, end: int
    ) -> tuple[torch.Tensor, int]:
        """Through the first of the blocks at offsets `[start, end)` of the span, and how many that were: of decode rows
        all that are fused and take one kind of tables; else one, or none that is not fused.
        """
        first, kind = self.get(start), self._kinds[start]
        if first is None or kind is None:
            return hidden, 0
        if not first.in_one_call(pack):
            return first.run(hidden, tables[kind], pack), 1
        together = [first]
        while start + len(together) < end and self._kinds[start + len(together)] == kind:
            block = self.get(start + len(together))
            if block is None:
                break
            together.append(block)
        return run_in_one_call(together, hidden, tables[kind], pack.runs[0]), len(together)

    def get(self, offset: int) -> FusedBlock | None:
        """Of the block at `offset` of the span."""
        if native.kernels() is None or self._shape.device.type != "cpu":
            return None
        if offset not in self._made:
            self._made[offset] = self._make(offset, self._kinds[offset])
        return self._made[offset]

    def _make(self, offset: int, kind: str | None) -> FusedBlock | None:
        if kind is None:
            return None

        def tables(segments: Sequence[Segment]) -> Tables:
            return self._rotary_rows([(segment.past, segment.end, False) for segment in segments])[kind]

        index = self._first + offset
        fused = FusedBlock.of(self._layers[offset], index, self._shape, tables)
        if fused is not None and fused.window:
            self._windows[index] = fused.window
        return fused
