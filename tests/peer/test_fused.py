"""Which layers run fused, and that what does not agree with the library's own forward never does.

That fused blocks give the local model's logits is in test_executor.py, with both sets of kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from peer import fused as fused_module
from peer.attention import Segment
from peer.blocks import Blocks, Loading
from peer.executor import Executor, PassItem
from peer.fused import FusedBlock
from routing.types import Span
from swarm import native
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from swarm.quantized import NONE, QUANTIZATIONS
from tests.tiny import FAMILIES, make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}


@pytest.fixture(autouse=True)
def loaded(native_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", native_kernels)


def load(family: str, folder, dtype: torch.dtype = torch.float32, quantization: str = NONE) -> Blocks:
    checkpoint = open_checkpoint(str(make_tiny(family, folder)))
    return Loading(checkpoint, family_of(checkpoint.config), Span(0, 4), dtype, quantization=quantization).load_all()


def fused(blocks: Blocks, index: int = 0) -> FusedBlock | None:
    assert blocks.rotary_kinds[index] is not None
    return blocks.fused.get(index)


def tables(blocks: Blocks) -> Callable[[Sequence[Segment]], tuple[torch.Tensor, torch.Tensor]]:
    """Of the first block."""
    kind = blocks.rotary_kinds[0]
    assert kind is not None
    return lambda segments: blocks.rotary.rows([(segment.past, segment.end, False) for segment in segments])[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_built_like_llamas_run_fused_and_no_others(family, dtype, tmp_path):
    blocks = load(family, tmp_path, dtype)
    if all(kind is None for kind in blocks.rotary_kinds):
        return
    assert (fused(blocks) is not None) == (family in LIKE_LLAMA)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", sorted(LIKE_LLAMA))
def test_they_do_with_packed_weights_too(family, quantization, dtype, tmp_path):
    blocks = load(family, tmp_path, dtype, quantization)
    assert fused(blocks) is not None


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_layer_that_computes_something_else_does_not(part, tmp_path):
    """As if a family of the same build scaled one of its products."""
    blocks = load("llama", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    home = layer.mlp if part in ("gate_proj", "up_proj", "down_proj") else layer.self_attn
    product = getattr(home, part)
    real = product.forward
    product.forward = lambda x: 1.1 * real(x)
    assert FusedBlock.of(blocks.layers[0], 0, blocks.shape, tables(blocks)) is not None
    assert FusedBlock.of(layer, 0, blocks.shape, tables(blocks)) is None


def test_nor_one_with_another_activation(tmp_path):
    blocks = load("llama", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    layer.mlp.act_fn = torch.nn.GELU()
    assert FusedBlock.of(layer, 0, blocks.shape, tables(blocks)) is None
    assert FusedBlock.of(SimpleNamespace(), 0, blocks.shape, tables(blocks)) is None  # type: ignore[arg-type]


def test_window_and_scale_are_those_that_the_layer_tells_its_attention(tmp_path):
    """However far the window reaches: rows as short as those compared would not show it."""
    blocks = load("mistral", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    layer.self_attn.sliding_window, layer.self_attn.scaling = 4096, 0.5
    ours = FusedBlock.of(layer, 0, blocks.shape, tables(blocks))
    assert ours is not None and (ours.window, ours.scale) == (4096, 0.5)


def test_decode_rows_run_in_one_call_as_far_as_that_pays(tmp_path, monkeypatch):
    blocks, calls = load("llama", tmp_path), []
    real = fused_module.run_in_one_call

    def run(together: Sequence[FusedBlock], hidden: torch.Tensor, *rest) -> torch.Tensor:
        calls.append((len(together), hidden.shape[1]))
        return real(together, hidden, *rest)

    assert all(fused(blocks, index) for index in range(4))
    monkeypatch.setattr(fused_module, "run_in_one_call", run)
    executor, hidden = Executor(blocks), torch.randn(1, 64)
    blocks.few_rows.most = 3
    for rows in (1, 3, 4):
        executor.run([PassItem(blocks.seat(0, 4), hidden) for _ in range(rows)])
    executor.run([PassItem(blocks.seat(0, 4), torch.randn(2, 64))])  # a chunk
    executor.run([PassItem(blocks.seat(0, 4), hidden), PassItem(blocks.seat(0, 4), torch.randn(5, 64))])
    assert calls == [(4, 1), (4, 3)]
    calls.clear()
    executor.run([PassItem(blocks.seat(0, 4), hidden), PassItem(blocks.seat(1, 3), hidden)])  # one enters and leaves
    assert calls == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("quantization", [NONE, *QUANTIZATIONS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(1,), (1, 1, 1), (1, 40), (70, 1), (300,)])
def test_it_is_what_the_library_computes(rows, dtype, quantization, tmp_path, monkeypatch):
    """In one call and in several, short and long: rows, and what later rows will attend to."""
    blocks = load("qwen3", tmp_path, dtype, quantization)
    torch.manual_seed(sum(rows))
    chunks = [torch.randn(count, 64).to(dtype) for count in rows]
    results = []
    for fuses in (True, False):
        if not fuses:
            monkeypatch.setattr(type(blocks.fused), "get", lambda *args: None)
        seats = [blocks.seat(0, 4) for _ in rows]
        results.append([])
        for _ in range(2):
            items = [PassItem(seat, chunk) for seat, chunk in zip(seats, chunks, strict=True)]
            results[-1] += Executor(blocks).run(items).outputs
    tolerance = (1e-4 if quantization == NONE else 5e-3) if dtype == torch.float32 else 5e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
