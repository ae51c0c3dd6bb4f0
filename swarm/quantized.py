"""Weights of 8 or 4 bits as they lie in memory: packing, unpacking, what they take. Knows no layer.

A packed weight is bytes [outputs, row bytes], a row for itself, in groups of 32 inputs: scales (fp16), offsets (fp16),
codes, those of two groups side by side (the last pair is filled with zeros). weight = scale * code + offset:

int8  256 steps from the least to the largest value of a group; 9 bits a weight
int4  16 steps; 5 bits a weight; those of GGUF's Q4_1, so such a file's weights stay exact
nf4   the 16 codes of NF4 (QLoRA, appendix E, rounded to 127ths), which are not symmetrical, times the largest size of a
      group or that negated; no offsets; 4.5 bits

A few inputs of a layer are hundreds of times as large as the others (Dettmers et al., LLM.int8(), 2022; Sun et al.,
Massive Activations, 2024), and the error of their weights is most of a model's. So the grid of a group is laid such
that the weights of the one or two most important inputs are on it, and nf4's sign such that they are nearer to a code,
which takes neither bits nor time.

`kernels/quantized.h` computes with them; without the kernels a weight is unpacked for each product, strip by strip,
which is right and slow, or laid out for torch (`library_int4.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

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
# Of halves from -256 to 256, which code is the nearest: midway between two is always a whole number or a half.
_NF4_PLACES = torch.bucketize(torch.arange(-256, 257), torch.tensor([a + b for a, b in pairwise(NF4_CODES)]))
STANDS_OUT = 2  # times the mean importance of a group
# What these two codes in a byte stand for.
_NF4_PAIRS = torch.tensor([(NF4_CODES[byte & 15], NF4_CODES[byte >> 4]) for byte in range(256)], dtype=torch.float32)
PACKED_AT_ONCE = 256  # outputs: what is computed of them stays in a cache
UNPACKED_AT_ONCE = 1 << 18  # weights: the same
_Grid = tuple[torch.Tensor, torch.Tensor]  # scales and offsets, fp16 [outputs, groups]


def row_bytes(inputs: int, quantization: str) -> int:
    """What one output of a weight takes."""
    return -(-inputs // PAIR) * PAIR_BYTES[quantization]


def quantization_of(packed: torch.Tensor, inputs: int) -> str:
    """By the size of its rows. Raises BadInput if it is not one of a weight with so many inputs."""
    for quantization in QUANTIZATIONS:
        if packed.shape[1] == row_bytes(inputs, quantization):
            return quantization
    raise BadInput(f"rows of {packed.shape[1]} bytes do not hold {inputs} weights")


def pack(weight: torch.Tensor, quantization: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    """weight [outputs, inputs] -> bytes [outputs, row bytes]. `importance` [inputs]: what the squared error of an
    input's weights counts, in proportion; without it that is guessed.
    """
    counts = _grouped((guessed_importance(weight) if importance is None else importance)[None].float())[0]
    return torch.cat([_pack(rows, quantization, counts) for rows in weight.split(PACKED_AT_ONCE)])


def _pack(weight: torch.Tensor, quantization: str, importance: torch.Tensor) -> torch.Tensor:
    """`importance` [groups, GROUP]."""
    outputs = len(weight)
    groups = _grouped(weight.float())
    header: tuple[torch.Tensor, ...]
    if quantization == NF4:
        scales, codes = _nf4(groups, importance)
        header = (scales,)
    else:
        levels = LEVELS[quantization]
        header = _best_grid(groups, _grid(groups, levels), levels, importance)
        codes = _codes(groups, *header, levels)
    values = codes.to(torch.uint8).view(outputs, -1, 2, GROUP)
    if quantization != INT8:
        values = values[:, :, 0] | values[:, :, 1] << 4
    return torch.cat([*(part.view(torch.uint8) for part in header), values.reshape(outputs, -1)], 1)


def guessed_importance(weight: torch.Tensor) -> torch.Tensor:
    """[inputs] of a weight [outputs, inputs]: training leaves small weights to inputs that are large."""
    # In fp64 no two machines sum up so differently that they choose other inputs.
    return 1 / weight.float().square().sum(0, dtype=torch.float64).clamp_min(1e-12)


def importance_after(before: torch.Tensor) -> torch.Tensor:
    """[inputs] of a weight whose inputs are products of what weights [factors, inputs, anything] give: what is large
    there has large weights before it.
    """
    return torch.linalg.vector_norm(before, dim=2, dtype=torch.float64).square().prod(0)


def _grid(groups: torch.Tensor, levels: int, *upon: torch.Tensor) -> _Grid:
    """Scales and offsets (fp16) [outputs, groups] that reach all values; such that `upon`, up to two values of each
    group, are met but for the rounding of fp16.
    """
    least, most = groups.amin(-1), groups.amax(-1)
    if not upon:
        offsets = least.half()
        return _scales(most - offsets.float(), levels), offsets
    scales = _scales(most - least, levels - 1)  # the grid is moved by up to a step
    first = upon[0]
    if len(upon) == 2:
        apart = (first - upon[1]).abs()
        steps = (apart / scales.float()).floor()
        scales = torch.where(steps > 0, (apart / steps).half(), scales)
    wide = scales.float()
    return scales, (first - ((first - least) / wide).ceil() * wide).half()


def _best_grid(groups: torch.Tensor, plain: _Grid, levels: int, importance: torch.Tensor) -> _Grid:
    """`plain`; but where inputs stand out by their importance [groups, GROUP], of that and of grids that meet the first
    one's or two's weights, the one with the least error.
    """
    some = (importance.amax(-1) > STANDS_OUT * importance.mean(-1)).nonzero()[:, 0]
    groups, importance = groups[:, some], importance[some]
    best = plain[0][:, some], plain[1][:, some]
    least = _error(groups, best, levels, importance)
    first, second = groups.gather(-1, importance.topk(2).indices.expand(len(groups), -1, -1)).unbind(-1)
    for upon in ((first,), (first, second)):
        grid = _grid(groups, levels, *upon)
        error = _error(groups, grid, levels, importance)
        best = torch.where(error < least, grid[0], best[0]), torch.where(error < least, grid[1], best[1])
        least = torch.minimum(error, least)
    return plain[0].index_copy(1, some, best[0]), plain[1].index_copy(1, some, best[1])


def _error(groups: torch.Tensor, grid: _Grid, levels: int, importance: torch.Tensor) -> torch.Tensor:
    """Of each group."""
    scales, offsets = (part.float()[..., None] for part in grid)
    lost = _codes(groups, *grid, levels).mul_(scales).add_(offsets).sub_(groups)
    return lost.square_().mul_(importance).sum(-1)


def _nf4(groups: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (fp16) [outputs, groups] of the sign that loses less, and codes."""
    scales = (groups.abs().amax(-1) / NF4_CODES[-1]).clamp_min(LEAST_SCALE).half()
    values = torch.tensor(NF4_CODES, dtype=torch.float32)
    found, errors = [], []
    for signed in (scales, -scales):
        wide = signed.float()[..., None]
        halves = (groups / wide).mul_(2).ceil_().to(torch.int32).add_(256).clamp_(0, 512)  # also what is not finite
        codes = _NF4_PLACES.index_select(0, halves.flatten()).view(groups.shape)
        lost = values.index_select(0, codes.flatten()).view(groups.shape).mul_(wide).sub_(groups)
        found.append(codes)
        errors.append(lost.square_().mul_(importance).sum(-1))
    negated = errors[1] < errors[0]
    return torch.where(negated, -scales, scales), torch.where(negated[..., None], found[1], found[0])


def _scales(reach: torch.Tensor, levels: int) -> torch.Tensor:
    scales = (reach / levels).clamp_min(LEAST_SCALE).half()
    # Of tiny weights fp16 has few digits: rather a larger step than values that are out of reach.
    short = reach - levels * scales.float() > scales.float() / 4
    return torch.where(short, scales.nextafter(torch.full_like(scales, torch.inf)), scales)


def _codes(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, levels: int) -> torch.Tensor:
    return ((groups - offsets.float()[..., None]) / scales.float()[..., None]).round_().clamp_(0, levels)


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, inputs] -> [outputs, groups, GROUP], filled with zeros."""
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % PAIR)).view(len(rows), -1, GROUP)


def unpack(packed: torch.Tensor, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """bytes [outputs, row bytes] -> weight [outputs, inputs]. Raises BadInput."""
    kernels = native.kernels()
    if kernels is not None and packed.is_cpu and dtype in (torch.float32, torch.bfloat16):
        return kernels.widened(packed, inputs, torch.empty(0, dtype=dtype))  # type: ignore[no-any-return]
    wide, done = torch.empty(len(packed), inputs, dtype=dtype, device=packed.device), 0
    for strip in unpacked_strips(packed, inputs):
        wide[done : done + len(strip)] = strip
        done += len(strip)
    return wide


def unpacked_strips(packed: torch.Tensor, inputs: int) -> Iterator[torch.Tensor]:
    """The weight by torch's own kernels, some outputs after the other: fp32 [some, inputs], so few that they stay in a
    cache, which is several times as fast. Raises BadInput.
    """
    for rows in packed.split(max(1, UNPACKED_AT_ONCE // inputs)):
        values, scales, offsets = parts_of(rows, inputs)
        wide = values.float().mul_(scales[..., None])
        if offsets is not None:
            wide.add_(offsets[..., None])
        yield wide.reshape(len(rows), -1)[:, :inputs]


def parts_of(packed: torch.Tensor, inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values [outputs, groups, GROUP], scales and (not of nf4) offsets, both fp32 [outputs, groups], where weight =
    scale * value + offset. Raises BadInput.
    """
    quantization, outputs = quantization_of(packed, inputs), len(packed)
    groups = row_bytes(inputs, quantization) // PAIR_BYTES[quantization] * 2
    header = groups * (2 if quantization == NF4 else 4)
    numbers = packed[:, :header].contiguous().view(torch.float16).float().view(outputs, -1, groups)
    codes = packed[:, header:].unflatten(1, (-1, GROUP))
    if quantization == INT8:
        return codes, numbers[:, 0], numbers[:, 1]
    if quantization == INT4:
        return torch.stack([codes & 15, codes >> 4], 2).flatten(1, 2), numbers[:, 0], numbers[:, 1]
    both = _NF4_PAIRS.index_select(0, codes.int().flatten()).unflatten(0, codes.shape)
    return both.transpose(2, 3).flatten(1, 2), numbers[:, 0], None
