"""A configuration that is kept is, to all who use it, the library's."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from peer.blocks import Loading
from routing.types import Span
from swarm.checkpoint import open_checkpoint, read_generation_config
from swarm.families import SUPPORTED, family_of
from swarm.manifest import config_hash
from swarm.plain_config import FOLDER, PlainConfig, config_of, suits
from tests.tiny import SMALL, make_tiny

OURS = [name for name, family in SUPPORTED.items() if family.own_layers]


def unread():
    raise AssertionError("the library was asked")


@pytest.mark.parametrize("family", OURS)
def test_a_kept_configuration_says_what_the_librarys_says(family, tmp_path):
    folder, cache = make_tiny(family, tmp_path / "model"), tmp_path / "cache"
    first, second = (open_checkpoint(str(folder), cache_dir=cache) for _ in range(2))
    library, kept = first.config, second.config
    assert isinstance(library, PreTrainedConfig) and isinstance(kept, PlainConfig)
    assert config_hash(kept) == config_hash(library)
    assert family_of(kept) is family_of(library)
    assert family_of(kept).shapes(kept) == family_of(kept).shapes(library)
    assert read_generation_config(tmp_path, kept).to_dict() == read_generation_config(tmp_path, library).to_dict()
    ours, theirs = (
        Loading(each, family_of(each.config), Span(1, 3), torch.float32).load_all() for each in (second, first)
    )
    for mine, expected in zip(ours.layers, theirs.layers, strict=True):
        assert all(torch.equal(mine.state_dict()[name], each) for name, each in expected.state_dict().items())
    assert ours.shape == theirs.shape


@pytest.mark.parametrize(
    "config",
    [
        CONFIG_MAPPING["gemma2"](**SMALL),
        CONFIG_MAPPING["llama"](**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        CONFIG_MAPPING["gemma3"](),
        CONFIG_MAPPING["opt"](),
    ],
    ids=lambda config: config.model_type,
)
def test_of_whom_code_of_the_library_is_needed_the_library_is_asked(config, tmp_path):
    assert not suits(config)
    assert config_of(b"source", tmp_path, lambda: config) is config
    assert not (tmp_path / FOLDER).exists()


def test_other_bytes_are_another_configuration(tmp_path):
    small, large = (CONFIG_MAPPING["llama"](**{**SMALL, "hidden_size": size}) for size in (64, 128))
    config_of(b"small", tmp_path, lambda: small)
    assert config_of(b"large", tmp_path, lambda: large).hidden_size == 128
    assert config_of(b"small", tmp_path, unread).hidden_size == 64


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"model_type": "no such"}', b"\xff"])
def test_a_damaged_one_is_read_anew(damage, tmp_path):
    config = CONFIG_MAPPING["llama"](**SMALL)
    config_of(b"source", tmp_path, lambda: config)
    (file,) = (tmp_path / FOLDER).iterdir()
    file.write_bytes(damage)
    assert config_of(b"source", tmp_path, lambda: config) is config
    assert config_of(b"source", tmp_path, unread).to_dict()["hidden_size"] == 64
