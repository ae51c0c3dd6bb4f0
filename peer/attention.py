"""Owns the attention of a packed pass: rows of many sessions, each against its own keys and values.

Our own layers call it as `Pack.attend`, the library's by the name `swarm_packed`; both know nothing of sessions.
Knows no scheduling, no budget and no model family: windows, scales, caps and sinks arrive as keywords.

Choices are by measurement (one thread, 9 heads over 3 KV heads of 64). Rows of decoding sessions go to our own kernel
together (fp32: one row 7 µs at 40 keys and 74 at 1,000, eight rows 29 and 642; bf16 8, 63, 40, 533). Without it each
row's heads are folded into the query axis, which needs no mask and no expanded keys (34 and 131 µs a row; bf16 32 and
86, where `enable_gqa` is several times slower). A chunk runs against keys expanded by a stride of zero, within 5 % of
folding, and its mask is built once a pass rather than once a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F

from peer.cache import SeatCache
from swarm import native

NAME = "swarm_packed"
NATIVE_WIDTH = 16  # our own kernel takes heads of whole vectors


@dataclass(slots=True, eq=False)
class Segment:
    """`count` consecutive rows of a packed pass, from row `offset` on, that belong to `seat`."""

    seat: SeatCache
    offset: int
    count: int
    past: int  # positions before these rows

    @property
    def end(self) -> int:
        return self.past + self.count


class Run:
    """Segments of one row each that follow one another, which one kernel can take together; or one longer segment."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self.offset = segments[0].offset
        self.rows = sum(segment.count for segment in segments)
        self.single = segments[0].count == 1
        self.pasts = [segment.past for segment in segments]

    def held(self, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of a layer, of each segment's seat."""
        extents = [segment.seat.extents(layer) for segment in self.segments]
        return [keys for keys, _ in extents], [values for _, values in extents]


def _runs(segments: Sequence[Segment]) -> Iterator[Run]:
    for single, group in groupby(segments, lambda segment: segment.count == 1):
        some = list(group)
        yield from [Run(some)] if single else (Run([segment]) for segment in some)


class Pack:
    """Which rows of a packed pass belong to whom. Handed down the layers as the keyword `pack`."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self.runs = tuple(_runs(segments))
        self.scaling: float | None = None  # of the last call, as the layer said
        self.window: int | None = None
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See `packed_attention`."""
        return packed_attention(
            module, query, key, value, None, pack=self, scaling=scaling, sliding_window=sliding_window
        )[0]

    def mask(self, segment: Segment, first_key: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Additive mask [count, end - first_key]: causal, and no further back than `window` keys. Same for
        all layers.
        """
        key = (segment.offset, window or 0)
        mask = self._masks.get(key)
        if mask is None:
            query = torch.arange(segment.past, segment.end, device=like.device)[:, None]
            keys = torch.arange(first_key, segment.end, device=like.device)[None]
            hidden = keys > query
            if window is not None:
                hidden |= keys <= query - window
            # In the query's own dtype: a boolean mask would be converted in every layer.
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
            self._masks[key] = mask
        return mask


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack: Pack,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    `s_aux` [heads] are attention sinks. Writes the new keys and values behind those of each seat, whose extents
    must have room. Any keyword it does not know is an error on purpose: a family that needs more (biases) must
    not run without it.
    """
    layer = cast(int, module.layer_idx)
    pack.scaling, pack.window = scaling, sliding_window
    fits = softcap is None and s_aux is None and query.is_cpu and query.shape[3] % NATIVE_WIDTH == 0
    kernels = native.kernels() if fits else None
    parts = []
    for run in pack.runs:
        if len(pack.runs) > 1:
            rows, new_keys, new_values = (t.narrow(2, run.offset, run.rows) for t in (query, key, value))
        else:
            rows, new_keys, new_values = query, key, value
        if kernels is not None and run.single:
            scale = rows.shape[3] ** -0.5 if scaling is None else scaling
            window = sliding_window or 0
            parts.append(
                kernels.attend_rows(rows, new_keys, new_values, *run.held(layer), run.pasts, window, scale)
            )
            continue
        for row, segment in enumerate(run.segments):
            own_query, own_key, own_value = rows, new_keys, new_values
            if len(run.segments) > 1:
                own_query, own_key, own_value = (t.narrow(2, row, 1) for t in (rows, new_keys, new_values))
            parts.append(
                _segment_attention(
                    pack, segment, layer, own_query, own_key, own_value, scaling, sliding_window, softcap, s_aux
                )
            )
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _segment_attention(
    pack: Pack,
    segment: Segment,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """By torch's kernels: the rows of one segment, of shapes as above -> [1, count, heads, d]."""
    _, heads, count, width = query.shape
    past, kv_heads = segment.past, key.shape[1]
    all_keys, all_values = segment.seat.extents(layer)
    all_keys.narrow(2, past, count).copy_(key)
    all_values.narrow(2, past, count).copy_(value)
    first = 0 if sliding_window is None else max(0, past + 1 - sliding_window)
    keys = all_keys.narrow(2, first, past + count - first)
    values = all_values.narrow(2, first, past + count - first)
    if softcap is not None or sinks is not None:
        mask = None if count == 1 else pack.mask(segment, first, sliding_window, query)
        return _spelled_out(query, keys, values, scaling, softcap, sinks, mask)
    if count == 1:
        folded = query.reshape(1, kv_heads, heads // kv_heads, width)
        result = F.scaled_dot_product_attention(folded, keys, values, scale=scaling)
        return result.reshape(1, 1, heads, width)
    if past == 0 and (sliding_window is None or count <= sliding_window):
        return _chunk(query, keys, values, scaling, None)
    return _chunk(query, keys, values, scaling, pack.mask(segment, first, sliding_window, query))


def _chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """query [1, heads, T, d], keys and values [1, kv_heads, S, d] -> [1, T, heads, d]. No mask: causal from 0."""
    _, heads, count, width = query.shape
    kv_heads, length = keys.shape[1:3]
    expanded = (kv_heads, heads // kv_heads, length, width)
    result = F.scaled_dot_product_attention(
        query.view(kv_heads, heads // kv_heads, count, width),
        keys.transpose(0, 1).expand(expanded),
        values.transpose(0, 1).expand(expanded),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
    )
    return result.permute(2, 0, 1, 3).reshape(1, count, heads, width)


def _spelled_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """What no fused kernel does: scores squeezed into (-softcap, softcap) before the mask and the softmax (gemma2), and
    sinks [heads], scores of one more key that holds nothing (gpt_oss).

    query [1, heads, T, d], keys and values [1, kv_heads, S, d] -> [1, T, heads, d].
    """
    _, heads, count, width = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    scale = width**-0.5 if scaling is None else scaling
    scores = torch.bmm(query.reshape(kv_heads, group * count, width), keys[0].transpose(1, 2))
    scores = scores * scale if softcap is None else torch.tanh(scores * (scale / softcap)) * softcap
    scores = scores.view(kv_heads, group, count, length)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(kv_heads, group, 1, 1).expand(kv_heads, group, count, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(values.dtype)
    result = torch.bmm(weights.reshape(kv_heads, group * count, length), values[0])
    return result.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(1, count, heads, width)


def register() -> None:
    """With the library, whose layers then find it by its name. Imports the library's modeling code."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)
