"""Rows of hidden states as bytes and back. The wire is fp32 or bf16, little-endian, row after row.

bf16 and not fp16: real hidden states come within a factor three of fp16's largest number.
"""

from __future__ import annotations

import torch

from routing.errors import ProtocolError
from swarm.frames import Codec

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the names that users give
DTYPES = {Codec.FP32: torch.float32, Codec.BF16: torch.bfloat16}


def lossless_codec(dtype: torch.dtype) -> Codec:
    """The codec that carries a compute dtype exactly."""
    return Codec.BF16 if dtype is torch.bfloat16 else Codec.FP32


def row_bytes(codec: Codec, hidden: int) -> int:
    return DTYPES[codec].itemsize * hidden


def encode_rows(rows: torch.Tensor, codec: Codec) -> memoryview:
    """[n, hidden] of any float dtype to bytes. Keeps the tensor alive; the caller must not write to it afterwards."""
    flat = rows.detach().to(device="cpu", dtype=DTYPES[codec]).contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def decode_rows(data: bytes | memoryview, codec: Codec, hidden: int) -> torch.Tensor:
    """Bytes to [n, hidden] in the codec's dtype. Raises ProtocolError if they are not whole rows."""
    if codec not in DTYPES:
        raise ProtocolError(f"rows without a codec ({codec.name})")
    size = row_bytes(codec, hidden)
    if len(data) == 0 or len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are not rows of {size} bytes")
    return torch.frombuffer(bytearray(data), dtype=DTYPES[codec]).view(-1, hidden)
