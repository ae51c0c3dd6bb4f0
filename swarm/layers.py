"""Owns decoder layers built like llama's: what the library's own do, without its modeling code.

To import that code takes longer than to load a small model: it brings along what only training and compiling need.
Names of parameters and the order of operations are the library's, so that a layer here gives what the library's gives,
to the bit (tests/swarm/test_layers.py). Knows no session: how rows attend is the pack's, which comes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Tables = tuple[torch.Tensor, torch.Tensor]  # cos and sin, each [1, rows, width]


class Attends(Protocol):
    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """query [1, heads, rows, d], key and value [1, kv_heads, rows, d] -> [1, rows, heads, d]."""
        ...  # fmt: skip


class DecoderLayer(nn.Module):
    """Of llama, mistral, qwen2 and qwen3: they differ in biases, norms of heads and windows."""

    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, attention_mask: None, position_embeddings: Tables, pack: Attends
    ) -> torch.Tensor:
        """hidden [1, rows, size], the rows of `pack` -> the same shape. Keywords are those of the library's layers."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings, pack)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, config: PreTrainedConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self._head_dim = head_dim(config)
        self.scaling = self._head_dim**-0.5
        self.sliding_window = _window(config, layer_idx)
        size, inner = config.hidden_size, config.num_attention_heads * self._head_dim
        kv_inner = config.num_key_value_heads * self._head_dim
        inputs_biased, output_biased = _attention_biases(config)
        self.q_proj = nn.Linear(size, inner, bias=inputs_biased)
        self.k_proj = nn.Linear(size, kv_inner, bias=inputs_biased)
        self.v_proj = nn.Linear(size, kv_inner, bias=inputs_biased)
        self.o_proj = nn.Linear(inner, size, bias=output_biased)
        normed = config.model_type == "qwen3"
        self.q_norm = RMSNorm(self._head_dim, config.rms_norm_eps) if normed else None
        self.k_norm = RMSNorm(self._head_dim, config.rms_norm_eps) if normed else None

    def forward(self, hidden: torch.Tensor, tables: Tables, pack: Attends) -> torch.Tensor:
        by_head = (*hidden.shape[:-1], -1, self._head_dim)
        query, key = self.q_proj(hidden).view(by_head), self.k_proj(hidden).view(by_head)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_rotated(some.transpose(1, 2), *tables) for some in (query, key))
        value = self.v_proj(hidden).view(by_head).transpose(1, 2)
        attended = pack.attend(self, query, key, value, scaling=self.scaling, sliding_window=self.sliding_window)
        return self.o_proj(attended.reshape(*hidden.shape[:-1], -1))


class GatedMLP(nn.Module):
    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        biased = config.model_type == "llama" and config.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=biased)
        self.up_proj = nn.Linear(size, inner, bias=biased)
        self.down_proj = nn.Linear(inner, size, bias=biased)
        self.act_fn = _activation(config.hidden_act)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        exact = hidden.to(torch.float32)
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(hidden.dtype)


class RotaryEmbedding(nn.Module):
    """With the library's frequencies, where they depend on the position alone."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        kind, width = config.rope_parameters["rope_type"], head_dim(config)
        if kind == "default":
            halves = torch.arange(0, width, 2, dtype=torch.float) / width
            frequencies, self._scaling = 1.0 / (config.rope_parameters["rope_theta"] ** halves), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, self._scaling = ROPE_INIT_FUNCTIONS[kind](config)
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def forward(self, like: torch.Tensor, position_ids: torch.Tensor) -> Tables:
        """position_ids [1, N] -> cos and sin [1, N, width], on the device and in the dtype of `like`."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=like.device, dtype=torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return cos.to(dtype=like.dtype), sin.to(dtype=like.dtype)


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [1, n, rows, width]: its first half is the real parts, its second the imaginary ones."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = heads.shape[-1] // 2
    return heads * cos + torch.cat((-heads[..., half:], heads[..., :half]), dim=-1) * sin


def _attention_biases(config: PreTrainedConfig) -> tuple[bool, bool]:
    """Of the products for query, key and value; of the one for the output."""
    if config.model_type == "qwen2":
        return True, False
    if config.model_type == "mistral":
        return False, False
    return config.attention_bias, config.attention_bias


def _window(config: PreTrainedConfig, layer_idx: int) -> int | None:
    if config.model_type == "llama":
        return None
    windowed = config.model_type == "mistral" or config.layer_types[layer_idx] == "sliding_attention"
    return config.sliding_window if windowed else None


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if name == "silu":  # of every model of these families that is in use
        return nn.functional.silu
    from transformers.activations import ACT2FN

    functions: Any = ACT2FN
    return functions[name]
