"""Owns reading parts of weight files: safetensors headers, tensors, digests of ranges. Knows no model.

Bytes are read by offset, not mapped. The system refuses a private mapping of a file larger than memory (so
`safetensors.safe_open` fails), and when a mapped file shrinks the process is killed instead of seeing an
error.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from routing.errors import DamagedWeights, ModelError, ModelNotFound

READ_BYTES = 8 * 2**20
HEADER_LIMIT = 100 * 2**20  # the format's own limit

# https://github.com/huggingface/safetensors#format
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where one tensor lies: `nbytes` bytes at `offset` of `file`, in a dtype as safetensors names it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(file: Path) -> dict[str, Stored]:
    """Every tensor's place, checked against the file's size. Raises DamagedWeights, ModelNotFound.

    Format: u64 little-endian length, JSON of that length, then the data.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise DamagedWeights(f"{file} is damaged: its header does not fit its {size} bytes")
            entries = json.loads(stream.read(length))
    except FileNotFoundError:
        raise ModelNotFound(f"the weights file {file} is missing") from None
    except OSError as error:
        raise DamagedWeights(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedWeights(f"{file} is damaged: its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise DamagedWeights(f"{file} is damaged: its header is not a table of tensors")
    entries.pop("__metadata__", None)
    stored = {name: _stored(file, name, entry, 8 + length) for name, entry in entries.items()}
    end = max((tensor.offset + tensor.nbytes for tensor in stored.values()), default=8 + length)
    if size < end:
        raise DamagedWeights(f"{file} is truncated: it has {size} bytes, its header promises {end}")
    return stored


def _stored(file: Path, name: str, entry: Any, data_start: int) -> Stored:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedWeights(f"{file} is damaged: the header's entry of {name} is not readable") from None
    if dtype not in SAFETENSORS_DTYPES:
        raise ModelError(f"{file} stores {name} as {dtype}, which is not supported")
    nbytes = math.prod(shape) * SAFETENSORS_DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes:
        raise DamagedWeights(f"{file} is damaged: the header's entry of {name} contradicts itself")
    return Stored(file=file, dtype=dtype, shape=shape, offset=data_start + begin, nbytes=nbytes)


def read_tensor(stored: Stored) -> torch.Tensor:
    """The tensor as stored, in memory of its own. Raises DamagedWeights."""
    raw = read_range(stored.file, stored.offset, stored.nbytes)
    return raw.view(SAFETENSORS_DTYPES[stored.dtype]).view(stored.shape)


def read_range(file: Path, offset: int, nbytes: int) -> torch.Tensor:
    """`nbytes` bytes at `offset` as uint8. Raises DamagedWeights if the file ends before or fails."""
    raw = torch.empty(nbytes, dtype=torch.uint8)
    target = memoryview(raw.numpy().data)
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(offset)
            done = 0
            while done < nbytes:
                count = stream.readinto(target[done:])
                if not count:
                    raise _too_short(file, offset + nbytes)
                done += count
    except OSError as error:
        raise DamagedWeights(f"{file} cannot be read: {error.strerror}") from error
    return raw


def digest_of_range(file: Path, offset: int, nbytes: int) -> bytes:
    """BLAKE2b-256 of `nbytes` bytes at `offset`. Raises DamagedWeights if the file ends before or fails."""
    digest = hashlib.blake2b(digest_size=32)
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(offset)
            left = nbytes
            while left:
                piece = stream.read(min(left, READ_BYTES))
                if not piece:
                    raise _too_short(file, offset + nbytes)
                digest.update(piece)
                left -= len(piece)
    except OSError as error:
        raise DamagedWeights(f"{file} cannot be read: {error.strerror}") from error
    return digest.digest()


def _too_short(file: Path, end: int) -> DamagedWeights:
    return DamagedWeights(f"{file} is truncated: it ends before byte {end}")
