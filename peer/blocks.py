"""Owns the blocks of a span in memory: decoder layers, the library's or those of `swarm/layers.py`, with just their
weights. Knows no session.

With a quantization weights are packed when they are loaded (`packing.py`).

Layers are built on the meta device and given their tensors block by block, so that no more than the span plus
one block is ever in memory, and the first blocks can be served before the last ones are read. What the library
computes at start and never stores (rotary frequencies) is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from peer import attention
from peer.cache import CacheBudget, CacheShape, SeatCache
from peer.fused import FusedBlocks
from peer.packing import check_packable, linears, quantize, sizes, weights
from routing.errors import BadInput, DamagedWeights
from routing.types import Span
from swarm.checkpoint import Checkpoint
from swarm.families import Family, text_config
from swarm.few_rows import FewRows, FewRowsLinear, FewRowsNorm
from swarm.memory import Arena, placed_bytes
from swarm.progress import Progress, silent
from swarm.quantized import NONE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FIRST_TABLE = 512  # positions
Stretch = tuple[int, int, bool]  # positions [start, end) of a sequence, and whether it is in longrope's long regime


class RotaryTables:
    """cos and sin of all positions so far, for each kind of rotary embedding that the span's blocks take.

    Computed by the library's own code, so equal to what it computes for one position at a time; here a pass
    only takes rows. Tables double when a later position comes. With longrope each kind has two, by the regime of the
    sequence; no honest sequence in the short one reaches beyond it, and rows there are those of the long one.
    """

    def __init__(
        self,
        family: Family,
        config: PreTrainedConfig,
        kinds: Sequence[str],
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self._family = family
        self._rotary = family.rotary(config)
        self._dtype = dtype
        self._device = torch.device(device)
        self._length = 0
        self._kinds = tuple(kinds)
        self._short = family.short_context(config)
        self._tables: dict[tuple[str, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def is_long(self, context: int) -> bool:
        """Whether a sequence that is to hold so many positions is in the long regime."""
        return self._short is not None and context > self._short

    def rows(self, stretches: Sequence[Stretch]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For the positions of each stretch in turn: kind to (cos, sin), each [1, total, width]."""
        if not self._kinds:
            return {}
        self._reach(max(end for _, end, _ in stretches))
        return {kind: (self._rows(kind, 0, stretches), self._rows(kind, 1, stretches)) for kind in self._kinds}

    def _rows(self, kind: str, which: int, stretches: Sequence[Stretch]) -> torch.Tensor:
        parts = [self._tables[kind, long][which][start:end] for start, end, long in stretches]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _reach(self, positions: int) -> None:
        if positions <= self._length:
            return
        self._length = max(positions, 2 * self._length, FIRST_TABLE)
        for kind in self._kinds:
            if self._short is None:
                self._tables[kind, False] = self._table(kind, self._length)
                continue
            long = self._table(kind, max(self._length, self._short + 1))
            short = self._table(kind, min(self._length, self._short))
            beyond = (torch.cat([some, rest[self._short :]]) for some, rest in zip(short, long, strict=True))
            self._tables[kind, True] = long
            self._tables[kind, False] = short if self._length <= self._short else tuple(beyond)  # type: ignore[assignment]

    def _table(self, kind: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._rotary is not None
        every = torch.arange(length, device=self._device)
        return self._family.rotary_tables(self._rotary, kind, every, self._dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The blocks of `span`, ready to run."""

    span: Span
    family: Family
    layers: tuple[torch.nn.Module, ...] = field(repr=False)
    rotary_kinds: tuple[str | None, ...] = field(repr=False)  # of each layer
    rotary: RotaryTables = field(repr=False)
    shape: CacheShape
    few_rows: FewRows = field(repr=False)
    fused: FusedBlocks = field(repr=False)
    block_bytes: tuple[int, ...] = field(repr=False)
    windows: dict[int, int] = field(repr=False)  # of blocks whose attention has one, once they have run

    @property
    def parts(self) -> tuple[Blocks, ...]:
        """One for each device; see `Spread`."""
        return (self,)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.block_bytes)

    @property
    def places(self) -> tuple[int, ...]:
        """Of each part: its device's number among the peer's."""
        return (0,)

    @property
    def bytes_by_device(self) -> tuple[int, ...]:
        return (self.nbytes,)

    def linears(self) -> list[FewRowsLinear]:
        """All products that choose their kernel by the number of rows."""
        modules = (module for layer in self.layers for module in layer.modules())
        return [module for module in modules if isinstance(module, FewRowsLinear)]

    def seat(self, entry: int, exit: int, budget: CacheBudget | None = None, *, journal: bool = True) -> SeatCache:
        """Empty memory for a session that runs blocks `[entry, exit)` of this span. Raises BadInput."""
        if not self.span.start <= entry < exit <= self.span.end:
            raise BadInput(f"blocks {entry}:{exit} are not served here ({self.span} are)")
        return SeatCache(entry, exit, self.shape if journal else self.shape.without_journal, budget, self.windows)


class Loading:
    """The blocks of a span, read in their order: what is loaded may be served while the rest follows.

    Reads the tensors of `span` and nothing else. `check`, if given, is called with the names of each block before they
    are loaded (it raises if they differ from the manifest).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        span: Span,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
        *,
        quantization: str = NONE,
        check: Callable[[Sequence[str]], None] | None = None,
    ):
        """Raises BadInput (no such blocks), UnsupportedQuantization (of such layers, or on the device)."""
        config = self._config = _runtime_config(checkpoint.config)
        if span.end > family.n_blocks(config):
            raise BadInput(f"there are no blocks {span}: the model has {family.n_blocks(config)}")
        if not family.own_layers:
            attention.register()
        self.span, self.loaded = span, 0
        self._check, self._checkpoint, self._family = check, checkpoint, family
        self._dtype, self._device = dtype, device
        self._quantization, self._progress = quantization, progress
        self._available = checkpoint.tensor_names()
        self._layers = [family.build_block(config, index) for index in _range(span)]  # without weights yet
        for layer in self._layers:
            check_packable(layer, quantization, device)
        self._sizes = [sum(map(placed_bytes, sizes([layer], dtype, quantization))) for layer in self._layers]
        self._few_rows = FewRows(dtype, packed=quantization != NONE)
        self._arena = Arena(self.pending_bytes) if torch.device(device).type == "cpu" else None
        self._kinds = tuple(family.rotary_kind(config, index) for index in _range(span))
        self._shape = cache_shape(config, family, dtype, device)
        distinct = tuple(dict.fromkeys(kind for kind in self._kinds if kind is not None))
        self._rotary, self._windows = RotaryTables(family, config, distinct, dtype, device), dict[int, int]()
        rows = self._rotary.rows
        self._fused = FusedBlocks(self._layers, self._kinds, rows, span.start, self._shape, self._windows)

    @property
    def whole(self) -> bool:
        return self.loaded == len(self.span)

    @property
    def pending_bytes(self) -> int:
        """That the blocks to come will take."""
        return sum(self._sizes[self.loaded :])

    def load_next(self) -> None:
        """One block more. If it raises it may be tried again: DamagedWeights, StartError (the device cannot do the
        quantization), what `check` raises."""
        offset, index = self.loaded, self.span.start + self.loaded
        names = self._family.block_tensors(self._config, index, self._available)
        if self._check is not None:
            self._check(names)
        packed = self._quantization != NONE
        # What is rounded twice is off the grid of a file.
        stored = self._checkpoint.load(names, torch.float32 if packed else self._dtype)
        layer = self._family.build_block(self._config, index)
        tensors = self._family.assemble(self._config, index, stored)
        _give_weights(layer, tensors, index, "cpu" if packed else self._device)
        if packed:
            quantize(layer, self._quantization, self._few_rows, self._dtype, self._device)
        if self._arena is not None:
            _use_few_rows(layer, self._few_rows)
            _place(layer, self._arena)
        self._layers[offset] = layer
        self.loaded += 1
        self._progress(f"loading blocks {self.span}", self.loaded, len(self.span))

    def load_all(self) -> Blocks:
        """What is missing yet. Raises what `load_next` raises."""
        while not self.whole:
            self.load_next()
        return self.blocks()

    def blocks(self) -> Blocks:
        """Those that are loaded, at least one. Those of earlier calls share all with them."""
        layers = tuple(self._layers[: self.loaded])
        return Blocks(
            span=Span(self.span.start, self.span.start + self.loaded),
            family=self._family,
            layers=layers,
            rotary_kinds=self._kinds[: self.loaded],
            rotary=self._rotary,
            shape=self._shape,
            few_rows=self._few_rows,
            fused=self._fused,
            block_bytes=tuple(sum(each.nbytes for each in layer.parameters()) for layer in layers),
            windows=self._windows,
        )


def estimated_block_bytes(
    config: PreTrainedConfig, family: Family, index: int, dtype: torch.dtype, quantization: str = NONE
) -> int:
    """What block `index` will take in a CPU's memory, exactly, before anything is read."""
    return sum(sizes([family.build_block(_runtime_config(config), index)], dtype, quantization))


def packed_shapes(config: PreTrainedConfig, family: Family, index: int) -> list[tuple[int, int]]:
    """(outputs, inputs) of the weights of block `index` that a quantization packs; of its experts those of one."""
    layer = family.build_block(_runtime_config(config), index)
    return [(each.shape[-2], each.shape[-1]) for _, each in weights(layer)]


def cache_shape(
    config: PreTrainedConfig, family: Family, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> CacheShape:
    """What positions will cost, before anything is loaded."""
    config = text_config(config)
    kv_heads, head_dim = family.head_shape(config)
    return CacheShape(
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=config.hidden_size,
        dtype=dtype,
        device=torch.device(device),
    )


def _runtime_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the text model's configuration with what the library's model wrapper would have chosen."""
    runtime = copy(text_config(config))
    runtime._attn_implementation = attention.NAME
    # The library's default; 10 to 40 times faster than "batched_mm".
    runtime._experts_implementation = "grouped_mm"
    return runtime


def _give_weights(
    layer: torch.nn.Module, tensors: dict[str, torch.Tensor], index: int, device: torch.device | str
) -> None:
    for name, parameter in layer.named_parameters():
        if name in tensors and tensors[name].shape != parameter.shape:
            raise DamagedWeights(
                f"{name} of block {index} has shape {tuple(tensors[name].shape)}, "
                f"but the configuration asks for {tuple(parameter.shape)}"
            )
    layer.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, assign=True)
    layer.requires_grad_(False)
    # A family whose layers hold buffers that are not stored would compute with garbage.
    assert not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))


def _use_few_rows(layer: torch.nn.Module, few_rows: FewRows) -> None:
    for parent, name, child in linears(layer):
        if isinstance(child, torch.nn.Linear):
            setattr(parent, name, FewRowsLinear.sharing(child, few_rows))
    for parent in list(layer.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                setattr(parent, name, FewRowsNorm.of(norm))


def _place(layer: torch.nn.Module, arena: Arena) -> None:
    for parameter in layer.parameters():
        parameter.data = arena.place(parameter.data)


def _range(span: Span) -> range:
    return range(span.start, span.end)
