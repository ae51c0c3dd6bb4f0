"""Owns reading a GGUF file as a checkpoint with transformers' names and layout. Knows no family's blocks.

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
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf import read_gguf_metadata
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from routing.errors import DamagedWeights, ModelError, ModelNotFound
from swarm import disk_cache
from swarm.checkpoint import Checkpoint, with_eos_list
from swarm.gguf_config import END_KEYS, ROPE_FACTORS, read_config
from swarm.tensor_file import digest_of_range, read_range

CHUNK_BYTES = 4 * 2**20  # dequantized at a time, so that a large embedding is never whole in float32
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
        embedding = self._entries.get("token_embd.weight")
        if embedding is None:
            raise ModelError(f"{path} is no language model: it has no token_embd.weight")
        factors = self._entries.get(ROPE_FACTORS)
        self.config = read_config(
            path,
            self._metadata,
            vocab_size=embedding.shape[0],
            tied="output.weight" not in self._entries,
            rope_factors=None if factors is None else self._stored(factors, torch.float32).numpy(),
        )
        processor = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)
        self._processor = processor(config=self._head_counts())

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
        folder = self.cache_dir / "tokenizers" / self._tokenizer_key()
        if (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        tokenizer = self._convert_tokenizer()
        keep_folder(folder, partial(_save_tokenizer, tokenizer))
        return tokenizer

    def generation_config(self) -> GenerationConfig:
        ends = (self._metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
        return with_eos_list(GenerationConfig.from_model_config(self.config), ends)

    def reference_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.config)]
        model, info = model_class.from_pretrained(
            None,
            config=self.config,
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

    def _head_counts(self) -> dict[str, Any]:
        heads = self.config.num_attention_heads
        return {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(self.config, "num_key_value_heads", None) or heads,
        }

    @cached_property
    def _by_name(self) -> dict[str, tuple[Entry, tuple[int, ...]]]:
        """HF name -> where it is stored, and its shape there. Raises ModelError if any differ."""
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(self.config).state_dict()
        names = gguf.get_tensor_name_map(_arch_of(self._architecture), self.config.num_hidden_layers)
        found: dict[str, tuple[Entry, tuple[int, ...]]] = {}
        for name, weight in expected.items():
            stem, dot, suffix = name.rpartition(".")
            stored_name = f"{names.get_name(stem)}{dot}{suffix}"
            if entry := self._entries.get(stored_name):
                shape = tuple(weight.shape)
                if sorted(entry.shape) != sorted(shape):
                    raise ModelError(f"{self.path}: {stored_name} is {entry.shape}, {name} should be {shape}")
                found[name] = (entry, shape)
            elif not (name == "lm_head.weight" and self.config.tie_word_embeddings):
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
        if entry.name != "output.weight":  # the gpt2 processor has its own, other way with it
            # The processors are written for numpy, but reshape, transpose and subtract alike in torch.
            weight = self._processor.process(weights=weight, name=entry.name).weights
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

    def _rows(self, entry: Entry, start: int, end: int) -> torch.Tensor:
        """Rows `[start, end)` in float32 [end - start, columns]."""
        row_bytes = entry.nbytes // math.prod(entry.shape[:-1])
        raw = read_range(self.path, entry.offset + start * row_bytes, (end - start) * row_bytes)
        try:
            return torch.from_numpy(gguf.dequantize(raw.numpy().reshape(end - start, row_bytes), entry.kind))
        except NotImplementedError:
            raise ModelError(f"{self.path} stores {entry.name} as {entry.kind.name}, which cannot be read") from None

    def _tokenizer_key(self) -> str:
        """The tokenizer follows from the header and from the library that converts it."""
        digest = hashlib.blake2b(digest_size=16, key=transformers.__version__.encode())
        digest.update(digest_of_range(self.path, 0, self._header_bytes))
        return digest.hexdigest()

    def _convert_tokenizer(self) -> PreTrainedTokenizerBase:
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
    """Tensors by their GGUF names, the bytes before them, the metadata (an array of strings as its length).

    Raises ModelNotFound (no GGUF file), DamagedWeights (truncated), ModelError (one part of several).
    """
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelNotFound(f"{path} is not a GGUF file")
        metadata, _ = read_gguf_metadata(str(path))
        if metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one of {metadata['split.count']} parts",
                advice="Merge the parts into one file with llama-gguf-split --merge.",
            )
        table = _TensorTable(path)
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
