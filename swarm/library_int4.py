"""int4 weights by torch's own product, for bf16 rows on machines without a C++ compiler: one row of 1536 x 576 takes
0.06 ms, unpacked strip by strip 1.7, in plain bf16 0.25.

torch rounds scales and offsets to bf16. So products are 2e-3 off those of the packed weights, as much as bf16 itself is
off (1.7e-3) and a fortieth of what 4 bits are: peers of bfloat16/int4 stay as alike as those of bfloat16 are. In fp32,
where weights that a file has in Q4_1 stay exact, it would be the greatest error, so there it is not used; nor for int8
and nf4, which torch does not know in groups. Its layout takes the same bytes, and only its product can read it, so that
many rows are slower: 256 rows take twice as long as with the weight unpacked, 64 as long, one a tenth.
"""

from __future__ import annotations

import torch

from swarm import native
from swarm.few_rows import FewRowsLinear
from swarm.quantized import GROUP, INT4, PAIR, parts_of, quantization_of

OUTPUTS = 16  # that torch lays out together


class LibraryInt4Linear(torch.nn.Module):
    """In place of a linear layer with a packed weight. Its own is bytes: codes as torch lays them out [outputs,
    inputs / 2], then scales and zeros (bf16) [groups, outputs, 2], where weight = scale * (code - 8) + zero.
    """

    def __init__(self, linear: FewRowsLinear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        codes, scales, offsets = parts_of(linear.weight, linear.in_features)
        assert offsets is not None  # of int4
        laid = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int().flatten(1), 2)
        numbers = torch.stack([scales.T, (offsets + 8 * scales).T], -1).bfloat16()
        both = torch.cat([laid.flatten(), numbers.contiguous().view(torch.uint8).flatten()])
        self.weight = torch.nn.Parameter(both.view(linear.weight.shape), requires_grad=False)

    @classmethod
    def instead(cls, linear: FewRowsLinear, dtype: torch.dtype) -> torch.nn.Module:
        """Of `linear`, if it is quicker so with rows of `dtype`; else `linear` itself."""
        inputs, outputs = linear.in_features, linear.out_features
        if native.kernels() is not None or dtype != torch.bfloat16 or inputs % PAIR or outputs % OUTPUTS:
            return linear
        return cls(linear).eval() if quantization_of(linear.weight, inputs) == INT4 else linear

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        data, split = self.weight.view(-1), self.out_features * self.in_features // 2
        laid = data[:split].view(self.out_features, -1)
        numbers = data[split:].view(torch.bfloat16).view(-1, self.out_features, 2)
        rows = input.reshape(-1, self.in_features)
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, laid, GROUP, numbers)
        product = product.view(*input.shape[:-1], self.out_features)
        return product if self.bias is None else product + self.bias
