"""Rows of hidden states as bytes and back, little-endian, row after row: fp32, bf16, or 8 bits.

bf16 and not fp16: real hidden states come within a factor three of fp16's largest number. In 8 bits a row is
`scales | channels | kept | steps`: for each group of 64 channels the size of a step (bf16), the 8 channels of greatest
magnitude (u16, ascending) and their values (bf16), and for every channel how many steps (int8; 0 for those 8). A few
channels of real hidden states are a hundred times the others, so that groups alone would round those to nothing; which
ones differs from row to row. Each row is written without regard to others: a position that is sent again, in whatever
chunk, is the same bytes.
"""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F

from routing.encoding import Encoding
from routing.errors import BadInput, ProtocolError
from swarm import native
from swarm.frames import Codec

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # by the names that users give
DTYPES = {Codec.FP32: torch.float32, Codec.BF16: torch.bfloat16}
GROUP, KEPT = 64, 8
MOST_WIDTH = 1 << 16  # a channel is a u16
TINY = torch.finfo(torch.float32).tiny
ERRORS = {Codec.FP32: 0.0, Codec.BF16: 2e-5, Codec.INT8: 2.4e-4}  # mean KL of the next token, real hidden states
INT8_VALUE_S = 5e-9  # writing and reading one value in 8 bits, where it was not measured; the other two are copies
MEASURED_ROWS, MEASURED_RUNS = 16, 3


def lossless_codec(dtype: torch.dtype) -> Codec:
    """The codec that carries a compute dtype exactly."""
    return Codec.BF16 if dtype is torch.bfloat16 else Codec.FP32


def name_of(codec: Codec) -> str:
    """For people."""
    return codec.name.lower()


def loses(codec: Codec, dtype: torch.dtype) -> bool:
    """Whether rows of that dtype come out otherwise than they went in."""
    return codec > lossless_codec(dtype)


def encodings(exact: Codec, hidden: int) -> list[Encoding]:
    """`exact`, and those that lose more, as the choice between them wants to know them."""
    return [
        Encoding(
            codec,
            row_bytes=row_bytes(codec, hidden),
            row_s=INT8_VALUE_S * hidden if codec is Codec.INT8 else 0.0,
            error=0.0 if codec is exact else ERRORS[codec],
            name=name_of(codec),
        )
        for codec in ERRORS
        if codec >= exact
    ]


def int8_value_s(hidden: int) -> float:
    """What writing and reading one value in 8 bits takes here, in seconds, measured on a chunk of rows so wide. Takes
    some milliseconds, without the kernels a hundred times as many."""
    rows, runs = torch.randn(MEASURED_ROWS, hidden, generator=torch.Generator().manual_seed(0)), []
    for _ in range(MEASURED_RUNS):
        begun = time.perf_counter()
        decode_rows(encode_rows(rows, Codec.INT8), Codec.INT8, hidden)
        runs.append(time.perf_counter() - begun)
    return min(runs) / rows.numel()


def row_bytes(codec: Codec, hidden: int) -> int:
    if codec is Codec.INT8:
        return 2 * -(-hidden // GROUP) + 4 * min(KEPT, hidden) + hidden
    return DTYPES[codec].itemsize * hidden


def encode_rows(rows: torch.Tensor, codec: Codec) -> memoryview:
    """[n, hidden] of any float dtype to bytes. Keeps the tensor alive; the caller must not write to it afterwards.

    Raises BadInput if a value cannot be written: in 8 bits, one that is not finite.
    """
    rows = rows.detach().to(device="cpu")
    data = _pack(rows) if codec is Codec.INT8 else rows.to(DTYPES[codec])
    return memoryview(data.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def decode_rows(data: bytes | memoryview, codec: Codec, hidden: int) -> torch.Tensor:
    """Bytes to [n, hidden] in the codec's dtype (8 bits: fp32). Raises ProtocolError if they are not whole rows, or, in
    8 bits, no encoder's."""
    if codec not in ERRORS:
        raise ProtocolError(f"rows without a codec ({codec.name})")
    size = row_bytes(codec, hidden)
    if len(data) == 0 or len(data) % size:
        raise ProtocolError(f"{len(data)} bytes are not rows of {size} bytes")
    if codec is Codec.INT8:
        return _unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, size), hidden)
    return torch.frombuffer(bytearray(data), dtype=DTYPES[codec]).view(-1, hidden)


def _pack(rows: torch.Tensor) -> torch.Tensor:
    hidden = rows.shape[1]
    if hidden > MOST_WIDTH:
        raise BadInput(f"rows of {hidden} values cannot be sent in 8 bits; {MOST_WIDTH} are the most")
    if (ops := native.kernels()) is not None:
        data = torch.empty(len(rows), row_bytes(Codec.INT8, hidden), dtype=torch.uint8)
        wide = rows if rows.dtype in (torch.float32, torch.bfloat16) else rows.float()
        if (bad := ops.pack_rows(wide.contiguous(), data)) >= 0:
            raise _not_finite(bad)
        return data
    return _pack_in_torch(rows.float())


def _pack_in_torch(rows: torch.Tensor) -> torch.Tensor:
    count, hidden = rows.shape
    if not (finite := rows.bfloat16().isfinite().all(1)).all():
        raise _not_finite(int((~finite).int().argmax()))
    channels = _greatest(rows.abs(), min(KEPT, hidden))
    kept = rows.gather(1, channels).bfloat16()
    groups = F.pad(rows.scatter(1, channels, 0.0), (0, -hidden % GROUP)).view(count, -1, GROUP)
    scales = (groups.abs().amax(2) / 127).bfloat16()
    scales = torch.where(scales.float() < TINY, torch.zeros_like(scales), scales)
    steps = torch.where(scales[..., None] > 0, groups / scales.float()[..., None], 0).round().to(torch.int8)
    parts = scales, channels.to(torch.uint16), kept, steps.view(count, -1)[:, :hidden].contiguous()
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def _greatest(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """The channels of the greatest in each row, of equal ones the first: [n, count], ascending."""
    least = sizes.topk(count, 1, sorted=True).values[:, -1:]
    above, tied = sizes > least, sizes == least
    chosen = above | (tied & (tied.cumsum(1) <= count - above.sum(1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(-1, count)


def _unpack(data: torch.Tensor, hidden: int) -> torch.Tensor:
    if (ops := native.kernels()) is None:
        return _unpack_in_torch(data, hidden)
    rows = torch.empty(len(data), hidden)
    if (bad := ops.unpack_rows(data, rows)) >= 0:
        raise _no_encoders(bad)
    return rows


def _unpack_in_torch(data: torch.Tensor, hidden: int) -> torch.Tensor:
    groups, kept = -(-hidden // GROUP), min(KEPT, hidden)
    sizes = [2 * groups, 2 * kept, 2 * kept, hidden]
    parts = [part.clone(memory_format=torch.contiguous_format) for part in data.split(sizes, 1)]  # aligned
    scales, values = parts[0].view(torch.bfloat16), parts[2].view(torch.bfloat16)
    channels = parts[1].view(torch.uint16).to(torch.int64)
    good = (scales.float() * 128).isfinite().all(1) & ~scales.signbit().any(1) & values.isfinite().all(1)
    good &= (channels.diff(dim=1) > 0).all(1) & (channels[:, -1] < hidden)
    if not good.all():
        raise _no_encoders(int((~good).int().argmax()))
    rows = parts[3].view(torch.int8).float() * scales.float().repeat_interleave(GROUP, 1)[:, :hidden]
    return rows.scatter(1, channels, values.float())


def _not_finite(row: int) -> BadInput:
    return BadInput(f"row {row} has values that are not finite, or not in bf16: they cannot be sent in 8 bits")


def _no_encoders(row: int) -> ProtocolError:
    return ProtocolError(f"row {row} is no row in 8 bits: its scales, or the values that it keeps, make no sense")
