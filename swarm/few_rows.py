"""What layers do with few rows, which is what decoding is made of, and which kernel does it: products and norms.

Products have three kernels, all of torch's meaning: ours (`kernels/`), the library's with the weight as the left
operand (bf16: as the right one it is packed anew in every call), and plain `F.linear`. One thread, all linears of 15
blocks of SmolLM2 in huge pages, ms at 1 / 4 / 8 / 16 / 32 rows: fp32 ours 14.9 / 18 / 21 / 33 / 52, F.linear 17.4 /
29 / 36 / 37 / 46; bf16 ours 9.6 / 10.5 / 13 / 24 / 45, with a matrix unit (AMX) 8.2 / 8.1 / 8.6 / 8.7 / 11, weight
first 13.4 / 14 / 14.5 / 15.6 / 20, F.linear 18.5 / 19 / 19 / 20 / 22. In bf16 at 64 / 128 / 256 / 512 rows: ours with
a matrix unit 13.8 / 21 / 37 / 63, the library's best 19.3 / 30 / 38 / 58.

Packed weights (`quantized.py`) are read by ours alone; where the library is faster, or alone, it is given the weight
unpacked. The same linears with bf16 rows, ms at 1 / 4 / 32 / 128 rows: bf16 8.4 / 9.2 / 11 / 23, int8 3.4 / 6.8 / 11 /
27, int4 2.7 / 6.1 / 12 / 26; with fp32 rows at 1 / 8 / 32: fp32 15 / 23 / 49, int8 3.5 / 12 / 47, int4 2.9 / 11 / 45.
Unpacked strip by strip, one row takes three to six times as long as with plain weights, in nf4 up to thirteen.

A norm of one row of 576 is eight operations of the library, 17 us in fp32 and 43 in bf16, and one of ours, 4 and 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from swarm import native
from swarm.quantized import pack, unpack, unpacked_strips

WEIGHT_FIRST = 64  # rows: up to here the left operand pays in bf16
UNMEASURED = {torch.float32: 12, torch.bfloat16: 4}  # rows up to which ours is taken, until this machine was measured
UNMEASURED_PACKED = 64  # the same of packed weights, which the library cannot read
IN_STRIPS = 16  # rows: up to here a weight that must be unpacked is used strip by strip, in fp32
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
COUNTS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 96, 128, 192, 256)  # of rows, to measure at
GIVEN_UP = 2  # counts in a row at which the library was faster


class FewRows:
    """Up to how many rows our own kernel is the fastest for some weights on this machine."""

    def __init__(self, dtype: torch.dtype, *, packed: bool = False):
        """`dtype` of the rows; `packed` if most of the weights are."""
        self._dtype = dtype
        self.most = UNMEASURED_PACKED if packed else UNMEASURED.get(dtype, 0)

    def measuring(self, linears: Sequence[FewRowsLinear]) -> Iterator[Callable[[], None]]:
        """Steps of a few tens of milliseconds, to be called one after the other between other work; `most` is right
        after the last. The weights of `linears` should be more than the caches hold that serve one core.
        """
        most = lost = 0
        weights = [(linear.in_features, linear.weight) for linear in linears]
        for rows in COUNTS:
            inputs = {size: torch.ones(1, rows, size, dtype=self._dtype) for size, _ in weights}
            ours, library = _Timing(native.kernels().linear, inputs), _Timing(_of_library, inputs)
            for _ in range(3):
                yield partial(ours.take, weights)
                yield partial(library.take, weights)
            if ours.least < library.least:
                most, lost = rows, 0
            else:
                lost += 1
            if lost == GIVEN_UP:
                break
        self.most = most


class _Timing:
    """The least time of a product of some rows with all weights."""

    def __init__(self, product: Product, inputs: dict[int, torch.Tensor]):
        self._product, self._inputs = product, inputs
        self.least = float("inf")

    def take(self, weights: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Each with its number of inputs."""
        begun = time.perf_counter()
        with torch.inference_mode():
            for inputs, weight in weights:
                self._product(self._inputs[inputs], weight, None)
        self.least = min(self.least, time.perf_counter() - begun)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, few_rows: FewRows
) -> torch.Tensor:
    """`F.linear`: x [..., inputs], weight [outputs, inputs] or packed, on a CPU -> [..., outputs], by the fastest
    kernel.
    """
    rows = x.numel() // x.shape[-1]
    kernels = native.kernels()
    if kernels is not None and 0 < rows <= few_rows.most:
        return kernels.linear(x.contiguous(), weight, bias)
    return _of_library(x, weight, bias)


def _of_library(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    if weight.dtype == torch.uint8:
        if native.kernels() is None and rows <= IN_STRIPS:
            wide = x.float()
            product = torch.cat([wide @ strip.T for strip in unpacked_strips(weight, x.shape[-1])], -1)
            return (product if bias is None else product.add_(bias)).to(x.dtype)
        weight = unpack(weight, x.shape[-1], x.dtype)
    if weight.dtype != torch.bfloat16 or not 0 < rows <= WEIGHT_FIRST:
        return F.linear(x, weight, bias)
    columns = x.reshape(rows, weight.shape[1]).T
    if bias is None:
        product = weight.mv(columns[:, 0]) if rows == 1 else weight.mm(columns).T.contiguous()
    elif rows == 1:
        product = torch.addmv(bias, weight, columns[:, 0])
    else:
        product = torch.addmm(bias[:, None], weight, columns).T.contiguous()
    return product.view(*x.shape[:-1], weight.shape[0])


class FewRowsLinear(torch.nn.Linear):
    """`nn.Linear` on a CPU, by the fastest kernel for its rows."""

    few_rows: FewRows

    @classmethod
    def sharing(cls, linear: torch.nn.Linear, few_rows: FewRows) -> FewRowsLinear:
        """With the parameters of `linear`, which must be contiguous."""
        with torch.device("meta"):
            shared = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        shared.weight, shared.bias, shared.few_rows = linear.weight, linear.bias, few_rows
        return shared.eval()

    @classmethod
    def packing(
        cls, linear: torch.nn.Linear, few_rows: FewRows, quantization: str, importance: torch.Tensor | None = None
    ) -> FewRowsLinear:
        """With the weight of `linear` packed (`importance` as of `pack`), and its bias."""
        packed = cls.sharing(linear, few_rows)
        packed.weight = torch.nn.Parameter(pack(linear.weight, quantization, importance), requires_grad=False)
        return packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return few_rows_linear(input, self.weight, self.bias, self.few_rows)


class FewRowsNorm(torch.nn.Module):
    """An RMS norm of the library, by one kernel where there is one and the rows are few."""

    def __init__(self, library: torch.nn.Module, epsilon: float):
        super().__init__()
        self.library, self.epsilon = library, epsilon

    @property
    def weight(self) -> torch.Tensor:
        return self.library.weight  # type: ignore[return-value]

    @classmethod
    def of(cls, norm: torch.nn.Module) -> torch.nn.Module:
        """In place of `norm`, which has its weights, if it is one that the kernel computes; else `norm` itself. Found
        out by what it does: names and epsilons are spelt in many ways, and some add 1 to the weight.
        """
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = getattr(norm, "weight", None)
        if not isinstance(epsilon, float) or weight is None or weight.dim() != 1 or not weight.is_cpu:
            return norm
        sample = torch.linspace(-3, 5, 2 * len(weight)).view(2, -1).to(weight.dtype)
        with torch.no_grad():
            scaled = sample.float() * torch.rsqrt(sample.float().square().mean(-1, keepdim=True) + epsilon)
            same = torch.allclose(norm(sample), weight * scaled.to(weight.dtype), rtol=1e-6, atol=0)
        return cls(norm, epsilon).eval() if same else norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = native.kernels()
        if kernels is None:
            return self.library(x)
        return kernels.rms_norm(x.contiguous(), self.library.weight, self.epsilon)
