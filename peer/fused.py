"""A whole block in one call for decode rows: for layers built like llama's, by the native kernels.

The library's layer is some sixty operations a row, and on one core they cost as much as half of its products. Whether a
layer can be run so is found out by running it so: a layer with the right parts is compared with the library's own
forward on rows of its own, and what does not agree runs as the library has it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from peer.attention import Pack, Run, Segment
from peer.cache import CacheShape, SeatCache
from swarm import native
from swarm.few_rows import FewRowsLinear, FewRowsNorm

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest value
SAMPLE_PASTS = (5, 0, 40)


class FusedBlock:
    """Not for more than one thread at a time."""

    def __init__(self, layer: Any, index: int):
        """Raises AttributeError, TypeError or ValueError if the layer has not the parts."""
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._window, self._scale = 0, 0.0  # as the layer tells its attention when it is compared
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        products = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        products += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        norms = [norm for norm in (first, second, *head_norms) if norm is not None]
        if not all(isinstance(norm, FewRowsNorm) for norm in norms):
            raise TypeError("norms of another kind")
        if not all(isinstance(product, FewRowsLinear) for product in products):
            raise TypeError("products of another kind")
        (self._epsilon,) = {norm.epsilon for norm in norms}
        q, k, v, o, gate, up, down = (product.weight for product in products)
        none = q.new_empty(0)
        biases = [none if product.bias is None else product.bias for product in products]
        if any(bias.numel() for bias in biases[4:]):
            raise TypeError("biases of another kind")
        q_norm, k_norm = (none if norm is None else norm.weight for norm in head_norms)
        # In the order of `Part` in native.cpp.
        self._parts = [first.weight, q, k, v, o, second.weight, gate, up, down, *biases[:4], q_norm, k_norm]

    @classmethod
    def of(
        cls, layer: torch.nn.Module, index: int, shape: CacheShape, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> FusedBlock | None:
        """None if the layer is of another kind. `rotary`: cos and sin [1, rows, width] of positions SAMPLE_PASTS. The
        kernels must be loaded.
        """
        try:
            fused = cls(layer, index)
        except (AttributeError, TypeError, ValueError):
            return None
        try:
            same = fused._agrees(layer, shape, rotary)
        except (RuntimeError, TypeError) as error:  # of the kernels, about shapes; of a layer that wants other keywords
            log.debug("block %d runs as the library has it: %s", index, error)
            return None
        return fused if same else None

    def run(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], run: Run) -> torch.Tensor:
        """hidden [1, rows, size], one row of each session of `run` -> the same shape. Writes their keys and values."""
        return native.kernels().block(
            hidden, *rotary, self._parts, *run.held(self._index), run.pasts, self._window, self._epsilon, self._scale
        )

    def _agrees(self, layer: torch.nn.Module, shape: CacheShape, rotary: tuple[torch.Tensor, torch.Tensor]) -> bool:
        make = torch.Generator().manual_seed(self._index)
        hidden = torch.randn(1, len(SAMPLE_PASTS), shape.hidden, generator=make).to(shape.dtype)
        outputs = []
        for fused in (False, True):
            seats = [_sample_seat(self._index, shape, past) for past in SAMPLE_PASTS]
            pack = Pack([Segment(seat, row, 1, seat.position) for row, seat in enumerate(seats)])
            if fused:
                out = self.run(hidden, rotary, pack.runs[0])
            else:
                out = layer.forward(hidden, attention_mask=None, position_embeddings=rotary, pack=pack)
                self._window = pack.window or 0
                self._scale = shape.head_dim**-0.5 if pack.scaling is None else pack.scaling
            written = [
                tensor[0, :, past]
                for seat, past in zip(seats, SAMPLE_PASTS, strict=True)
                for tensor in seat.extents(self._index)
            ]
            outputs.append([out, *written])
        return all(_near(mine, theirs, TOLERANCE[shape.dtype]) for theirs, mine in zip(*outputs, strict=True))


def _sample_seat(index: int, shape: CacheShape, past: int) -> SeatCache:
    seat = SeatCache(index, index + 1, shape)
    seat.reserve(past + 1)
    make = torch.Generator().manual_seed(past)
    for tensor in seat.extents(index):
        held = tensor[:, :, :past]
        held.copy_(torch.randn(held.shape, generator=make).to(shape.dtype))
    seat.position = past
    return seat


def _near(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> bool:
    largest = theirs.float().abs().max()
    return bool((mine.float() - theirs.float()).abs().max() <= tolerance * largest)


class FusedBlocks:
    """The fused blocks of a span, made when they are first wanted: the kernels may come later than the blocks."""

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        kinds: Sequence[str | None],
        rotary_rows: Callable[[Sequence[tuple[int, int]]], dict[str, tuple[torch.Tensor, torch.Tensor]]],
        first: int,
        shape: CacheShape,
    ):
        """`kinds` of rotary embedding of each layer; `rotary_rows` as of RotaryTables; `first` is the first index."""
        self._layers, self._kinds, self._rotary_rows = layers, kinds, rotary_rows
        self._first, self._shape = first, shape
        self._made: dict[int, FusedBlock | None] = {}

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
        tables = self._rotary_rows([(past, past + 1) for past in SAMPLE_PASTS])[kind]
        return FusedBlock.of(self._layers[offset], self._first + offset, self._shape, tables)
