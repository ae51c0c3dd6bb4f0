"""Products of few rows are right by every kernel, and the kernel is chosen by what was measured."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from swarm import few_rows, native
from swarm.few_rows import COUNTS, WEIGHT_FIRST, FewRows, FewRowsLinear, FewRowsNorm, few_rows_linear

pytestmark = pytest.mark.usefixtures("one_thread")


def everything(dtype: torch.dtype) -> FewRows:
    few_rows = FewRows(dtype)
    few_rows.most = 1000
    return few_rows


def linears(*shapes: tuple[int, int]) -> list[FewRowsLinear]:
    return [
        FewRowsLinear.sharing(torch.nn.Linear(inputs, outputs, bias=False), FewRows(torch.float32))
        for outputs, inputs in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (576, 192), (96, 48), (100, 7), (1, 1), (31, 300)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17, 40, WEIGHT_FIRST + 1])
def test_it_is_linear(kernels, rows, inputs, outputs, bias, dtype):
    torch.manual_seed(rows)
    module = torch.nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    ours = FewRowsLinear.sharing(module, everything(dtype))
    assert ours.weight is module.weight
    x = torch.randn(1, rows, inputs).to(dtype)
    found = ours(x)
    exact = F.linear(x.double(), module.weight.double(), module.bias.double() if bias else None)
    assert found.shape == (1, rows, outputs) and found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double(), exact, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=8e-3)


def test_rows_need_not_be_contiguous(kernels):
    x, weight = torch.randn(24, 5).T, torch.randn(40, 24)
    torch.testing.assert_close(few_rows_linear(x, weight, None, everything(torch.float32)), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_values_that_are_not_finite_stay_so(kernels, dtype, bad):
    for rows in (1, 8):
        x = torch.ones(rows, 64, dtype=dtype)
        x[0, 5] = bad
        found = few_rows_linear(x, torch.ones(40, 64, dtype=dtype), None, everything(dtype))
        assert not torch.isfinite(found[0]).any() and torch.isfinite(found[1:]).all()


def test_two_threads_compute_the_same(native_kernels):
    for rows, dtype in ((3, torch.float32), (40, torch.bfloat16)):
        x, weight = torch.randn(rows, 576).to(dtype), torch.randn(4096, 576).to(dtype)
        alone = native_kernels.linear(x, weight, None)
        torch.set_num_threads(2)
        try:
            assert torch.equal(native_kernels.linear(x, weight, None), alone)
        finally:
            torch.set_num_threads(1)


def test_shapes_that_do_not_fit_are_an_error(native_kernels):
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        native_kernels.linear(torch.ones(1, 5), torch.ones(3, 6), None)
    with pytest.raises(RuntimeError, match="one dtype"):
        native_kernels.linear(torch.ones(1, 6), torch.ones(3, 6, dtype=torch.bfloat16), None)


def test_more_rows_than_pay_go_to_the_library(native_kernels, monkeypatch):
    taken = []

    class Counting:
        def linear(self, x, *rest):
            taken.append(x.shape[0])
            return native_kernels.linear(x, *rest)

    monkeypatch.setattr(native, "_loaded", Counting())
    few_rows = FewRows(torch.float32)
    few_rows.most = 4
    for rows in (1, 4, 5):
        few_rows_linear(torch.ones(rows, 8), torch.ones(3, 8), None, few_rows)
    assert taken == [1, 4]


@pytest.mark.parametrize(("pays_up_to", "found"), [(8, 8), (0, 0), (1000, COUNTS[-1])])
def test_the_limit_is_measured(native_kernels, monkeypatch, pays_up_to, found):
    """On a clock that goes by what is computed: ours takes 1 s where it pays and 3 s where not, the library 2 s."""
    clock = [0.0]

    class Ours:
        def linear(self, x, weight, bias):
            clock[0] += 1.0 if x.shape[1] <= pays_up_to else 3.0

    def library(x, weight, bias):
        clock[0] += 2.0

    monkeypatch.setattr(native, "_loaded", Ours())
    monkeypatch.setattr(few_rows, "_of_library", library)
    monkeypatch.setattr(few_rows.time, "perf_counter", lambda: clock[0])
    limit = FewRows(torch.float32)
    for step in limit.measuring(linears((3, 8), (8, 3))):
        step()
    assert limit.most == found


def test_it_stops_measuring_where_the_library_is_faster(native_kernels, monkeypatch):
    monkeypatch.setattr(few_rows, "_of_library", lambda *arguments: None)
    limit = FewRows(torch.float32)
    assert sum(step() is None for step in limit.measuring(linears((2000, 2000)))) == 2 * 3 * few_rows.GIVEN_UP
    assert limit.most == 0


# -- norms -----------------------------------------------------------------------------------------------------


def llama_norm(width: int, dtype: torch.dtype) -> torch.nn.Module:
    norm = LlamaRMSNorm(width, eps=1e-5).to(dtype).requires_grad_(False)
    norm.weight.copy_(torch.randn(width))
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [576, 100, 7])
@pytest.mark.parametrize("rows", [1, 5, WEIGHT_FIRST + 1])
def test_a_norm_is_that_of_the_library(kernels, rows, width, dtype):
    norm = llama_norm(width, dtype)
    ours = FewRowsNorm.of(norm)
    assert isinstance(ours, FewRowsNorm)
    x = 30 * torch.randn(1, rows, width).to(dtype)
    exact = dtype == torch.bfloat16  # rounded at the same places
    torch.testing.assert_close(ours(x), norm(x), rtol=0 if exact else 1e-6, atol=0 if exact else 1e-5)
    x[0, 0, 1] = float("nan")
    assert not torch.isfinite(ours(x)[0, 0]).any()


def test_a_norm_of_another_kind_stays_as_it_is():
    gemma = GemmaRMSNorm(16).requires_grad_(False)
    for norm in (gemma, torch.nn.LayerNorm(16), torch.nn.Identity()):
        assert FewRowsNorm.of(norm) is norm
