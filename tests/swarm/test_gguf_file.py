"""A GGUF file gives the tensors, configuration, tokenizer and text that transformers itself gets from it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from routing.errors import DamagedWeights, ModelError, ModelNotFound, UnsupportedFamily
from swarm.checkpoint import open_checkpoint, packaged_model
from swarm.gguf_file import GgufCheckpoint, keep_folder, read_header
from tests.full_disk import full_disk
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> GgufCheckpoint:
    opened = open_checkpoint("smollm2", cache_dir=tmp_path_factory.mktemp("cache"))
    assert isinstance(opened, GgufCheckpoint)
    return opened


def tiny_for_gguf(family: str, **overrides) -> PreTrainedModel:
    """GGUF has no place for a pattern of windows other than the family's own."""
    if family.startswith("gemma"):
        overrides = {"layers": 6, "layer_types": None, **overrides}
    return tiny_model(family, **overrides)


def write_gguf(model: PreTrainedModel, path: Path, *, quantized: bool = False, **extra) -> Path:
    """Writes `model` as llama.cpp's converter does. `extra` are more metadata keys, with '__' for '.'.

    Layouts: convert_hf_to_gguf.py (llama's rotary halves interleaved, gemma's norms plus one, gpt2's weights
    transposed).
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    gpt2 = architecture == "gpt2"
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 4 * config.hidden_size if gpt2 else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
    }
    if gpt2:
        metadata["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        rope = config.rope_parameters
        metadata |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        }
        if config.model_type == "llama":
            metadata["rope.dimension_count"] = config.head_dim
        elif config.model_type != "qwen2":
            metadata["attention.key_length"] = config.head_dim
        if getattr(config, "sliding_window", None):
            metadata["attention.sliding_window"] = config.sliding_window
    metadata |= {key.replace("__", "."): value for key, value in extra.items()}

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, value)
    tokenizer = tiny_tokenizer()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(range(VOCAB)))
    writer.add_token_types([3] * 4 + [1] * 256)
    writer.add_token_scores([0.0] * VOCAB)  # no merges: one token a byte
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_chat_template(tokenizer.chat_template)

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{suffix}"
        data = tensor.numpy()
        if architecture == "llama" and (".attn_q." in stored or ".attn_k." in stored):
            heads = config.num_attention_heads if ".attn_q." in stored else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if architecture.startswith("gemma") and stored.endswith("norm.weight"):
            data = data + 1
        if gpt2 and data.ndim == 2 and ".h." in name:
            data = data.T
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def open_gguf(path: Path) -> GgufCheckpoint:
    opened = open_checkpoint(str(path), cache_dir=path.parent / "cache")
    assert isinstance(opened, GgufCheckpoint)
    return opened


def read_by_transformers(path: Path, opened: GgufCheckpoint) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and configuration keys by transformers' own loader (`from_pretrained` needs one more package).

    The loader builds its map of names anew for every submodule it is shown, so none are shown.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(opened.config)
    flat = SimpleNamespace(config=model.config, state_dict=model.state_dict, named_children=lambda: [])
    parsed = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=flat)
    return parsed["tensors"], parsed["config"]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_family_written_as_gguf_comes_back_whole(family, tmp_path):
    model = tiny_for_gguf(family)
    opened = open_gguf(write_gguf(model, tmp_path / "tiny.gguf"))
    state = model.state_dict()
    loaded = opened.load(opened.tensor_names())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert loaded.keys() == state.keys() - tied
    for name, tensor in loaded.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=2e-7)  # gemma's norms: plus and minus one
        assert opened.shape(name) == tuple(tensor.shape)
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        got, want = opened.reference_model()(ids).logits, model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_quantized_family_is_what_transformers_reads_from_it(family, tmp_path):
    path = write_gguf(tiny_for_gguf(family), tmp_path / "tiny.gguf", quantized=True)
    opened = open_gguf(path)
    theirs, _ = read_by_transformers(path, opened)
    for name, tensor in opened.load(opened.tensor_names()).items():
        assert torch.equal(tensor, theirs[name]), name
    kinds = {opened.form(name).split()[0] for name in opened.tensor_names()}
    assert kinds == {"Q8_0", "F32"}


def test_smollm2_is_in_every_tensor_what_transformers_reads(smollm2):
    theirs, config = read_by_transformers(packaged_model("smollm2"), smollm2)
    assert theirs.keys() == smollm2.tensor_names() and len(theirs) == 272
    for name, tensor in smollm2.load(theirs).items():
        assert torch.equal(tensor, theirs.pop(name)), name
    ours = smollm2.config.to_dict()
    expected = AutoConfig.for_model(**config).to_dict()
    assert {key: value for key, value in expected.items() if ours.get(key) != value} == {
        "_model_name_or_path": config["_model_name_or_path"]
    }


def test_smollm2_speaks_and_stops(smollm2):
    tokenizer = smollm2.tokenizer()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = smollm2.reference_model().generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    answer = tokenizer.decode(out[inputs["input_ids"].shape[1] :])
    assert "Paris" in answer and answer.endswith("<|im_end|>")
    assert smollm2.generation_config().eos_token_id == [tokenizer.convert_tokens_to_ids("<|im_end|>")] == [2]
    assert smollm2.generation_config().pad_token_id == 2


TEXT = "Hello  wörld <|im_start|>user\n12345 don't <|im_end|>\t\N{GRINNING FACE}"


def test_the_tokenizer_is_that_of_transformers_and_then_comes_from_the_cache(tmp_path, monkeypatch):
    path = write_gguf(tiny_for_gguf("llama", layers=1), tmp_path / "tiny.gguf")
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    opened = open_gguf(path)
    first = opened.tokenizer()
    monkeypatch.setattr(GgufCheckpoint, "_convert_tokenizer", lambda self: pytest.fail("converted again"))
    for tokenizer in (first, opened.tokenizer()):
        assert tokenizer(TEXT).input_ids == theirs(TEXT).input_ids
        assert tokenizer.special_tokens_map == theirs.special_tokens_map
        assert tokenizer.chat_template == theirs.chat_template == tiny_tokenizer().chat_template
        assert tokenizer.decode(tokenizer(TEXT).input_ids) == theirs.decode(theirs(TEXT).input_ids) == TEXT
        assert tokenizer.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


def test_smollm2_tokenizer(smollm2):
    """The ids are those that AutoTokenizer gives with transformers 5.24; it takes 4 seconds for it."""
    for tokenizer in (smollm2.tokenizer(), smollm2.tokenizer()):
        ids = tokenizer("Hello  wörld <|im_start|>user\n12345 don't").input_ids
        assert ids == [19556, 216, 267, 29989, 400, 216, 1, 4093, 198, 33, 34, 35, 36, 37, 1326, 982]
        assert tokenizer.decode(tokenizer(TEXT).input_ids) == TEXT
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_a_tokenizer_without_a_cache_that_can_be_written(tmp_path):
    path = write_gguf(tiny_for_gguf("llama", layers=1), tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    opened = open_checkpoint(str(path), cache_dir=tmp_path / "file")
    assert opened.tokenizer()("hé").input_ids == tiny_tokenizer()("hé").input_ids
    assert opened.generation_config().eos_token_id == [2, 0], "end of sequence, end of turn"


def test_a_tokenizer_on_a_full_disk(tmp_path):
    path = write_gguf(tiny_for_gguf("llama", layers=1), tmp_path / "tiny.gguf")
    opened = open_checkpoint(str(path), cache_dir=tmp_path / "cache")
    with full_disk():
        assert opened.tokenizer()("hé").input_ids == tiny_tokenizer()("hé").input_ids
    assert not list((tmp_path / "cache" / "tokenizers").iterdir()), "it is not filled further"


def test_of_two_that_fill_the_cache_at_once_one_wins(tmp_path):
    def fill(folder: Path) -> None:
        keep_folder(tmp_path / "entry", lambda other: (other / "x").write_text("first"))
        (folder / "x").write_text("second")

    keep_folder(tmp_path / "entry", fill)
    assert (tmp_path / "entry" / "x").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"], "nothing is left behind"


def test_a_tensor_is_dequantized_in_pieces_and_kept_in_the_dtype_asked(smollm2, monkeypatch):
    whole = smollm2.load(["model.layers.3.self_attn.q_proj.weight", "model.norm.weight"])
    monkeypatch.setattr("swarm.gguf_file.CHUNK_BYTES", 5000)
    pieces = smollm2.load(whole)
    half = smollm2.load(whole, torch.bfloat16)
    for name, tensor in whole.items():
        assert torch.equal(pieces[name], tensor)
        assert torch.equal(half[name], tensor.to(torch.bfloat16))


def test_only_the_tensors_asked_for_are_read(smollm2, monkeypatch):
    read = []
    real = smollm2._rows
    monkeypatch.setattr(smollm2, "_rows", lambda entry, *rows: read.append(entry.name) or real(entry, *rows))
    smollm2.load(["model.layers.7.mlp.up_proj.weight"])
    assert read == ["blk.7.ffn_up.weight"]


def test_the_header_agrees_with_ggufs_own_reader(tmp_path):
    path = write_gguf(tiny_for_gguf("qwen3"), tmp_path / "tiny.gguf", quantized=True)
    entries, header_bytes, metadata = read_header(path)
    theirs = gguf.GGUFReader(path)
    assert header_bytes == theirs.data_offset == min(entry.offset for entry in entries.values())
    assert {entry.name: (entry.offset, entry.nbytes, entry.kind) for entry in entries.values()} == {
        tensor.name: (tensor.data_offset, tensor.n_bytes, tensor.tensor_type) for tensor in theirs.tensors
    }
    assert metadata["qwen3.block_count"] == theirs.fields["qwen3.block_count"].contents()


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def add_rope_factors(source: Path, target: Path, factors: np.ndarray) -> Path:
    """A copy of the file with the tensor that llama.cpp's converter adds for Llama 3."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_llama3_rope_scaling_which_transformers_would_drop_in_silence(tmp_path):
    model = tiny_for_gguf("llama", rope_parameters=LLAMA3, max_position_embeddings=65536)
    plain = write_gguf(model, tmp_path / "plain.gguf")
    factors = (1 / 500000.0 ** (np.arange(8) / 8)) / model.model.rotary_emb.inv_freq.numpy()
    opened = open_gguf(add_rope_factors(plain, tmp_path / "llama3.gguf", factors))
    assert opened.config.rope_parameters["rope_type"] == "llama3"
    assert opened.config.rope_parameters["factor"] == pytest.approx(32, rel=1e-4)
    ids, places = torch.arange(10, 40)[None], 700 * torch.arange(30)[None]
    with torch.no_grad():
        want = model(ids, position_ids=places).logits
        got = opened.reference_model()(ids, position_ids=places).logits
        other = open_gguf(plain).reference_model()(ids, position_ids=places).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert (other - want).abs().max() > 0.1, "the scaling matters at these positions"
    unknown = add_rope_factors(plain, tmp_path / "unknown.gguf", factors * np.linspace(1, 2, 8))
    with pytest.raises(ModelError, match="not known"):
        open_gguf(unknown)


@pytest.mark.parametrize(
    ("family", "extra", "expected"),
    [
        ("llama", {"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            "qwen2",
            {"kind": "yarn", "factor": 4.0, "original": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_other_rope_scaling_is_taken_over(family, extra, expected, tmp_path):
    keys = {"rope__scaling__type": extra["kind"], "rope__scaling__factor": extra["factor"]}
    if "original" in extra:
        keys["rope__scaling__original_context_length"] = extra["original"]
    opened = open_gguf(write_gguf(tiny_for_gguf(family), tmp_path / "tiny.gguf", **keys))
    assert {key: opened.config.rope_parameters[key] for key in expected} == expected


def test_gemma3_scales_only_its_full_attention(tmp_path):
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    config = open_gguf(write_gguf(tiny_for_gguf("gemma3_text"), tmp_path / "tiny.gguf", **keys)).config
    assert config.rope_parameters["full_attention"]["rope_type"] == "linear"
    assert config.rope_parameters["full_attention"]["factor"] == 8.0
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_gemmas_attention_scale_follows_its_size(tmp_path):
    small = open_gguf(write_gguf(tiny_for_gguf("gemma2"), tmp_path / "small.gguf")).config
    assert small.query_pre_attn_scalar == small.head_dim == 16
    wide = tiny_for_gguf("gemma2", layers=46, num_attention_heads=2, num_key_value_heads=1)
    assert open_gguf(write_gguf(wide, tmp_path / "large.gguf")).config.query_pre_attn_scalar == 32


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"rope__scaling__type": "longrope"}, ModelError, "longrope"),
        ({"expert_count": 8}, UnsupportedFamily, "mixture of experts"),
        ({"embedding_length": 32}, ModelError, "should be"),
        ({"block_count": 3}, ModelError, r"no place for: blk\.3"),
        ({"block_count": 5}, ModelError, r"lacks blk\.4"),
        ({"rope__scaling__type": "linear"}, DamagedWeights, r"lacks .*rope\.scaling\.factor"),
    ],
)
def test_a_file_that_would_run_wrongly_is_refused(extra, error, message, tmp_path):
    path = write_gguf(tiny_for_gguf("llama"), tmp_path / "tiny.gguf", **extra)
    with pytest.raises(error, match=message):
        open_gguf(path).tensor_names()


def test_an_architecture_that_is_not_covered_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "falcon")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedFamily, match=r"'falcon'.*llama"):
        open_gguf(tmp_path / "x.gguf")


def test_no_gguf_and_one_part_of_several(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelNotFound, match="not a GGUF file"):
        open_gguf(tmp_path / "x.gguf")
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="one of 3 parts"):
        open_gguf(tmp_path / "part.gguf")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.02, 0.5, 0.999999])
def test_a_truncated_file_is_named(share, tmp_path):
    path = write_gguf(tiny_for_gguf("llama"), tmp_path / "tiny.gguf")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(max(16, int(size * share)))
    with pytest.raises(DamagedWeights, match=r"tiny\.gguf"):
        open_gguf(path)


def test_a_damaged_header_gives_a_named_error(tmp_path):
    path = write_gguf(tiny_for_gguf("llama", layers=1), tmp_path / "tiny.gguf")
    good = path.read_bytes()
    bad_path = tmp_path / "bad.gguf"
    generator = np.random.default_rng(0)
    _, header_bytes, _ = read_header(path)
    refused = 0
    for _ in range(60):
        bad = bytearray(good)
        for place in generator.integers(4, header_bytes, 8):
            bad[place] = generator.integers(0, 256)
        bad_path.write_bytes(bad)
        try:
            open_gguf(bad_path).tensor_names()
        except (ModelError, DamagedWeights):
            refused += 1
    assert refused > 30
    bad_path.write_bytes(good[:8] + struct.pack("<Q", 2**62) + good[16:])
    with pytest.raises(DamagedWeights):
        open_gguf(bad_path)


def test_a_file_that_shrinks_after_it_was_opened_is_named(tmp_path):
    path = write_gguf(tiny_for_gguf("llama"), tmp_path / "tiny.gguf")
    opened = open_gguf(path)
    name = max(opened.tensor_names(), key=lambda name: opened._by_name[name][0].offset)
    shutil.copy(path, tmp_path / "kept")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(DamagedWeights, match=r"tiny\.gguf"):
        opened.load([name])
    with pytest.raises(ModelError, match="no tensor ghost"):
        opened.load(["ghost"])
