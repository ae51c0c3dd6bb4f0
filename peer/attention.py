"""Owns the attention of a packed pass: rows of many sessions, each against its own keys and values.

Registered with the library as `swarm_packed`; the library's own layers call it and know nothing of sessions.
Knows no scheduling, no budget and no model family: windows, scales and caps arrive as keywords.

Choices are by measurement (one thread, 9 heads over 3 KV heads of 64): a decode row with its heads folded
into the query axis needs no mask and no expanded keys (26 µs at 40 keys, 185 at 1,000 in fp32, 33 and 123 in
bf16, where `enable_gqa` is several times slower); a chunk runs against keys expanded by a stride of zero,
within 5 % of folding, and its mask is built once a pass rather than once a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from peer.cache import SeatCache

NAME = "swarm_packed"


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


class Pack:
    """Which rows of a packed pass belong to whom. Handed down the layers as the keyword `pack`."""

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

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
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    Writes the new keys and values behind those of each seat, whose extents must have room. Any keyword it
    does not know is an error on purpose: a family that needs more (sinks, biases) must not run without it.
    """
    layer = cast(int, module.layer_idx)
    heads, width, kv_heads = query.shape[1], query.shape[3], key.shape[1]
    folded = (1, kv_heads, heads // kv_heads, width)
    alone = len(pack.segments) == 1
    parts = []
    for segment in pack.segments:
        past, count, offset = segment.past, segment.count, segment.offset
        all_keys, all_values = segment.seat.extents(layer)
        if alone:
            rows = query
            all_keys.narrow(2, past, count).copy_(key)
            all_values.narrow(2, past, count).copy_(value)
        else:
            rows = query.narrow(2, offset, count)
            all_keys.narrow(2, past, count).copy_(key.narrow(2, offset, count))
            all_values.narrow(2, past, count).copy_(value.narrow(2, offset, count))
        first = 0 if sliding_window is None else max(0, past + 1 - sliding_window)
        keys = all_keys.narrow(2, first, past + count - first)
        values = all_values.narrow(2, first, past + count - first)
        if softcap is not None:
            mask = None if count == 1 else pack.mask(segment, first, sliding_window, query)
            parts.append(_soft_capped(rows, keys, values, scaling, softcap, mask))
        elif count == 1:
            result = F.scaled_dot_product_attention(rows.view(folded), keys, values, scale=scaling)
            parts.append(result.reshape(1, 1, heads, width))
        elif past == 0 and (sliding_window is None or count <= sliding_window):
            parts.append(_chunk(rows, keys, values, scaling, None))
        else:
            mask = pack.mask(segment, first, sliding_window, query)
            parts.append(_chunk(rows, keys, values, scaling, mask))
    return (parts[0] if alone else torch.cat(parts, dim=1)), None


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


def _soft_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Scores squeezed into (-softcap, softcap) before the mask and the softmax (gemma2). No fused kernel does it.

    query [1, heads, T, d], keys and values [1, kv_heads, S, d] -> [1, T, heads, d].
    """
    _, heads, count, width = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    scores = torch.bmm(query.reshape(kv_heads, group * count, width), keys[0].transpose(1, 2))
    scores = torch.tanh(scores * ((width**-0.5 if scaling is None else scaling) / softcap)) * softcap
    if mask is not None:
        scores = scores.view(kv_heads, group, count, length) + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    result = torch.bmm(weights.view(kv_heads, group * count, length), values[0])
    return result.view(kv_heads, group, count, width).permute(2, 0, 1, 3).reshape(1, count, heads, width)


AttentionInterface.register(NAME, packed_attention)
