"""Packed weights say what they should, take what is said, and all kernels compute with them alike."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from routing.errors import BadInput
from swarm import native, quantized
from swarm.few_rows import FewRows, FewRowsLinear, few_rows_linear
from swarm.quantized import (
    GROUP,
    INT4,
    INT8,
    NF4,
    NF4_CODES,
    QUANTIZATIONS,
    guessed_importance,
    pack,
    quantization_of,
    row_bytes,
    unpack,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Of weights from a normal distribution: root mean square of what is lost, over that of the weights.
LOST = {INT8: 0.005, INT4: 0.085, NF4: 0.095}
BITS = {INT8: 9, INT4: 5, NF4: 4.5}
OTHER_SIZE = r"rows of 144 bytes|shapes do not fit"
ROWS = (1, 2, 4, 5, 8, 9, 17, 40)


def plenty(dtype: torch.dtype, most: int = 1000) -> FewRows:
    few_rows = FewRows(dtype, packed=True)
    few_rows.most = most
    return few_rows


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_little_is_lost_and_the_bits_are_as_said(kernels, quantization):
    weight = random(40, 640)
    packed = pack(weight, quantization)
    assert packed.dtype == torch.uint8 and packed.shape == (40, row_bytes(640, quantization))
    assert 8 * packed.nbytes / weight.numel() == BITS[quantization]
    assert quantization_of(packed, 640) == quantization
    back = unpack(packed, 640, torch.float32)
    assert 0 < (back - weight).norm() / weight.norm() < LOST[quantization]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_was_unpacked_packs_to_the_same(kernels, quantization):
    """Weights that are on the grid stay where they are, unless the grid is laid for some of them."""
    weight, alike = random(7, 150), torch.ones(150)
    once = unpack(pack(weight, quantization, alike), 150, torch.float32)
    again = unpack(pack(once, quantization, alike), 150, torch.float32)
    torch.testing.assert_close(again, once, rtol=0, atol=1e-3 * float(weight.abs().max()))


def test_nf4_is_its_codes_times_the_largest_of_a_group(kernels):
    codes = torch.tensor(NF4_CODES)[torch.randint(16, (3, 4, GROUP), generator=torch.Generator().manual_seed(0))]
    codes[:, :, 5] = 127
    weight = (codes * torch.tensor([0.5, 2.0, 0.25, 1.0])[:, None]).view(3, 4 * GROUP)
    assert torch.equal(unpack(pack(weight, NF4), 4 * GROUP, torch.float32), weight)


def test_the_weights_of_a_gguf_file_in_q4_1_stay_exact_in_int4(kernels):
    values = np.random.default_rng(0).normal(0, 0.05, (16, 256)).astype(np.float32)
    stored = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    weight = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_1))
    torch.testing.assert_close(unpack(pack(weight, INT4), 256, torch.float32), weight, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("quantization", "share"), [(INT8, 0.3), (INT4, 0.5)])  # a second weight may be too near
def test_the_weights_of_the_most_important_inputs_are_met(kernels, quantization, share):
    weight, importance = random(64, 200), torch.ones(200)
    for which in ((5,), (5, 20), (5, 20, 70, 150)):  # one of a group, two, and of other groups too
        importance[list(which)] = 1e5
        lost = (unpack(pack(weight, quantization, importance), 200, torch.float32) - weight).square().mean(0).sqrt()
        others = [index for index in range(200) if index not in which]
        assert lost[list(which)].max() < share * lost[others].mean()
        assert lost[others].mean() < LOST[quantization] * weight.square().mean().sqrt()


def test_nf4_takes_the_sign_with_which_the_most_important_weight_is_nearer(kernels):
    weight, importance = random(64, 64), torch.ones(64)
    important = [7, 40]  # one of each group
    alike = unpack(pack(weight, NF4, importance), 64, torch.float32)
    importance[important] = 1e5
    scales = (weight.view(64, 2, GROUP).abs().amax(-1) / 127).half().float()
    either = torch.stack([scales, -scales])[..., None] * torch.tensor(NF4_CODES)  # [2, outputs, groups, 16]
    nearest = (either - weight[:, important, None]).abs().amin(-1).amin(0)
    found = (unpack(pack(weight, NF4, importance), 64, torch.float32) - weight)[:, important].abs()
    torch.testing.assert_close(found, nearest, rtol=1e-4, atol=1e-6)
    assert found.mean() < 0.9 * (alike - weight)[:, important].abs().mean()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_inputs_with_small_weights_are_taken_for_important(kernels, quantization):
    weight = random(64, 128)
    weight[:, 40] /= 10
    assert int(guessed_importance(weight).argmax()) == 40
    assert torch.equal(pack(weight, quantization), pack(weight, quantization, guessed_importance(weight)))
    assert not torch.equal(pack(weight, quantization), pack(weight, quantization, torch.ones(128)))


def test_weights_on_a_grid_of_4_bits_stay_in_int8_if_some_are_important_too(kernels):
    importance = torch.ones(128)
    weight = unpack(pack(random(64, 128), INT4, importance), 128, torch.float32)
    importance[[5, 70]] = 30
    torch.testing.assert_close(unpack(pack(weight, INT8, importance), 128, torch.float32), weight, rtol=0, atol=4e-3)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("weight", [torch.zeros(2, 64), torch.ones(2, 64), torch.eye(3, 40), 1e-4 * random(4, 64)])
def test_odd_weights_stay_near(kernels, quantization, weight):
    back = unpack(pack(weight, quantization), weight.shape[1], torch.float32)
    torch.testing.assert_close(back, weight, rtol=1e-3, atol=LOST[quantization] * float(weight.abs().max()) + 1e-7)


def test_rows_of_another_size_are_refused(kernels):
    packed = pack(random(4, 100), INT8)
    with pytest.raises((BadInput, RuntimeError), match=OTHER_SIZE):
        unpack(packed, 300, torch.float32)
    with pytest.raises((BadInput, RuntimeError), match=OTHER_SIZE):
        few_rows_linear(torch.ones(1, 300), packed, None, plenty(torch.float32))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("at_once", [1, 300, 1000])
def test_a_weight_is_unpacked_strip_by_strip_without_our_kernels(monkeypatch, at_once, quantization):
    packed, x = pack(random(23, 150), quantization), random(2, 150)
    monkeypatch.setattr(native, "_loaded", None)
    whole, product = unpack(packed, 150, torch.float32), few_rows_linear(x, packed, None, plenty(torch.float32))
    monkeypatch.setattr(quantized, "UNPACKED_AT_ONCE", at_once)
    strips = list(quantized.unpacked_strips(packed, 150))
    assert [len(strip) for strip in strips[:-1]] == [max(1, at_once // 150)] * (len(strips) - 1)
    assert torch.equal(torch.cat(strips), whole)
    assert torch.equal(unpack(packed, 150, torch.bfloat16), whole.bfloat16())
    torch.testing.assert_close(few_rows_linear(x, packed, None, plenty(torch.float32)), product)


@settings(max_examples=60)
@given(
    quantization=st.sampled_from(QUANTIZATIONS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.integers(1, 40),
    inputs=st.one_of(st.integers(1, 300), st.sampled_from([64, 576, 1024, 1088])),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([16, 48, 96])),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_that_of_the_unpacked_weight(
    native_kernels, quantization, dtype, rows, inputs, outputs, bias, seed
):
    x, weight = random(rows, inputs, seed=seed).to(dtype), random(outputs, inputs, seed=seed + 1)
    packed, added = pack(weight, quantization), random(outputs, seed=seed + 2).to(dtype) if bias else None
    found = native_kernels.linear(x, packed, added)
    wide = unpack(packed, inputs, torch.float32)
    exact = F.linear(x.double(), wide.double(), None if added is None else added.double())
    assert found.shape == (rows, outputs) and found.dtype == dtype
    size = x.double().norm(dim=1, keepdim=True) * wide.double().norm(dim=1)  # what a product can be at most
    tolerance = 5e-5 if dtype == torch.float32 else 4e-3
    assert ((found.double() - exact).abs() <= tolerance * (size + exact.abs()) + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("most", [0, 1000])
def test_a_layer_computes_the_same_by_every_kernel(kernels, most, quantization, dtype):
    """Ours and the library's, whatever was measured."""
    linear = torch.nn.Linear(100, 48, dtype=dtype).requires_grad_(False)
    packed = FewRowsLinear.packing(linear, plenty(dtype, most), quantization)
    assert packed.bias is linear.bias and packed.weight.dtype == torch.uint8 and linear.weight.dtype == dtype
    wide = unpack(packed.weight, 100, torch.float32)
    for rows in ROWS:
        x = random(1, rows, 100).to(dtype)
        exact = F.linear(x.float(), wide, linear.bias.float())
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(packed(x).float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(kernels, dtype, bad):
    for rows in (1, 12):
        x = torch.ones(rows, 64, dtype=dtype)
        x[0, 5] = bad
        found = few_rows_linear(x, pack(random(48, 64), INT8), None, plenty(dtype))
        assert not torch.isfinite(found[0]).any() and torch.isfinite(found[1:]).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_large_and_tiny_inputs(kernels, scale):
    x, packed = scale * random(1, 64), pack(random(5, 64), INT8)
    exact = F.linear(x.double(), unpack(packed, 64, torch.float32).double())
    torch.testing.assert_close(
        few_rows_linear(x, packed, None, plenty(torch.float32)).double(), exact, rtol=1e-3, atol=0
    )


def test_two_threads_compute_the_same(native_kernels):
    for rows, dtype in ((3, torch.float32), (40, torch.bfloat16)):
        x, packed = random(rows, 576).to(dtype), pack(random(4096, 576), INT4)
        alone = native_kernels.linear(x, packed, None)
        torch.set_num_threads(2)
        try:
            assert torch.equal(native_kernels.linear(x, packed, None), alone)
        finally:
            torch.set_num_threads(1)


def test_how_many_rows_are_few_is_measured_of_packed_weights_too(native_kernels, monkeypatch):
    monkeypatch.setattr(native, "_loaded", native_kernels)
    linears = [FewRowsLinear.packing(torch.nn.Linear(96, 48), plenty(torch.bfloat16, 0), INT4) for _ in range(3)]
    few_rows = FewRows(torch.bfloat16, packed=True)
    for step in few_rows.measuring(linears):
        step()
    assert few_rows.most > 0
