"""Owns the allow-list of model families: how each stores its tensors, builds a block, and counts positions.

A family is here only if a test proves it exact when packed (tests/peer/test_executor.py). Others may run
through the same seam and be silently wrong, so whatever is not listed is refused by name before anything is
loaded. Knows no attention, no cache and no network: `peer/` runs the blocks, `head.py` the embeddings and the
head.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from routing.errors import BadInput, DamagedWeights, UnsupportedFamily
from swarm import layers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.core_model_loading import WeightConverter, WeightRenaming

# Their frequencies depend on the position alone. Those of "dynamic" and "longrope" depend on the length of the whole
# sequence, which differs between the sessions of one pass: longrope's two regimes are kept apart (`short_context`).
STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

LLAMA_ROOTS = ("model.", "")  # with the head, or saved from the base model alone
MULTIMODAL_ROOTS = ("language_model.model.", "model.language_model.")  # older and newer layout


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of decoders.

    `config` is the text model's (`text_config`); names of tensors are the checkpoint's. `roots` are the
    prefixes under which checkpoints of this family store the decoder, the usual one first.
    """

    name: str  # the library's model_type
    classes: str  # prefix of the library's class names
    roots: tuple[str, ...] = LLAMA_ROOTS
    layers: str = "layers"
    block_class: str = "DecoderLayer"
    embed: str = "embed_tokens.weight"
    embed_scale_key: str | None = None  # the configuration's name for what embeddings are multiplied with
    scaled_embedding: bool = False  # embeddings are multiplied with the root of their size (gemma)
    longrope: bool = False  # the library's `generate` computes a sequence anew that outgrows the short regime
    position_embed: str | None = None  # learned positions are the client's, added to the embeddings
    position_offset: int = 0  # rows before that of position 0
    norm: str = "norm"
    norm_class: str | None = "RMSNorm"  # None: torch's own LayerNorm
    norm_eps_key: str | None = "rms_norm_eps"  # None: the default of `norm_class`
    heads: tuple[str, ...] = ("lm_head.weight",)  # names of an untied head, the usual one first
    head_bias: str | None = None
    logit_scale_key: str | None = None  # logits are multiplied with this
    logit_divisor_key: str | None = None  # or divided by this
    rotary_class: str | None = "RotaryEmbedding"
    rotary_per_layer_type: bool = False
    grouped_heads: bool = True
    own_layers: bool = False  # by swarm/layers.py, not by the library's code
    fused_experts: bool = False  # the library's modules hold experts together that are stored one by one

    # Shapes

    def n_blocks(self, config: PreTrainedConfig) -> int:
        return text_config(config).num_hidden_layers

    def head_shape(self, config: PreTrainedConfig) -> tuple[int, int]:
        """(KV heads, width of a head), the same for every block of the families here."""
        heads = config.num_attention_heads
        width = (getattr(config, "head_dim", None) if self.grouped_heads else None) or config.hidden_size // heads
        return (config.num_key_value_heads if self.grouped_heads else heads), width

    # Names in the checkpoint

    def root(self, available: Collection[str]) -> str:
        """The prefix under which this checkpoint stores the decoder. Raises DamagedWeights."""
        for root in self.roots:
            if root + self.embed in available:
                return root
        raise DamagedWeights(f"the checkpoint holds no {self.roots[0]}{self.embed}, which {self.name} needs")

    def block_tensors(self, config: PreTrainedConfig, index: int, available: Collection[str]) -> tuple[str, ...]:
        """The stored tensors that block `index` needs, sorted. Raises DamagedWeights if one is missing."""
        config = text_config(config)
        prefix = f"{self.root(available)}{self.layers}.{index}."
        wanted = _parameter_names(self, config, index)
        sources = {name: self._target(name.removeprefix(prefix))[0] for name in available if name.startswith(prefix)}
        missing = wanted - set(sources.values())
        if missing:
            raise DamagedWeights(
                f"the checkpoint lacks {prefix}{min(missing)} ({len(missing)} tensors of block {index})"
            )
        return tuple(sorted(name for name, target in sources.items() if target in wanted))

    def client_tensors(self, config: PreTrainedConfig, available: Collection[str]) -> dict[str, str]:
        """Role to stored name: "embed", "norm.weight", and where the family has them "norm.bias", "position",
        "head", "head.bias".

        A tied head has no entry: it is the embedding. Raises DamagedWeights if one is missing.
        """
        config = text_config(config)
        root = self.root(available)
        names = {"embed": root + self.embed, "norm.weight": f"{root}{self.norm}.weight"}
        if self.norm_class is None:
            names["norm.bias"] = f"{root}{self.norm}.bias"
        if self.position_embed:
            names["position"] = root + self.position_embed
        if not config.tie_word_embeddings:
            prefix = "language_model." if root == "language_model.model." else ""
            heads = [prefix + head for head in self.heads]
            names["head"] = next((head for head in heads if head in available), heads[0])
        if self.head_bias:
            names["head.bias"] = self.head_bias
        for name in names.values():
            if name not in available:
                raise DamagedWeights(f"the checkpoint lacks {name}")
        return names

    def shapes(self, config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor of a model, by the usual name, with its shape. Not for families with fused experts."""
        config = text_config(config)
        root, size = self.roots[0], (config.hidden_size,)
        shapes = {root + self.embed: (config.vocab_size, *size), f"{root}{self.norm}.weight": size}
        for index in range(self.n_blocks(config)):
            block = self.build_block(config, index).state_dict()
            shapes |= {f"{root}{self.layers}.{index}.{name}": tuple(each.shape) for name, each in block.items()}
        if self.norm_class is None:
            shapes[f"{root}{self.norm}.bias"] = size
        if self.position_embed:
            rows = config.max_position_embeddings + self.position_offset
            shapes[root + self.position_embed] = (rows, *size)
        if not config.tie_word_embeddings:
            shapes[self.heads[0]] = (config.vocab_size, *size)
        if self.head_bias:
            shapes[self.head_bias] = (config.vocab_size,)
        return shapes

    def assemble(
        self, config: PreTrainedConfig, index: int, stored: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The tensors of one block as its module names and shapes them.

        Most pass through. Experts, stored one by one, are fused as the library's own conversion mapping says;
        the fused copy is the only one that stays. Raises DamagedWeights if some are missing.
        """
        plain: dict[str, torch.Tensor] = {}
        fused: dict[str, WeightConverter] = {}
        for name in self._by_expert(stored):
            inside = name.split(f"{self.layers}.{index}.", 1)[1]
            target, converter, pattern = self._target(inside)
            if converter is None:
                plain[target] = stored[name]
            else:
                mine = fused.setdefault(target, deepcopy(converter))
                tensors: list[Any] = mine.collected_tensors[pattern]  # futures, or the tensors themselves
                tensors.append(stored[name])
        for target, converter in fused.items():
            try:
                converted = converter.convert(target, config=config)
            except (RuntimeError, ValueError) as error:
                raise DamagedWeights(f"the experts of block {index} do not fit together: {error}") from error
            plain.update({key: value[0] if isinstance(value, list) else value for key, value in converted.items()})
        return plain

    def _by_expert(self, names: Collection[str]) -> Collection[str]:
        """In the order of the experts, where there are some."""
        if not self.fused_experts:
            return names
        from transformers.core_model_loading import dot_natural_key

        return sorted(names, key=dot_natural_key)

    def _target(self, inside: str) -> tuple[str, WeightConverter | None, str]:
        """For a stored name within a block: the module's name, what fuses it, and by which pattern."""
        if not self.fused_experts:
            return inside, None, ""
        from transformers.core_model_loading import apply_converters, apply_renamings

        renamings, converters = _conversions(self.name)
        # The patterns begin with a dot.
        renamed, pattern = apply_converters(apply_renamings("." + inside, list(renamings)), list(converters))
        owner = next((c for c in converters if pattern in c.source_patterns), None) if pattern else None
        return renamed.removeprefix("."), owner, pattern or ""

    # Modules

    def build_block(self, config: PreTrainedConfig, index: int) -> torch.nn.Module:
        """The layer on the meta device, in eval mode. Its index decides windows and scales."""
        with torch.device("meta"):
            return self._class(self.block_class)(config, index).eval()

    def build_norm(self, config: PreTrainedConfig) -> torch.nn.Module:
        """The final norm on the meta device."""
        with torch.device("meta"):
            norm = self._class(self.norm_class) if self.norm_class else torch.nn.LayerNorm
            eps = {"eps": getattr(config, self.norm_eps_key)} if self.norm_eps_key else {}
            return norm(config.hidden_size, **eps).eval()

    def rotary(self, config: PreTrainedConfig) -> torch.nn.Module | None:
        """The rotary module with its frequencies computed (they are never stored), or None."""
        return self._class(self.rotary_class)(config) if self.rotary_class else None

    def rotary_kind(self, config: PreTrainedConfig, index: int) -> str | None:
        """Which rotary embedding block `index` takes; equal kinds are the same one. None: it takes none."""
        if self.rotary_class is None:
            return None
        return config.layer_types[index] if self.rotary_per_layer_type else ""

    def short_context(self, config: PreTrainedConfig) -> int | None:
        """The length beyond which all of a sequence takes longrope's long regime; None if the model has no regimes."""
        if "longrope" not in _rope_types(config):
            return None
        return int(config.rope_parameters["original_max_position_embeddings"])

    def rotary_tables(
        self, rotary: torch.nn.Module, kind: str, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [N, width] for `positions` [N], by the library's own code. With longrope, the greatest position
        decides the regime of all.
        """
        like = torch.empty(0, dtype=dtype, device=positions.device)
        cos, sin = rotary(like, positions[None], kind) if kind else rotary(like, positions[None])
        return cos[0], sin[0]

    def embed_scale(self, config: PreTrainedConfig, dtype: torch.dtype) -> float | None:
        """What embeddings of `dtype` are multiplied with."""
        if self.scaled_embedding:
            # Rounded as the library rounds it: in bf16 sqrt(3072) becomes 55.5.
            return torch.tensor(config.hidden_size**0.5).to(dtype).item()
        return getattr(config, self.embed_scale_key) if self.embed_scale_key else None

    def logit_scale(self, config: PreTrainedConfig) -> float | None:
        """What logits are multiplied with."""
        if self.logit_divisor_key:
            return 1.0 / getattr(config, self.logit_divisor_key)
        return getattr(config, self.logit_scale_key) if self.logit_scale_key else None

    def _class(self, suffix: str) -> Any:
        if self.own_layers:
            return getattr(layers, suffix)
        package = self.name.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
        return getattr(module, self.classes + suffix)


SUPPORTED: dict[str, Family] = {
    family.name: family
    for family in (
        Family(name="llama", classes="Llama", own_layers=True),
        Family(name="mistral", classes="Mistral", own_layers=True),
        Family(name="qwen2", classes="Qwen2", own_layers=True),
        Family(name="qwen3", classes="Qwen3", own_layers=True),
        Family(name="mixtral", classes="Mixtral", fused_experts=True),
        Family(name="qwen3_moe", classes="Qwen3Moe", fused_experts=True),
        Family(name="phi3", classes="Phi3", longrope=True),
        Family(
            name="granite",
            classes="Granite",
            embed_scale_key="embedding_multiplier",
            logit_divisor_key="logits_scaling",
        ),
        Family(name="olmo2", classes="Olmo2"),
        Family(name="olmo3", classes="Olmo3", rotary_per_layer_type=True),
        Family(name="starcoder2", classes="Starcoder2", norm_class=None, norm_eps_key="norm_epsilon"),
        Family(
            name="cohere",
            classes="Cohere",
            norm_class="LayerNorm",
            norm_eps_key="layer_norm_eps",
            logit_scale_key="logit_scale",
        ),
        Family(
            name="cohere2",
            classes="Cohere2",
            norm_class="LayerNorm",
            norm_eps_key="layer_norm_eps",
            logit_scale_key="logit_scale",
        ),
        Family(name="glm4", classes="Glm4"),
        Family(name="smollm3", classes="SmolLM3"),
        Family(name="ernie4_5", classes="Ernie4_5"),
        Family(name="exaone4", classes="Exaone4"),
        Family(name="hunyuan_v1_dense", classes="HunYuanDenseV1"),
        Family(name="gpt_oss", classes="GptOss"),
        Family(name="gemma", classes="Gemma", scaled_embedding=True),
        Family(name="gemma2", classes="Gemma2", scaled_embedding=True),
        Family(
            name="gemma3_text",
            classes="Gemma3",
            roots=LLAMA_ROOTS[:1] + MULTIMODAL_ROOTS + LLAMA_ROOTS[1:],
            rotary_per_layer_type=True,
            scaled_embedding=True,
        ),
        Family(
            name="phi",
            classes="Phi",
            norm="final_layernorm",
            norm_class=None,
            norm_eps_key="layer_norm_eps",
            head_bias="lm_head.bias",
        ),
        Family(
            name="gpt_neox",
            classes="GPTNeoX",
            roots=("gpt_neox.", ""),
            block_class="Layer",
            embed="embed_in.weight",
            norm="final_layer_norm",
            norm_class=None,
            norm_eps_key="layer_norm_eps",
            heads=("embed_out.weight", "lm_head.weight"),
            grouped_heads=False,
        ),
        Family(
            name="opt",
            classes="OPT",
            layers="decoder.layers",
            embed="decoder.embed_tokens.weight",
            position_embed="decoder.embed_positions.weight",
            position_offset=2,
            norm="decoder.final_layer_norm",
            norm_class=None,
            norm_eps_key=None,
            rotary_class=None,
            grouped_heads=False,
        ),
        Family(
            name="gpt2",
            classes="GPT2",
            roots=("transformer.", ""),
            layers="h",
            block_class="Block",
            embed="wte.weight",
            position_embed="wpe.weight",
            norm="ln_f",
            norm_class=None,
            norm_eps_key="layer_norm_epsilon",
            rotary_class=None,
            grouped_heads=False,
        ),
    )
}

# Families known not to run through the packed attention, and why, as the library's code has it.
REFUSED: dict[str, str] = {
    "bloom": "its attention adds position biases that the packed attention does not know",
    "deepseek_v3": "its values are of another width than its keys, which the packed cache does not know",
    "falcon": "its attention is its own code, which the packed attention cannot replace",
    "gptj": "its rotary embedding is a table that ends, and the packed tables grow beyond it",
    "minimax": "its linear attention keeps a running state instead of keys and values",
    "mpt": "its attention adds position biases that the packed attention does not know",
    "nemotron": "its layers do not tell their attention which session a row belongs to",
    "qwen3_next": "its linear attention keeps a running state instead of keys and values",
    "stablelm": "its layers do not tell their attention which session a row belongs to",
}


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the text decoder: of a multimodal gemma3 its text half, else all of it."""
    return config.text_config if config.model_type == "gemma3" else config


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a configuration. Raises UnsupportedFamily naming what is not supported, and what is."""
    inner = text_config(config)
    family = SUPPORTED.get(inner.model_type)
    if family is None:
        reason = f": {REFUSED[inner.model_type]}" if inner.model_type in REFUSED else ""
        raise UnsupportedFamily(
            f"the family {config.model_type!r} is not supported{reason}",
            advice=f"Supported are: {', '.join(sorted(SUPPORTED))}.",
        )
    for problem in _unsupported_features(family, inner):
        raise UnsupportedFamily(
            f"this {family.name} model uses {problem}, which is not supported",
            advice="Use a model of this family without it.",
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedFamily(
            f"this {family.name} checkpoint is stored quantized, which is not supported",
            advice="Use the unquantized checkpoint, or a GGUF file.",
        )
    return family


def _unsupported_features(family: Family, config: PreTrainedConfig) -> list[str]:
    known = STATIC_ROPE | ({"longrope"} if family.longrope else set())
    problems = [f"rope of type {kind!r}" for kind in _rope_types(config) if kind not in known]
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        problems.append("bidirectional attention")
    if getattr(config, "add_cross_attention", False):
        problems.append("cross attention")
    if not getattr(config, "do_layer_norm_before", True):
        problems.append("layer norms after attention (do_layer_norm_before is false)")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        problems.append("embeddings of another size than its blocks (word_embed_proj_dim)")
    if getattr(config, "_remove_final_layer_norm", False):
        problems.append("no final layer norm (_remove_final_layer_norm)")
    if not getattr(config, "layer_norm_elementwise_affine", True):
        problems.append("layer norms without weights (layer_norm_elementwise_affine is false)")
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windowed and not getattr(config, "use_sliding_window", True):  # smollm3: only its mask knows the window
        problems.append("sliding layers without use_sliding_window")
    return problems


def _rope_types(config: PreTrainedConfig) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    return sorted({str(entry.get("rope_type", "default")) for entry in by_layer_type or [parameters]})


@cache
def _conversions(model_type: str) -> tuple[tuple[WeightRenaming, ...], tuple[WeightConverter, ...]]:
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    transforms = get_checkpoint_conversion_mapping(model_type) or []
    renamings = tuple(transform for transform in transforms if isinstance(transform, WeightRenaming))
    converters = tuple(transform for transform in transforms if isinstance(transform, WeightConverter))
    return renamings, converters


def _parameter_names(family: Family, config: PreTrainedConfig, index: int) -> frozenset[str]:
    if not 0 <= index < family.n_blocks(config):
        raise BadInput(f"there is no block {index}: the model has {family.n_blocks(config)}")
    return frozenset(family.build_block(config, index).state_dict())
