"""Owns the blocks of a span in memory: the library's own decoder layers with just their weights. Knows no
session.

Layers are built on the meta device and given their tensors block by block, so that no more than the span plus
one block is ever in memory. What the library computes at start and never stores (rotary frequencies) is
computed here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig

from peer.attention import NAME as ATTENTION
from peer.cache import CacheBudget, CacheShape, SeatCache
from routing.errors import BadInput, DamagedWeights
from routing.types import Span
from swarm.checkpoint import Checkpoint
from swarm.families import Family, text_config
from swarm.progress import Progress, silent

FIRST_TABLE = 512  # positions
FEW_ROWS = 16  # up to here RowLinear pays; measured gain at 32 rows: 7 %


class RotaryTables:
    """cos and sin of all positions so far, for each kind of rotary embedding that the span's blocks take.

    Computed by the library's own code, so equal to what it computes for one position at a time; here a pass
    only takes rows. Tables double when a later position comes.
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
        self._tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = dict.fromkeys(kinds, _NO_TABLE)

    def rows(self, spans: Sequence[tuple[int, int]]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For positions `[start, end)` of each span in turn: kind to (cos, sin), each [1, total, width]."""
        if not self._tables:
            return {}
        self._reach(max(end for _, end in spans))
        picked = {}
        for kind, (cos, sin) in self._tables.items():
            picked[kind] = _rows_of(cos, spans), _rows_of(sin, spans)
        return picked

    def _reach(self, positions: int) -> None:
        if positions <= self._length:
            return
        assert self._rotary is not None
        self._length = max(positions, 2 * self._length, FIRST_TABLE)
        every = torch.arange(self._length, device=self._device)
        for kind in self._tables:
            self._tables[kind] = self._family.rotary_tables(self._rotary, kind, every, self._dtype)


def _rows_of(table: torch.Tensor, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    parts = [table[start:end] for start, end in spans]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]


_NO_TABLE = (torch.empty(0), torch.empty(0))


class RowLinear(torch.nn.Linear):
    """`nn.Linear` for few rows in bf16 on a CPU: the weight is the left operand.

    As the right operand it is packed anew in every call, which costs more than the product. All linears of a
    decode step of SmolLM2, one thread: 1 row 41 to 31 ms, 8 rows 44 to 34 (fp32 gains nothing from it).
    """

    @classmethod
    def sharing(cls, linear: torch.nn.Linear) -> RowLinear:
        with torch.device("meta"):
            shared = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        shared.weight, shared.bias = linear.weight, linear.bias
        return shared.eval()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        lead = input.shape[:-1]
        rows = lead.numel()
        if rows > FEW_ROWS:
            return F.linear(input, self.weight, self.bias)
        columns = input.reshape(rows, self.in_features).T
        if self.bias is None:
            product = self.weight.mv(columns[:, 0]) if rows == 1 else self.weight.mm(columns).T.contiguous()
        elif rows == 1:
            product = torch.addmv(self.bias, self.weight, columns[:, 0])
        else:
            product = torch.addmm(self.bias[:, None], self.weight, columns).T.contiguous()
        return product.view(*lead, self.out_features)


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """The blocks of `span`, ready to run."""

    span: Span
    family: Family
    layers: tuple[torch.nn.Module, ...] = field(repr=False)
    rotary_kinds: tuple[str | None, ...] = field(repr=False)  # of each layer
    rotary: RotaryTables = field(repr=False)
    shape: CacheShape
    block_bytes: tuple[int, ...] = field(repr=False)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        family: Family,
        span: Span,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
        *,
        check: Callable[[Sequence[str]], None] | None = None,
    ) -> Blocks:
        """Reads the tensors of `span` and nothing else. `check`, if given, is called with the names of each
        block before they are loaded (it raises if they differ from the manifest).

        Raises BadInput (no such blocks), DamagedWeights.
        """
        config = _runtime_config(checkpoint.config)
        if span.end > family.n_blocks(config):
            raise BadInput(f"there are no blocks {span}: the model has {family.n_blocks(config)}")
        available = checkpoint.tensor_names()
        layers: list[torch.nn.Module] = []
        transposed: bool | None = None
        for index in range(span.start, span.end):
            names = family.block_tensors(config, index, available)
            if check is not None:
                check(names)
            layer = family.build_block(config, index)
            stored = checkpoint.load(names, dtype)
            _give_weights(layer, family.assemble(config, index, stored), index, device)
            if torch.device(device).type == "cpu":
                if dtype == torch.bfloat16:
                    _use_row_linear(layer)
                elif transposed is None:
                    transposed = better_transposed(layer)
                if transposed:
                    transpose_linears(layer)
            layers.append(layer)
            progress(f"loading blocks {span}", len(layers), len(span))
        kinds = tuple(family.rotary_kind(config, index) for index in range(span.start, span.end))
        distinct = tuple(dict.fromkeys(kind for kind in kinds if kind is not None))
        return cls(
            span=span,
            family=family,
            layers=tuple(layers),
            rotary_kinds=kinds,
            rotary=RotaryTables(family, config, distinct, dtype, device),
            shape=cache_shape(config, family, dtype, device),
            block_bytes=tuple(_bytes_of(layer, None) for layer in layers),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.block_bytes)

    def seat(self, entry: int, exit: int, budget: CacheBudget | None = None) -> SeatCache:
        """Empty memory for a session that runs blocks `[entry, exit)` of this span. Raises BadInput."""
        if not self.span.start <= entry < exit <= self.span.end:
            raise BadInput(f"blocks {entry}:{exit} are not served here ({self.span} are)")
        return SeatCache(entry, exit, self.shape, budget)


def estimated_block_bytes(config: PreTrainedConfig, family: Family, index: int, dtype: torch.dtype) -> int:
    """What block `index` will take in memory, exactly, before anything is read."""
    return _bytes_of(family.build_block(_runtime_config(config), index), dtype)


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
    runtime._attn_implementation = ATTENTION
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


def _use_row_linear(layer: torch.nn.Module) -> None:
    for parent in list(layer.modules()):
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear:
                setattr(parent, name, RowLinear.sharing(child))


def better_transposed(layer: torch.nn.Module) -> bool:
    """Whether this machine multiplies faster by weights that lie in memory as [in, out]. Measured, since libraries and
    processors differ; here, one thread, all linears of 15 blocks of SmolLM2 in fp32: 1 row 20.9 to 19.0 ms, 4 rows 38
    to 35, 8 rows 44 to 41, 128 rows 155 to 136; only 2 and 3 rows lose (23 to 26, 26 to 30).
    """
    linears = [child for child in layer.modules() if type(child) is torch.nn.Linear]
    if not linears:
        return False
    weight = max((linear.weight for linear in linears), key=torch.Tensor.numel)
    turned = weight.t().contiguous().t()
    ratio = 1.0
    for rows in (1, 8, 128):
        sample = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        ratio *= _least_seconds(sample, turned) / _least_seconds(sample, weight)
    return ratio < 1.0


def _least_seconds(sample: torch.Tensor, weight: torch.Tensor) -> float:
    times = []
    for _ in range(7):
        begun = time.perf_counter()
        F.linear(sample, weight)
        times.append(time.perf_counter() - begun)
    return min(times)


def transpose_linears(layer: torch.nn.Module) -> None:
    """The same weights, laid out as [in, out]. Their shapes, and what is computed, stay."""
    for child in layer.modules():
        if type(child) is torch.nn.Linear:
            turned = child.weight.detach().t().contiguous().t()
            child.weight = torch.nn.Parameter(turned, requires_grad=False)


def _bytes_of(layer: torch.nn.Module, dtype: torch.dtype | None) -> int:
    return sum(p.numel() * (dtype.itemsize if dtype else p.element_size()) for p in layer.parameters())
