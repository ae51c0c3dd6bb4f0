"""torch's product with int4 weights is that of the packed weights, as near as bf16 is, and takes the same bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from swarm import native
from swarm.few_rows import FewRows, FewRowsLinear
from swarm.library_int4 import LibraryInt4Linear
from swarm.quantized import INT4, INT8, NF4, unpack

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", None)


def packed(inputs: int, outputs: int, quantization: str = INT4, bias: bool = False) -> FewRowsLinear:
    torch.manual_seed(inputs + outputs)
    linear = torch.nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)
    return FewRowsLinear.packing(linear, FewRows(torch.bfloat16, packed=True), quantization).to(torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 16), (576, 192), (128, 48), (1536, 576)])
def test_it_is_as_near_as_bf16(inputs, outputs, bias):
    linear = packed(inputs, outputs, bias=bias)
    ours = LibraryInt4Linear.instead(linear, torch.bfloat16)
    assert isinstance(ours, LibraryInt4Linear)
    assert ours.weight.shape == linear.weight.shape and ours.weight.dtype == torch.uint8
    wide = unpack(linear.weight, inputs, torch.float32)
    for rows in (1, 3, 17, 70):
        x = torch.randn(1, rows, inputs).bfloat16()
        found, exact = ours(x), F.linear(x.float(), wide, linear.bias.float() if bias else None)
        assert found.shape == (1, rows, outputs) and found.dtype == torch.bfloat16
        assert (found.float() - exact).norm() <= 4e-3 * exact.norm()
        # As it is asked of our own kernels (test_quantized.py).
        size = x.float().norm(dim=-1, keepdim=True) * wide.norm(dim=1)
        assert ((found.float() - exact).abs() <= 4e-3 * (size + exact.abs()) + 1e-6).all()


def test_others_stay_as_they_are(native_kernels, monkeypatch):
    for inputs, outputs, quantization in ((100, 48, INT4), (64, 40, INT4), (64, 48, INT8), (64, 48, NF4)):
        linear = packed(inputs, outputs, quantization)
        assert LibraryInt4Linear.instead(linear, torch.bfloat16) is linear
    linear = packed(64, 48)
    assert LibraryInt4Linear.instead(linear, torch.float32) is linear
    monkeypatch.setattr(native, "_loaded", native_kernels)
    assert LibraryInt4Linear.instead(linear, torch.bfloat16) is linear
