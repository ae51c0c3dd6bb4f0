"""Owns turning GGUF metadata into a transformers configuration. Knows no tensor data.

The keys are mapped by transformers' own table. That table leaves out some that change results without any
error (rope scaling, soft-capping, gemma's attention scale): they are added here, or the file is refused.
Sources: the GGUF specification (github.com/ggml-org/ggml/blob/master/docs/gguf.md) and llama.cpp's model
loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from routing.errors import DamagedWeights, ModelError, UnsupportedFamily

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# GGUF architecture -> (transformers model type, number of blocks of the size that scales attention by heads)
ARCHITECTURES = {
    "llama": ("llama", None),
    "qwen2": ("qwen2", None),
    "qwen3": ("qwen3", None),
    "gemma2": ("gemma2", 46),
    "gemma3": ("gemma3_text", 62),
    "gpt2": ("gpt2", None),
}
ROPE_FACTORS = "rope_freqs.weight"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # each ends a turn


def read_config(
    path: Path, metadata: Mapping[str, Any], vocab_size: int, tied: bool, rope_factors: np.ndarray | None
) -> PreTrainedConfig:
    """The configuration of the model in `path`.

    `rope_factors` is the tensor of that name, if the file has one. Raises UnsupportedFamily, ModelError,
    DamagedWeights (keys missing).
    """
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedFamily(
            f"{path} is of the architecture {architecture!r}; from GGUF these are supported: "
            f"{', '.join(ARCHITECTURES)}",
            advice="Use the model as safetensors.",
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise UnsupportedFamily(
            f"{path} is a mixture of experts, which is not supported from GGUF",
            advice="Use the model as safetensors.",
        )
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    settings: dict[str, Any] = {"tie_word_embeddings": tied}
    table: Any = GGUF_CONFIG_MAPPING
    for key, setting in table[architecture].items():
        if setting is not None and key in keys:
            settings[setting] = keys[key]
    for key, setting in table["tokenizer"].items():
        if f"tokenizer.{key}" in metadata:
            settings[setting] = metadata[f"tokenizer.{key}"]
    settings["vocab_size"] = vocab_size
    try:
        settings |= _left_out(architecture, keys)
        scaling = _rope_scaling(path, keys) if rope_factors is None else _llama3_scaling(rope_factors)
        if scaling is not None:
            settings["rope_scaling"] = scaling
        config = AutoConfig.for_model(ARCHITECTURES[architecture][0], **settings)
    except KeyError as error:
        raise DamagedWeights(f"{path} lacks the metadata key {architecture}.{error.args[0]}") from None
    except (ValueError, TypeError) as error:
        raise ModelError(f"the metadata of {path} makes no usable configuration: {error}") from error
    if rope_factors is not None and not _scales_like(config, rope_factors):
        raise ModelError(f"{path} scales its rotary embedding in a way that is not known")
    return config


def _left_out(architecture: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that transformers' table has no entry for. A missing key raises KeyError."""
    settings: dict[str, Any] = {}
    if architecture == "qwen3":
        settings["head_dim"] = keys["attention.key_length"]
    if architecture == "gpt2":
        settings["n_positions"] = keys["context_length"]
        settings["n_inner"] = keys["feed_forward_length"]
    if architecture == "llama" and "rope.dimension_count" not in keys:
        settings["head_dim"] = keys["embedding_length"] // keys["attention.head_count"]
    by_heads_at = ARCHITECTURES[architecture][1]
    if by_heads_at is not None:  # llama.cpp tells gemma's sizes apart by the number of blocks, too
        by_heads = keys["embedding_length"] // keys["attention.head_count"]
        of_this_size = keys["block_count"] == by_heads_at
        settings["query_pre_attn_scalar"] = by_heads if of_this_size else keys["attention.key_length"]
    if architecture == "gemma2":
        settings["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", 50.0)
        settings["final_logit_softcapping"] = keys.get("final_logit_softcapping", 30.0)
    return settings


def _rope_scaling(path: Path, keys: Mapping[str, Any]) -> dict[str, Any] | None:
    """None without scaling. Raises ModelError for a kind that is not known here."""
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys["rope.scaling.factor"]}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": keys["rope.scaling.factor"],
            "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
        }
    raise ModelError(f"{path} scales its rotary embedding by {kind!r}, which is not supported from GGUF")


def _llama3_scaling(factors: np.ndarray) -> dict[str, Any]:
    """Llama 3's rope scaling, which a GGUF holds only as its outcome: what each frequency is divided by.

    The largest divisor is the factor; the other parameters are those of every published Llama 3.
    """
    return {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _scales_like(config: PreTrainedConfig, factors: np.ndarray) -> bool:
    """Whether the configuration divides the rotary frequencies by `factors`; other models run wrongly."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    halves = torch.arange(len(inv_freq)) / len(inv_freq)
    plain = config.rope_parameters["rope_theta"] ** -halves
    wanted = torch.tensor(factors, dtype=torch.float32)
    return wanted.shape == inv_freq.shape and torch.allclose(plain / inv_freq, wanted, rtol=1e-3)
