"""The manifest finds every wrong byte, and the fingerprint tells models, not copies, apart."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from routing.errors import DamagedWeights, ProtocolError, WrongModel
from swarm import manifest as manifest_module
from swarm.checkpoint import Checkpoint, open_checkpoint
from swarm.manifest import (
    DIGEST_BYTES,
    Manifest,
    build,
    check,
    config_hash,
    fingerprint,
    from_bytes,
    tensor_digest,
    to_bytes,
)
from tests.tiny import make_tiny

DIGEST = st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("base"), max_shard_size="150KB")


@pytest.fixture
def copy(base, tmp_path) -> Path:
    return shutil.copytree(base, tmp_path / "copy")


@pytest.fixture(scope="module")
def of_base(base, tmp_path_factory) -> Manifest:
    return build(open_model(base, tmp_path_factory.mktemp("cache")))


def open_model(folder: Path, cache: Path | None = None) -> Checkpoint:
    return open_checkpoint(str(folder), cache_dir=cache or folder / "cache")


def flip_a_bit(opened: Checkpoint, name: str) -> None:
    """Changes one bit of the named tensor on disk."""
    stored = opened._stored(name)[1]
    with stored.file.open("r+b") as file:
        file.seek(stored.offset + stored.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def test_two_copies_have_one_fingerprint_also_through_the_wire(copy, of_base):
    other = build(open_model(copy))
    assert fingerprint(other) == fingerprint(of_base) and len(fingerprint(other)) == 32
    assert from_bytes(to_bytes(of_base)) == of_base
    assert fingerprint(from_bytes(to_bytes(of_base))) == fingerprint(of_base)


def test_how_the_shards_are_cut_makes_no_other_model(base, of_base, tmp_path):
    folder = make_tiny("llama", tmp_path)
    assert len(list(folder.glob("*.safetensors"))) < len(list(base.glob("*.safetensors")))
    assert fingerprint(build(open_model(folder))) == fingerprint(of_base)


def test_a_sound_copy_passes_block_by_block(copy, of_base):
    opened = open_model(copy)
    for block in range(4):
        check(opened, [name for name in opened.tensor_names() if f".layers.{block}." in name], of_base)
    check(opened, opened.tensor_names(), of_base)


def test_one_wrong_bit_is_found_and_named(copy, of_base):
    opened = open_model(copy)
    name = "model.layers.2.mlp.down_proj.weight"
    others = opened.tensor_names() - {name}
    flip_a_bit(opened, name)
    again = open_model(copy)
    check(again, others, of_base)
    with pytest.raises(DamagedWeights, match=r"model\.layers\.2\.mlp\.down_proj\.weight in .*\.safetensors") as caught:
        check(again, [name], of_base)
    assert again.file_of(name).name in str(caught.value)


def test_the_same_bytes_read_in_another_way_are_another_tensor(tmp_path):
    weight = torch.randn(4, 6).to(torch.bfloat16)
    digests = []
    for number, tensor in enumerate((weight, weight.view(6, 4), weight.view(torch.float16))):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"w": tensor.contiguous()}, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        opened = open_model(folder)
        digests.append((opened.raw_digest("w"), tensor_digest(opened, "w")))
    assert len({raw for raw, _ in digests}) == 1 and len({digest for _, digest in digests}) == 3


def test_a_fine_tune_is_another_swarm_and_its_weights_do_not_pass(copy, of_base):
    shard = next(copy.glob("*.safetensors"))
    tensors = load_file(shard)
    name = next(iter(tensors))
    tensors[name] = tensors[name] * 1.001
    save_file(tensors, shard, metadata={"format": "pt"})
    tuned = open_model(copy)
    assert fingerprint(build(tuned)) != fingerprint(of_base)
    with pytest.raises(DamagedWeights, match="another version"):
        check(tuned, [name], of_base)


def test_another_configuration_or_set_of_tensors_is_another_model(copy, of_base):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    other = open_model(copy)
    assert fingerprint(build(other)) != fingerprint(of_base)
    with pytest.raises(WrongModel, match="configuration"):
        check(other, ["model.norm.weight"], of_base)
    (copy / "config.json").write_text(json.dumps(config))
    fewer = Manifest(config_hash=of_base.config_hash, tensors={"model.norm.weight": bytes(32)})
    with pytest.raises(WrongModel, match=r"lm_head\.weight, which the swarm's model has not"):
        check(open_model(copy), ["lm_head.weight"], fewer)


def test_a_gguf_and_the_safetensors_made_from_it_are_two_swarms(tmp_path):
    """What goes in are the bytes as stored, not the numbers that they stand for."""
    gguf_model = open_checkpoint("smollm2", cache_dir=tmp_path / "cache")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(gguf_model.load([name]), tmp_path / "model.safetensors")
    gguf_model.config.save_pretrained(tmp_path)
    converted = open_model(tmp_path)
    assert torch.equal(converted.load([name])[name], gguf_model.load([name])[name])
    assert config_hash(converted.config) == config_hash(gguf_model.config)
    assert tensor_digest(converted, name) != tensor_digest(gguf_model, name)


def test_the_configuration_counts_by_what_it_means(copy, of_base):
    path = copy / "config.json"
    config = json.loads(path.read_text())
    shuffled = dict(reversed(config.items()))
    shuffled |= {
        "transformers_version": "4.0.0",
        "_name_or_path": "/home/me/model",
        "torch_dtype": "bfloat16",
    }
    shuffled.pop("dtype", None)
    path.write_text(json.dumps(shuffled))
    assert config_hash(open_model(copy).config) == of_base.config_hash


def test_a_founder_with_a_truncated_file_is_told_which(copy):
    opened = open_model(copy)
    shard = opened.file_of("model.layers.3.mlp.up_proj.weight")
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1)
    with pytest.raises(DamagedWeights, match=shard.name):
        build(opened)


def test_it_is_computed_once_and_again_when_a_file_changes(copy, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    reports: list[tuple[str, int, int]] = []
    first = build(open_model(copy, cache), lambda *report: reports.append(report))
    total = sum(open_model(copy).nbytes(name) for name in first.tensors)
    assert reports[-1] == ("manifest", total, total)
    assert [done for _, done, _ in reports] == sorted({done for _, done, _ in reports})

    computed: list[str] = []
    real = manifest_module.tensor_digest
    monkeypatch.setattr(
        manifest_module, "tensor_digest", lambda opened, name: computed.append(name) or real(opened, name)
    )
    assert build(open_model(copy, cache)) == first and computed == []
    opened = open_model(copy, cache)
    flip_a_bit(opened, "model.norm.weight")
    changed = build(open_model(copy, cache))
    assert len(computed) == len(first.tensors)
    assert {name for name in first.tensors if changed.tensors[name] != first.tensors[name]} == {"model.norm.weight"}


def test_a_spoilt_or_unwritable_cache_does_no_harm(copy, tmp_path):
    cache = tmp_path / "cache"
    first = build(open_model(copy, cache))
    (entry,) = (cache / "manifests").iterdir()
    entry.write_bytes(b"\x94nonsense")
    assert build(open_model(copy, cache)) == first
    assert build(open_model(copy, cache)) == first
    (tmp_path / "file").write_text("in the way")
    assert build(open_model(copy, tmp_path / "file")) == first


@given(config=DIGEST, tensors=st.dictionaries(st.text(min_size=1, max_size=40), DIGEST, min_size=1, max_size=8))
def test_canonical_bytes(config, tensors):
    manifest = Manifest(config_hash=config, tensors=tensors)
    shuffled = Manifest(config_hash=config, tensors=dict(reversed(tensors.items())))
    data = to_bytes(manifest)
    assert to_bytes(shuffled) == data and from_bytes(data) == manifest


@given(data=st.binary(max_size=200))
def test_anything_else_is_refused_by_name(data):
    with pytest.raises(ProtocolError):
        from_bytes(data)


D = bytes(DIGEST_BYTES)


@pytest.mark.parametrize(
    "message",
    [
        [2, D, ["a"], D],  # version
        [1, D[:-1], ["a"], D],
        [1, D, ["a"], D + D],
        [1, D, ["a"], b""],
        [1, D, [], b""],
        [1, D, ["b", "a"], D + D],  # not sorted
        [1, D, ["a", "a"], D + D],
        [1, D, ["a" * 1000], D],
        [1, D, ["a"], D, "more"],
        [1, D, [b"a"], D],
        {"version": 1},
    ],
)
def test_manifests_that_are_not_canonical(message):
    with pytest.raises(ProtocolError):
        from_bytes(msgspec.msgpack.encode(message))
    from_bytes(msgspec.msgpack.encode([1, D, ["a"], D]))


def test_a_manifest_that_is_too_large(monkeypatch):
    data = to_bytes(Manifest(config_hash=D, tensors={"a": D}))
    monkeypatch.setattr(manifest_module, "MANIFEST_LIMIT", len(data) - 1)
    with pytest.raises(ProtocolError, match="over the limit"):
        from_bytes(data)
