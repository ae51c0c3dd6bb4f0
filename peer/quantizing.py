"""Which quantization `--quantize auto` is: the fastest that changes next to nothing, unless memory asks for more.

int8 where one row through packed weights is measured to be quicker than through plain ones, which takes the native
kernels; int4 where int8 would not fit; else none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import torch

from peer.blocks import estimated_block_bytes, packed_shapes
from peer.capacity import RESERVE_BYTES, free_memory
from peer.config import AUTO, PeerConfig
from swarm import native
from swarm.compute import ComputeThread
from swarm.families import Family
from swarm.few_rows import FewRows, FewRowsLinear
from swarm.quantized import INT4, INT8, NONE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MEASURED_BYTES = 48 << 20  # of plain weights: more than the caches hold that serve one core
ROUNDS = 3


async def choose(
    config: PeerConfig, model: PreTrainedConfig, family: Family, thread: ComputeThread
) -> str:
    """What a peer's weights are to be quantized in. On a CPU the kernels are built first if need be, for how weights
    are laid out depends on whether there are any; for `auto` they are tried for a few tenths of a second.
    """
    kinds = {torch.device(device).type for device in config.devices}
    with_kernels = config.quantize != NONE and "cpu" in kinds and await native.prepare()
    if config.quantize != AUTO:
        return config.quantize
    if kinds != {"cpu"} or not with_kernels:
        return NONE
    if not await thread.run(pays, packed_shapes(model, family, 0), config.torch_dtype):
        return NONE
    blocks = range(config.blocks.start, config.blocks.end) if config.blocks else ()
    needed = sum(estimated_block_bytes(model, family, index, config.torch_dtype, INT8) for index in blocks)
    room = free_memory() - RESERVE_BYTES
    if config.max_memory_bytes is not None:
        room = min(room, config.max_memory_bytes)
    return INT8 if needed <= room else INT4


def pays(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether one row through weights of these shapes (outputs, inputs) is quicker in int8 on this CPU."""
    if not shapes:
        return False
    plain: list[FewRowsLinear] = []
    left = MEASURED_BYTES
    for outputs, inputs in cycle(shapes):
        linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype).requires_grad_(False)
        plain.append(FewRowsLinear.sharing(linear, FewRows(dtype)))
        left -= linear.weight.nbytes
        if left <= 0:
            break
    packed = [FewRowsLinear.packing(linear, FewRows(dtype, packed=True), INT8) for linear in plain]
    rows = {linear.in_features: torch.randn(1, linear.in_features).to(dtype) for linear in plain}
    return _least_s(packed, rows) < _least_s(plain, rows)


def _least_s(linears: Sequence[FewRowsLinear], rows: dict[int, torch.Tensor]) -> float:
    """Of one row through all."""
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        with torch.inference_mode():
            for linear in linears:
                linear(rows[linear.in_features])
        times.append(time.perf_counter() - begun)
    return min(times)
