"""Owns reading a GGUF file as a checkpoint with transformers' names and layout.

Names come from gguf's map; the layout (llama's rotary halves are stored interleaved, gemma's norms off by
one) and the tokenizer from transformers' own GGUF support. Opening takes milliseconds; the tokenizer is
converted when first asked for, and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch

from routing.errors import DamagedWeights, ModelError, ModelNotFound
from swarm import disk_cache
from swarm.checkpoint import Checkpoint, with_eos_list
from swarm.families import family_of
from swarm.gguf_config import END_KEYS, ROPE_FACTORS, read_config
from swarm.plain_config import config_of
from swarm.tensor_file import digest_of_range, read_range

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

AS_THEY_LIE = ("qwen2", "qwen3")  # whose tensors have transformers' layout
CHUNK_BYTES = 4 * 2**20  # dequantized at a time, so that a large embedding is never whole in float32
WIDE_BYTES = 16 * 2**10  # of rows dequantized as one
# What a damaged header makes the two header readers raise.
HEADER_ERRORS = (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in the file. `shape` is in torch's order."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufCheckpoint(Checkpoint):
    """One `.gguf` file. A quantized tensor is dequantized when loaded."""

    def __init__(self, path: Path, *, cache_dir: Path, source: str | None = None):
        self.path = path
        self.source = source or str(path)
        self.cache_dir = cache_dir
        self._entries, self._header_bytes, self._metadata = read_header(path)
        if "token_embd.weight" not in self._entries:
            raise ModelError(f"{path} is no language model: it has no token_embd.weight")
        factors = b"" if (entry := self._entries.get(ROPE_FACTORS)) is None else self._bytes(entry)
        header = read_range(path, 0, self._header_bytes).numpy().tobytes()
        self.config = config_of(header + factors, cache_dir, self._read_config)

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._by_name)

    def load(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        wanted = sorted((self._entry(name).offset, name) for name in names)
        return {name: self._load(name, dtype or torch.float32) for _, name in wanted}

    def shape(self, name: str) -> tuple[int, ...]:
        self._entry(name)
        return self._by_name[name][1]

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def form(self, name: str) -> str:
        entry = self._entry(name)
        return f"{entry.kind.name} {'x'.join(map(str, entry.shape))}"

    def raw_digest(self, name: str) -> bytes:
        entry = self._entry(name)
        return digest_of_range(self.path, entry.offset, entry.nbytes)

    def file_of(self, name: str) -> Path:
        self._entry(name)
        return self.path

    def place(self, name: str) -> tuple[Path, int, int]:
        entry = self._entry(name)
        return self.path, entry.offset, entry.nbytes

    def heads(self) -> dict[Path, int]:
        factors = self._entries.get(ROPE_FACTORS)  # part of the configuration
        return {self.path: max(self._header_bytes, factors.offset + factors.nbytes if factors else 0)}

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Converted the first time (seconds, if merges must be derived), then read from the cache."""
        from transformers import PreTrainedTokenizerFast  # a peer has no use for it

        folder = self.cache_dir / "tokenizers" / self._tokenizer_key()
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer = self._convert_tokenizer()
        keep_folder(folder, partial(_save_tokenizer, tokenizer))
        return tokenizer

    def generation_config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        ends = (self._metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
        return with_eos_list(GenerationConfig.from_model_config(self.config.to_dict()), ends)

    def reference_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # takes long to import

        config = self._read_config()
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=self.load(self.tensor_names(), dtype),
            dtype=dtype,
            output_loading_info=True,
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        model.generation_config = self.generation_config()
        return model.eval()

    @property
    def _architecture(self) -> str:
        return self._metadata["general.architecture"]

    def _read_config(self) -> PreTrainedConfig:
        """By the library."""
        factors = self._entries.get(ROPE_FACTORS)
        return read_config(
            self.path,
            read_metadata(self.path),
            vocab_size=self._entries["token_embd.weight"].shape[0],
            tied="output.weight" not in self._entries,
            rope_factors=None if factors is None else self._stored(factors, torch.float32).numpy(),
        )

    def _in_our_layout(self, entry: Entry, weight: torch.Tensor) -> torch.Tensor:
        """A tensor as transformers has it, from how the file has it."""
        if self._architecture in AS_THEY_LIE or entry.name == "output.weight":  # gpt2's processor has its own way
            return weight
        if self._architecture == "llama":
            heads = {"attn_q": self.config.num_attention_heads, "attn_k": self.config.num_key_value_heads}
            count = heads.get(entry.name.split(".")[-2])
            return weight if count is None else _halves(weight, count)
        # The processors are written for numpy, but reshape, transpose and subtract alike in torch.
        return self._processor.process(weights=weight, name=entry.name).weights

    @cached_property
    def _processor(self) -> Any:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        return TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)(config={})

    @cached_property
    def _by_name(self) -> dict[str, tuple[Entry, tuple[int, ...]]]:
        """HF name -> where it is stored, and its shape there. Raises ModelError if any differ."""
        names = gguf.get_tensor_name_map(_arch_of(self._architecture), self.config.num_hidden_layers)
        found: dict[str, tuple[Entry, tuple[int, ...]]] = {}
        for name, shape in family_of(self.config).shapes(self.config).items():
            stem, dot, suffix = name.rpartition(".")
            stored_name = f"{names.get_name(stem)}{dot}{suffix}"
            if entry := self._entries.get(stored_name):
                if sorted(entry.shape) != sorted(shape):
                    raise ModelError(f"{self.path}: {stored_name} is {entry.shape}, {name} should be {shape}")
                found[name] = (entry, shape)
            else:
                raise ModelError(f"{self.path} lacks {stored_name}, which the model needs as {name}")
        strangers = self._entries.keys() - {entry.name for entry, _ in found.values()} - {ROPE_FACTORS}
        if strangers:
            raise ModelError(
                f"{self.path} holds tensors that transformers' {self.config.model_type} has no place for: "
                f"{', '.join(sorted(strangers)[:3])}",
                advice="Use the model as safetensors.",
            )
        return found

    def _entry(self, name: str) -> Entry:
        try:
            return self._by_name[name][0]
        except KeyError:
            raise ModelError(f"{self.source} holds no tensor {name}") from None

    def _load(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A vector is handled in float32, or gemma's norms would lose precision; a matrix is only moved."""
        entry, shape = self._by_name[name]
        weight = self._stored(entry, torch.float32 if len(entry.shape) == 1 else dtype)
        weight = self._in_our_layout(entry, weight)
        assert tuple(weight.shape) == shape, (name, weight.shape, shape)
        return weight.to(dtype).contiguous()

    def _stored(self, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in the file's layout, dequantized piece by piece."""
        rows = math.prod(entry.shape[:-1])
        row_bytes = entry.nbytes // rows
        step = max(1, CHUNK_BYTES // row_bytes)
        if rows <= step:
            return self._rows(entry, 0, rows).to(dtype).view(entry.shape)
        out = torch.empty((rows, entry.shape[-1]), dtype=dtype)
        for start in range(0, rows, step):
            out[start : start + step] = self._rows(entry, start, min(start + step, rows))
        return out.view(entry.shape)

    def _bytes(self, entry: Entry) -> bytes:
        return read_range(self.path, entry.offset, entry.nbytes).numpy().tobytes()

    def _rows(self, entry: Entry, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` in float32 [end - start, columns]."""
        count, row_bytes = end - start, entry.nbytes // math.prod(entry.shape[:-1])
        raw = read_range(self.path, entry.offset + start * row_bytes, count * row_bytes)
        # Some rows as one: gguf takes sixteen at a time, and short ones it takes longer to call than to compute.
        together = max(n for n in range(1, 1 + max(1, WIDE_BYTES // row_bytes)) if count % n == 0)
        try:
            values = gguf.dequantize(raw.numpy().reshape(count // together, together * row_bytes), entry.kind)
            return torch.from_numpy(values).view(count, -1)
        except NotImplementedError:
            raise ModelError(f"{self.path} stores {entry.name} as {entry.kind.name}, which cannot be read") from None

    def _tokenizer_key(self) -> str:
        """The tokenizer follows from the header and from the library that converts it."""
        digest = hashlib.blake2b(digest_size=16, key=version("transformers").encode())
        digest.update(digest_of_range(self.path, 0, self._header_bytes))
        return digest.hexdigest()

    def _convert_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import PreTrainedTokenizerFast

        # Not AutoTokenizer: it comes to the same, but first reads the header with gguf's slow reader (4 s).
        try:
            return PreTrainedTokenizerFast.from_pretrained(
                self.path.parent, gguf_file=self.path.name, local_files_only=True
            )
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise ModelNotFound(f"the tokenizer in {self.path} is not usable: {error}") from error


class _TensorTable(gguf.GGUFReader):
    """gguf's reader without the arrays of the metadata: the vocabulary alone costs it two seconds."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = memoryview(self.data.data)
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        at = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                at += 8 + struct.unpack_from("<Q", data, at)[0]
        else:
            at += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
        return at - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]


def read_header(path: Path) -> tuple[dict[str, Entry], int, dict[str, Any]]:
    """Tensors by their GGUF names, the bytes before them, the metadata without its arrays.

    Raises ModelNotFound (no GGUF file), DamagedWeights (truncated), ModelError (one part of several).
    """
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelNotFound(f"{path} is not a GGUF file")
        table = _TensorTable(path)
        metadata = {
            name: field.contents()
            for name, field in table.fields.items()
            if field.types and field.types[0] != gguf.GGUFValueType.ARRAY
        }
        if metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one of {metadata['split.count']} parts",
                advice="Merge the parts into one file with llama-gguf-split --merge.",
            )
        entries = {
            str(tensor.name): Entry(
                name=str(tensor.name),
                kind=tensor.tensor_type,
                shape=tuple(reversed(tensor.shape.tolist())),
                offset=int(tensor.data_offset),
                nbytes=int(tensor.n_bytes),
            )
            for tensor in table.tensors
        }
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
    except HEADER_ERRORS as error:
        raise DamagedWeights(f"{path} is truncated or damaged: {error}") from error
    return entries, int(table.data_offset), metadata


def read_metadata(path: Path) -> dict[str, Any]:
    """By the library's reader: arrays too, of strings the length alone. Raises DamagedWeights."""
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        return read_gguf_metadata(str(path))[0]
    except HEADER_ERRORS as error:
        raise DamagedWeights(f"{path} is truncated or damaged: {error}") from error


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """weight [heads x d, ...] whose rotary pairs are rows beside each other: they go d/2 rows apart."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def keep_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Makes `folder` by `fill(temporary folder)`, all or nothing; two processes may try at once.

    The cache is a convenience: where it cannot be written (a read-only home, a full disk), that is all that happens.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    except OSError as error:
        disk_cache.without(folder.parent, error)
        return
    try:
        fill(temporary)
        os.replace(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():  # else another process was first
            disk_cache.without(folder.parent, error)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raises OSError."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers has no other name for a disk that is full
        raise OSError(str(error)) from error


def _arch_of(architecture: str) -> Any:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
