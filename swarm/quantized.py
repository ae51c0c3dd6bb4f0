"""Weights of 8 or 4 bits as they lie in memory: packing, unpacking, what they take. Knows no layer.

A packed weight is bytes [outputs, row bytes], a row for itself, in groups of 32 inputs: scales (fp16), offsets (fp16),
codes, those of two groups side by side (the last pair is filled with zeros). weight = scale * code + offset:

int8  256 steps from the least to the largest value of a group; 9 bits a weight
int4  16 steps; 5 bits a weight; those of GGUF's Q4_1, so such a file's weights stay exact
nf4   the 16 codes of NF4 (QLoRA, appendix E, rounded to 127ths) times the largest size of a group; no offsets; 4.5 bits

`kernels/quantized.h` computes with them; without the kernels a weight is unpacked for each product, which is right and
slow.
"""

from __future__ import annotations

import torch

from routing.errors import BadInput
from swarm import native

NONE, INT8, INT4, NF4 = "none", "int8", "int4", "nf4"
QUANTIZATIONS = (INT8, INT4, NF4)  # that weights are packed in
GROUP = 32
PAIR = 2 * GROUP
PAIR_BYTES = {INT8: PAIR + 8, INT4: GROUP + 8, NF4: GROUP + 4}
LEVELS = {INT8: 255, INT4: 15}
NF4_CODES = (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
LEAST_SCALE = 2.0**-24  # of fp16; of a group whose values are all the same


def row_bytes(inputs: int, quantization: str) -> int:
    """What one output of a weight takes."""
    return -(-inputs // PAIR) * PAIR_BYTES[quantization]


def quantization_of(packed: torch.Tensor, inputs: int) -> str:
    """By the size of its rows. Raises BadInput if it is not one of a weight with so many inputs."""
    for quantization in QUANTIZATIONS:
        if packed.shape[1] == row_bytes(inputs, quantization):
            return quantization
    raise BadInput(f"rows of {packed.shape[1]} bytes do not hold {inputs} weights")


def pack(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """weight [outputs, inputs] -> bytes [outputs, row bytes]."""
    outputs, inputs = weight.shape
    groups = torch.nn.functional.pad(weight.float(), (0, -inputs % PAIR)).view(outputs, -1, GROUP)
    header: tuple[torch.Tensor, ...]
    if quantization == NF4:
        scales = (groups.abs().amax(-1) / NF4_CODES[-1]).clamp_min(LEAST_SCALE).half()
        steps = torch.tensor(NF4_CODES, dtype=torch.float32)
        codes = torch.bucketize((groups / scales.float()[..., None]).contiguous(), (steps[1:] + steps[:-1]) / 2)
        header = (scales,)
    else:
        least, levels = groups.amin(-1).half(), LEVELS[quantization]
        reach = groups.amax(-1) - least.float()
        scales = (reach / levels).clamp_min(LEAST_SCALE).half()
        # Of tiny weights fp16 has few digits: rather a larger step than values that are out of reach.
        short = reach - levels * scales.float() > scales.float() / 4
        scales = torch.where(short, scales.nextafter(torch.full_like(scales, torch.inf)), scales)
        codes = ((groups - least.float()[..., None]) / scales.float()[..., None]).round_().clamp_(0, levels)
        header = (scales, least)
    values = codes.to(torch.uint8).view(outputs, -1, 2, GROUP)
    if quantization != INT8:
        values = values[:, :, 0] | values[:, :, 1] << 4
    return torch.cat([*(part.view(torch.uint8) for part in header), values.reshape(outputs, -1)], 1)


def unpack(packed: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """bytes [outputs, row bytes] -> weight [outputs, inputs]. Raises BadInput."""
    kernels = native.kernels()
    if kernels is not None and packed.is_cpu and dtype in (torch.float32, torch.bfloat16):
        return kernels.widened(packed, inputs, torch.empty(0, dtype=dtype))  # type: ignore[no-any-return]
    quantization = quantization_of(packed, inputs)
    outputs, groups = len(packed), -(-inputs // PAIR) * 2
    header = groups * (2 if quantization == NF4 else 4)
    numbers = packed[:, :header].contiguous().view(torch.float16).float().view(outputs, -1, groups, 1)
    codes = packed[:, header:]
    if quantization != INT8:
        codes = codes.reshape(outputs, -1, 1, GROUP)
        codes = torch.cat([codes & 15, codes >> 4], 2)
    values = codes.reshape(outputs, groups, GROUP)
    if quantization == NF4:
        wide = torch.tensor(NF4_CODES, dtype=torch.float32)[values.long()] * numbers[:, 0]
    else:
        wide = values * numbers[:, 0] + numbers[:, 1]
    return wide.view(outputs, -1)[:, :inputs].to(dtype).contiguous()
