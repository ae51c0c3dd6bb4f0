"""Owns the manifest: the configuration and bytes that make a model, and the fingerprint that names its swarm.

Whoever begins a swarm has the whole checkpoint and builds the manifest once; whoever joins gets it from a
peer, compares its fingerprint with the join code, and checks each tensor as it loads. A base model and its
fine-tune are two swarms, and so are a GGUF and the safetensors it was made from. Knows no network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from routing.errors import DamagedWeights, ProtocolError, WrongModel
from swarm import disk_cache
from swarm.checkpoint import Checkpoint
from swarm.progress import Progress, silent

VERSION = 1
DIGEST_BYTES = 32
MANIFEST_LIMIT = 32 * 2**20  # bytes; 50,000 tensors (a large mixture of experts) need about 5 MiB
NAME_LIMIT = 512
# Says nothing of what is computed: where a copy lies, who wrote it, in which dtype it would be loaded.
VOLATILE = frozenset(
    {
        "_name_or_path",
        "_commit_hash",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`tensors`: name to BLAKE2b-256 over how the tensor is stored (type, shape) and its bytes as stored."""

    config_hash: bytes
    tensors: Mapping[str, bytes]


class _Wire(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    version: int
    config_hash: bytes
    names: list[str]  # sorted
    digests: bytes  # one after the other, in the order of names


def fingerprint(manifest: Manifest) -> bytes:
    """32 bytes that name the swarm: BLAKE2b-256 of the manifest's canonical bytes."""
    return hashlib.blake2b(to_bytes(manifest), digest_size=32, person=b"swarm-manifest-1").digest()


def to_bytes(manifest: Manifest) -> bytes:
    """Canonical: equal manifests give equal bytes."""
    names = sorted(manifest.tensors)
    return msgspec.msgpack.encode(
        _Wire(
            version=VERSION,
            config_hash=manifest.config_hash,
            names=names,
            digests=b"".join(manifest.tensors[name] for name in names),
        )
    )


def from_bytes(data: bytes) -> Manifest:
    """A manifest from anyone. Raises ProtocolError unless it is canonical and within bounds."""
    if len(data) > MANIFEST_LIMIT:
        raise ProtocolError(f"a manifest of {len(data)} bytes is over the limit of {MANIFEST_LIMIT}")
    try:
        wire = msgspec.msgpack.decode(data, type=_Wire)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the manifest is not readable: {error}") from None
    if wire.version != VERSION:
        raise ProtocolError(f"the manifest is of version {wire.version}, this is version {VERSION}")
    if len(wire.config_hash) != DIGEST_BYTES or len(wire.digests) != DIGEST_BYTES * len(wire.names):
        raise ProtocolError("the manifest's digests are of a wrong length")
    if not wire.names or max(map(len, wire.names)) > NAME_LIMIT:
        raise ProtocolError("the manifest names no tensors, or absurdly long ones")
    pieces = (wire.digests[at : at + DIGEST_BYTES] for at in range(0, len(wire.digests), DIGEST_BYTES))
    manifest = Manifest(config_hash=wire.config_hash, tensors=dict(zip(wire.names, pieces, strict=True)))
    if to_bytes(manifest) != data:  # unsorted or repeated names, another way to write an integer
        raise ProtocolError("the manifest is not in canonical form")
    return manifest


def build(checkpoint: Checkpoint, progress: Progress | None = None) -> Manifest:
    """Reads the whole checkpoint once; then it is cached for as long as the files are untouched.

    Progress is in bytes. Raises DamagedWeights (truncated files).
    """
    report = progress or silent
    names = sorted(checkpoint.tensor_names())
    sizes = {name: checkpoint.nbytes(name) for name in names}  # a hub's checkpoint fetches what is missing
    cached = checkpoint.cache_dir / "manifests" / _files_key(checkpoint, names)
    manifest = _read_cached(cached)
    if manifest is not None:
        return manifest
    tensors: dict[str, bytes] = {}
    done, total = 0, sum(sizes.values())
    for name in sorted(names, key=lambda name: (checkpoint.file_of(name), name)):
        tensors[name] = tensor_digest(checkpoint, name)
        done += sizes[name]
        report("manifest", done, total)
    manifest = Manifest(config_hash=config_hash(checkpoint.config), tensors=tensors)
    disk_cache.keep(cached, to_bytes(manifest))
    return manifest


def check(checkpoint: Checkpoint, names: Iterable[str], manifest: Manifest) -> None:
    """Compares the named tensors, and the configuration, with the manifest.

    Raises WrongModel (another configuration, or a tensor that the swarm's model has not, or has in another
    form), DamagedWeights (other bytes: names the tensor and the file).
    """
    if config_hash(checkpoint.config) != manifest.config_hash:
        raise WrongModel(f"{checkpoint.source} has another configuration than the swarm's model")
    for name in names:
        if name not in manifest.tensors:
            raise WrongModel(f"{checkpoint.source} holds {name}, which the swarm's model has not")
        if tensor_digest(checkpoint, name) != manifest.tensors[name]:
            raise DamagedWeights(
                f"{name} in {checkpoint.file_of(name)} differs from the swarm's manifest: "
                "the file is damaged, or it is another version of the model"
            )


def tensor_digest(checkpoint: Checkpoint, name: str) -> bytes:
    """What a manifest says of one tensor: its bytes and how they are to be read."""
    return digest_as(checkpoint.raw_digest(name), checkpoint.form(name))


def digest_as(raw_digest: bytes, form: str) -> bytes:
    """The same from the parts, where the bytes are not in a checkpoint yet."""
    return hashlib.blake2b(raw_digest + form.encode(), digest_size=DIGEST_BYTES).digest()


def config_hash(config: Any) -> bytes:
    """BLAKE2b-256 of the configuration as sorted JSON, without what does not bear on the computation."""
    plain = msgspec.json.encode(_canonical(config.to_dict()), order="sorted")
    return hashlib.blake2b(plain, digest_size=DIGEST_BYTES).digest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _files_key(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """Changes when a file's path, size or time of change does, or the configuration."""
    digest = hashlib.blake2b(config_hash(checkpoint.config), digest_size=16)
    for file in sorted({checkpoint.file_of(name) for name in names}):
        status = file.stat()
        digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _read_cached(path: Path) -> Manifest | None:
    try:
        return from_bytes(path.read_bytes())
    except (OSError, ProtocolError):
        return None
