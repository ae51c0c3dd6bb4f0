"""The allow-list: what is refused before anything is loaded, and the names each family stores its tensors under."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from routing.errors import BadInput, DamagedWeights, UnsupportedFamily
from swarm.checkpoint import open_checkpoint
from swarm.families import REFUSED, SUPPORTED, family_of, text_config
from tests.tiny import FAMILIES, LONGROPE, SMALL, make_tiny


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return open_checkpoint(str(make_tiny(request.param, tmp_path_factory.mktemp(request.param))))


@pytest.mark.parametrize("model_type", [*REFUSED, "olmo"])
def test_a_family_not_on_the_list_is_refused_by_name_and_where_known_with_the_reason(model_type):
    with pytest.raises(UnsupportedFamily, match=repr(model_type)) as refused:
        family_of(CONFIG_MAPPING[model_type]())
    assert REFUSED.get(model_type, "is not supported") in str(refused.value)
    assert all(name in refused.value.advice for name in SUPPORTED)


def test_no_family_is_both_supported_and_refused():
    assert not set(SUPPORTED) & set(REFUSED)


def test_longrope_is_for_families_whose_generate_computes_anew(tmp_path):
    assert family_of(open_checkpoint(str(make_tiny("phi3", tmp_path, **LONGROPE))).config).name == "phi3"


def test_every_family_listed_has_a_tiny_model_that_proves_it():
    assert set(SUPPORTED) == set(FAMILIES)


@pytest.mark.parametrize(
    ("model_type", "override", "named"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "longrope",
        ),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
                }
            },
            "dynamic",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("qwen3", {"is_causal": False}, "bidirectional"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
            "sliding layers without use_sliding_window",
        ),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic",
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_what_a_supported_family_may_not_use_is_refused_by_name(model_type, override, named):
    with pytest.raises(UnsupportedFamily, match=named):
        family_of(CONFIG_MAPPING[model_type](**SMALL, num_hidden_layers=2, **override))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    ],
)
def test_rope_that_depends_on_the_position_alone_is_supported(rope):
    assert family_of(CONFIG_MAPPING["llama"](**SMALL, rope_parameters=rope)).name == "llama"


def test_the_text_half_of_a_multimodal_gemma3_is_a_gemma3():
    config = CONFIG_MAPPING["gemma3"]()
    family = family_of(config)
    assert family.name == "gemma3_text"
    assert family.n_blocks(config) == config.text_config.num_hidden_layers
    assert text_config(config).model_type == "gemma3_text"


def test_mixtures_alone_are_stored_otherwise_than_the_modules_name_their_tensors():
    converted = {name for name in SUPPORTED if get_checkpoint_conversion_mapping(name)}
    assert converted == {name for name, family in SUPPORTED.items() if family.fused_experts}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [name for name, family in SUPPORTED.items() if not family.fused_experts])
def test_the_shapes_of_a_whole_model_are_those_of_the_library(family, tied):
    small = {**SMALL, "num_hidden_layers": 2, "tie_word_embeddings": tied}
    config, family = CONFIG_MAPPING[family](**small), SUPPORTED[family]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config).state_dict()
    head = theirs.pop(family.heads[-1])  # gpt_neox stores it under another name than its module has
    expected = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    assert family.shapes(config) == expected | ({} if tied else {family.heads[0]: tuple(head.shape)})


def test_blocks_and_client_together_need_every_stored_tensor_once(checkpoint):
    family, available = family_of(checkpoint.config), checkpoint.tensor_names()
    names = [*family.client_tensors(checkpoint.config, available).values()]
    for index in range(family.n_blocks(checkpoint.config)):
        names += family.block_tensors(checkpoint.config, index, available)
    assert len(names) == len(set(names))
    assert set(names) == set(available)


def test_assembled_tensors_are_those_of_the_library(checkpoint):
    family = family_of(checkpoint.config)
    names = family.block_tensors(checkpoint.config, 2, checkpoint.tensor_names())
    ours = family.assemble(checkpoint.config, 2, checkpoint.load(names))
    reference = checkpoint.reference_model().base_model
    theirs = reference.get_submodule(f"{family.layers}.2").state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_the_base_model_alone_is_understood(checkpoint):
    family, available = family_of(checkpoint.config), checkpoint.tensor_names()
    bare = frozenset(name.removeprefix(family.roots[0]) for name in available)
    for index in range(2):
        whole = family.block_tensors(checkpoint.config, index, available)
        expected = tuple(sorted(name.removeprefix(family.roots[0]) for name in whole))
        assert family.block_tensors(checkpoint.config, index, bare) == expected


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_names_of_a_multimodal_gemma3(root):
    config = CONFIG_MAPPING["gemma3_text"](**SMALL, num_hidden_layers=1)
    family = SUPPORTED["gemma3_text"]
    inside = family.build_block(config, 0).state_dict()
    names = frozenset(f"{root}{name}" for name in ["embed_tokens.weight", "norm.weight"]) | {
        "vision_tower.layers.0.weight",
        *(f"{root}layers.0.{name}" for name in inside),
    }
    assert len(family.block_tensors(config, 0, names)) == len(inside)
    assert family.client_tensors(config, names)["embed"] == f"{root}embed_tokens.weight"


def test_old_buffers_in_a_checkpoint_are_left_alone():
    config = CONFIG_MAPPING["gpt2"](**SMALL, num_hidden_layers=1)
    family = SUPPORTED["gpt2"]
    wanted = [f"h.0.{name}" for name in family.build_block(config, 0).state_dict()]
    stored = frozenset([*wanted, "wte.weight", "h.0.attn.bias", "h.0.attn.masked_bias"])
    assert family.block_tensors(config, 0, stored) == tuple(sorted(wanted))


def test_a_missing_tensor_is_named(checkpoint):
    family, available = family_of(checkpoint.config), checkpoint.tensor_names()
    lost = family.block_tensors(checkpoint.config, 1, available)[-1]
    with pytest.raises(DamagedWeights, match="of block 1"):
        family.block_tensors(checkpoint.config, 1, _without(family, available, lost))
    norm = family.client_tensors(checkpoint.config, available)["norm.weight"]
    with pytest.raises(DamagedWeights, match=norm):
        family.client_tensors(checkpoint.config, available - {norm})
    with pytest.raises(DamagedWeights):
        family.block_tensors(checkpoint.config, 1, frozenset({"something.else"}))


def _without(family, available, lost):
    """A fused tensor is missing only if all its parts are."""
    if ".experts." in lost:
        leaf = lost.rsplit(".", 2)[-2]
        return frozenset(name for name in available if ".1." not in name or f".{leaf}." not in name)
    return available - {lost}


def test_a_block_beyond_the_last_is_refused(checkpoint):
    family = family_of(checkpoint.config)
    with pytest.raises(BadInput, match="4"):
        family.block_tensors(checkpoint.config, 4, checkpoint.tensor_names())


def test_a_missing_expert_is_damage(tmp_path):
    checkpoint = open_checkpoint(str(make_tiny("mixtral", tmp_path)))
    family = family_of(checkpoint.config)
    stored = checkpoint.load(family.block_tensors(checkpoint.config, 0, checkpoint.tensor_names()))
    del stored[next(name for name in stored if ".experts.2.w1." in name)]
    with pytest.raises(DamagedWeights, match="experts of block 0"):
        family.assemble(checkpoint.config, 0, stored)
