"""Tiny random models of each family, saved as safetensors directories, sharp enough that attention matters.

With the library's own initialisation the attention of a random model is almost uniform, and a wrong mask,
position or cache would hardly show. Here weights are scaled so that attention logits deviate by about 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB = len(SPECIALS) + 256  # every byte is a token, so every id a random model emits is text
WINDOW = 8
EMBED_SHRINK = 8.0  # root of the hidden size: else tied gemma models only echo their last token

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gpt2": {},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "qwen3_moe": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    },
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "granite": {
        "embedding_multiplier": 1.3,  # not a number of bf16
        "logits_scaling": 4.0,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.25,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": WINDOW},
    "glm4": {},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layer_interval": 2},
    "ernie4_5": {},
    "exaone4": {"sliding_window": WINDOW},
    "hunyuan_v1_dense": {},
    "phi": {"qk_layernorm": True},
    "gpt_neox": {},
    "opt": {"ffn_dim": 128},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Overrides for phi3: sequences of more than 24 positions take other frequencies.
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    },
}
# Both kinds of layers, also in a shallow model.
ALTERNATING = ("gemma2", "gemma3_text", "olmo3", "cohere2", "exaone4", "gpt_oss")
QK_NORMS = ("q_norm", "k_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")
FAMILIES = tuple(EXTRA)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(
    family: str,
    folder: Path,
    *,
    layers: int = 4,
    seed: int = 0,
    sharp: bool = True,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = None,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Saves a model of `family` (one of FAMILIES) and returns `folder`.

    `max_shard_size` (for example "50KB") splits the weights and writes an index; `overrides` are keys of the
    configuration.
    """
    model = tiny_model(family, layers=layers, seed=seed, sharp=sharp, **overrides).to(dtype)
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_model(family: str, *, layers: int = 4, seed: int = 0, sharp: bool = True, **overrides: Any) -> PreTrainedModel:
    """The model itself, in float32 and eval mode."""
    settings = {**SMALL, "num_hidden_layers": layers, **EXTRA[family], **overrides}
    if family in ALTERNATING:
        kinds = ("sliding_attention", "full_attention")
        settings.setdefault("layer_types", [kinds[i % 2] for i in range(layers)])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).eval()
        if sharp:
            sharpen(model, family)
    return model


@torch.no_grad()
def sharpen(model: PreTrainedModel, family: str) -> None:
    """Random weights of a size at which attention is far from uniform, and no two tokens look alike."""
    gemma = family.startswith("gemma")  # norms multiply by 1 + weight, embeddings by the root of their size
    for name, weight in model.named_parameters():
        leaf = name.rsplit(".", 2)[-2]
        if name.endswith("bias"):
            weight.copy_(0.2 * torch.randn_like(weight))
        elif weight.ndim == 1 or leaf in QK_NORMS:
            gain = 0.75 if leaf in QK_NORMS else 0.0
            gain += EMBED_SHRINK - 1 if gemma and name == "model.norm.weight" else 0.0
            weight.copy_((0.0 if gemma else 1.0) + gain + 0.2 * torch.randn_like(weight))
        elif "emb" in name or leaf in ("wte", "wpe", "lm_head"):
            weight.copy_(0.5 * torch.randn_like(weight))
            if gemma:
                weight.div_(EMBED_SHRINK)
        else:
            inputs_first = family == "gpt2" or (family == "gpt_oss" and weight.ndim == 3)
            fan_in = weight.shape[-2 if inputs_first else -1]
            weight.copy_(1.75 / fan_in**0.5 * torch.randn_like(weight))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, the special tokens of ChatML, and its chat template."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[3],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
