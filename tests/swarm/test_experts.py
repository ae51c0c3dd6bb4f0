"""A mixture's experts with packed weights are the library's with those weights unpacked, however it lays them out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from swarm import experts as experts_module
from swarm.experts import PRODUCTS, PackedExperts, are_packable, matrices
from swarm.few_rows import FewRows, few_rows_linear
from swarm.quantized import INT4, INT8, NF4, QUANTIZATIONS, pack, unpack
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
LOST = {INT8: 0.02, INT4: 0.25, NF4: 0.25}  # of what experts give: root mean square of what is lost
COUNT, CHOSEN = 4, 2


def library_experts(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    mlp = tiny_model(family, layers=1, **{"mlp_only_layers": []} if family == "qwen3_moe" else {}, **overrides)
    experts = mlp.model.layers[0].mlp.experts.requires_grad_(False)
    torch.manual_seed(1)
    for name, parameter in experts.named_parameters():
        parameter.copy_(torch.randn(parameter.shape) / (8 if "bias" not in name else 1))
    return experts.to(dtype)


def unpacked(library: Any, packed: PackedExperts) -> Any:
    """The library's experts with just the packed weights."""
    plain = copy.deepcopy(library)
    for product in PRODUCTS:
        target = matrices(plain, product)
        for wide, narrow in zip(target, getattr(packed.library, product), strict=True):
            wide.copy_(unpack(narrow, target.shape[2], torch.float32))
    return plain


def routed(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts of each and their shares."""
    torch.manual_seed(rows)
    shares, chosen = torch.randn(rows, COUNT).softmax(-1).topk(CHOSEN)
    return torch.randn(rows, 64).to(dtype), chosen, shares.to(dtype)


def packing(library: Any, quantization: str, most: int = 1000) -> PackedExperts:
    few_rows = FewRows(torch.float32, packed=True)
    few_rows.most = most
    return PackedExperts(copy.deepcopy(library), few_rows, quantization)


@pytest.mark.parametrize("most", [0, 1000])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_the_librarys_with_the_unpacked_weights(kernels, family, quantization, most):
    library = library_experts(family)
    packed = packing(library, quantization, most)
    reference = unpacked(library, packed)
    for rows in (1, 3, 40):
        given = routed(rows)
        exact = reference(*given)
        assert (packed(*given) - exact).abs().max() <= 2e-4 * exact.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_in_bfloat16_too(kernels, family):
    library = library_experts(family)
    packed = packing(library, INT8).to(torch.bfloat16)
    reference = unpacked(library, packed)
    for rows in (1, 3, 40):
        hidden, chosen, shares = routed(rows, torch.bfloat16)
        found, exact = packed(hidden, chosen, shares), reference(hidden.float(), chosen, shares.float())
        assert found.dtype == torch.bfloat16
        assert (found.float() - exact).abs().max() <= 2e-2 * exact.abs().max()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_little_is_lost(family, quantization):
    library, given = library_experts(family), routed(40)
    exact = library(*given)
    assert 0 < (packing(library, quantization)(*given) - exact).norm() / exact.norm() < LOST[quantization]


def test_their_activation_is_the_librarys(kernels):
    library = library_experts("mixtral", hidden_act="gelu")
    packed, given = packing(library, INT8), routed(5)
    torch.testing.assert_close(packed(*given), unpacked(library, packed)(*given), rtol=1e-3, atol=1e-4)


def test_only_chosen_experts_compute_and_only_for_their_rows(monkeypatch):
    products = []

    def product(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        products.append((len(x), weight.data_ptr()))
        return few_rows_linear(x, weight, *rest)

    packed = packing(library_experts("mixtral"), INT4)
    monkeypatch.setattr(experts_module, "few_rows_linear", product)
    chosen = torch.tensor([[3, 1], [1, 0], [0, 1]])
    packed(torch.randn(3, 64), chosen, torch.full((3, 2), 0.5))
    weights = {name: getattr(packed.library, name) for name in PRODUCTS}
    assert sorted(products) == sorted(
        (rows, weights[name][expert].data_ptr()) for expert, rows in ((3, 1), (1, 3), (0, 2)) for name in PRODUCTS
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_important_in_an_expert_is_what_has_large_weights_before_it(family):
    library = library_experts(family)
    opening = matrices(library, "gate_up_proj")[2]
    which = 5  # of what lies between the products
    in_turns = family == "gpt_oss"
    gate, value = (2 * which, 2 * which + 1) if in_turns else (which, len(opening) // 2 + which)
    opening[[gate, value]] *= 30
    sizes = opening.double().square().sum(1)
    importance = sizes[::2] * sizes[1::2] if in_turns else sizes[: len(sizes) // 2] * sizes[len(sizes) // 2 :]
    closing = matrices(library, "down_proj")[2]
    assert int(importance.argmax()) == which
    found = packing(library, INT8).library.down_proj[2]
    assert torch.equal(found, pack(closing, INT8, importance))
    assert not torch.equal(found, pack(closing, INT8))


def test_experts_of_another_kind_are_not_taken():
    library = library_experts("mixtral")
    assert are_packable(library)
    assert not are_packable(torch.nn.Linear(3, 3))
    library.has_gate = False
    assert not are_packable(library)
