"""Our own layers are the library's, to the bit: names, shapes, outputs, and what they tell their attention."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AttentionInterface

from swarm import layers
from swarm.families import SUPPORTED
from tests.tiny import SMALL, WINDOW

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
CONFIGS = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "llama without a width of heads": ("llama", {"head_dim": None}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "mistral without a width of heads": ("mistral", {"head_dim": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", WINDOWED),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 with biases and windows": ("qwen3", {"attention_bias": True, **WINDOWED}),
}
TOLD: list[tuple[float, int | None]] = []  # scaling and window of each call


class Rows:
    """Stands for a pack: one sequence."""

    def attend(self, module, query, key, value, *, scaling, sliding_window):
        TOLD.append((scaling, sliding_window))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)


def of_library(module, query, key, value, mask, *, scaling, sliding_window=None, pack, **_):
    return pack.attend(module, query, key, value, scaling=scaling, sliding_window=sliding_window), None


AttentionInterface.register("test_layers", of_library)


@pytest.fixture(params=CONFIGS)
def config(request):
    family, overrides = CONFIGS[request.param]
    made = CONFIG_MAPPING[family](**{**SMALL, "num_hidden_layers": 2, **overrides})
    made._attn_implementation = "test_layers"
    return made


def library(config, suffix):
    family = SUPPORTED[config.model_type]
    module = importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")
    return getattr(module, family.classes + suffix)


def test_every_family_with_layers_of_our_own_is_compared():
    assert {name for name, family in SUPPORTED.items() if family.own_layers} == {name for name, _ in CONFIGS.values()}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_gives_what_the_librarys_gives(config, dtype, index):
    torch.manual_seed(0)
    theirs = library(config, "DecoderLayer")(config, index).to(dtype).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = layers.DecoderLayer(config, index).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    hidden, positions = torch.randn(1, 2 * WINDOW, config.hidden_size).to(dtype), torch.arange(2 * WINDOW)[None]
    tables = layers.RotaryEmbedding(config)(hidden, positions)
    TOLD.clear()
    with torch.inference_mode():
        expected = theirs(hidden, attention_mask=None, position_embeddings=tables, pack=Rows())
        assert torch.equal(ours(hidden, attention_mask=None, position_embeddings=tables, pack=Rows()), expected)
    told_by_theirs, told_by_ours = TOLD
    assert told_by_ours == told_by_theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_the_librarys(config, dtype):
    like, positions = torch.empty(0, dtype=dtype), torch.arange(300)[None]
    ours, theirs = layers.RotaryEmbedding(config), library(config, "RotaryEmbedding")(config)
    for mine, expected in zip(ours(like, positions), theirs(like, positions), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_the_librarys(config, dtype):
    ours, theirs = (kind(64, eps=1e-5).to(dtype) for kind in (layers.RMSNorm, library(config, "RMSNorm")))
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    rows = torch.randn(5, 64).to(dtype) * 3
    assert torch.equal(ours(rows), theirs(rows))
