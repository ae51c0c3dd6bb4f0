"""Which layers run fused, and that what does not agree with the library's own forward never does.

That fused blocks give the local model's logits is in test_executor.py, with both sets of kernels.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from peer.blocks import Blocks
from peer.executor import Executor, PassItem
from peer.fused import SAMPLE_PASTS, FusedBlock
from routing.types import Span
from swarm import native
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from tests.tiny import FAMILIES, make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

LIKE_LLAMA = {"llama", "mistral", "qwen2", "qwen3", "smollm3"}


@pytest.fixture(autouse=True)
def loaded(native_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", native_kernels)


def load(family: str, folder, dtype: torch.dtype = torch.float32) -> Blocks:
    checkpoint = open_checkpoint(str(make_tiny(family, folder)))
    return Blocks.load(checkpoint, family_of(checkpoint.config), Span(0, 4), dtype)


def fused(blocks: Blocks, index: int = 0) -> FusedBlock | None:
    assert blocks.rotary_kinds[index] is not None
    return blocks.fused.get(index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_built_like_llamas_run_fused_and_no_others(family, dtype, tmp_path):
    blocks = load(family, tmp_path, dtype)
    if all(kind is None for kind in blocks.rotary_kinds):
        return
    assert (fused(blocks) is not None) == (family in LIKE_LLAMA)


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_layer_that_computes_something_else_does_not(part, tmp_path):
    """As if a family of the same build scaled one of its products."""
    blocks = load("llama", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    home = layer.mlp if part in ("gate_proj", "up_proj", "down_proj") else layer.self_attn
    product = getattr(home, part)
    real = product.forward
    product.forward = lambda x: 1.1 * real(x)
    tables = blocks.rotary.rows([(past, past + 1) for past in SAMPLE_PASTS])[blocks.rotary_kinds[0]]
    assert FusedBlock.of(blocks.layers[0], 0, blocks.shape, tables) is not None
    assert FusedBlock.of(layer, 0, blocks.shape, tables) is None


def test_nor_one_with_another_activation(tmp_path):
    blocks = load("llama", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    tables = blocks.rotary.rows([(past, past + 1) for past in SAMPLE_PASTS])[blocks.rotary_kinds[0]]
    layer.mlp.act_fn = torch.nn.GELU()
    assert FusedBlock.of(layer, 0, blocks.shape, tables) is None
    assert FusedBlock.of(SimpleNamespace(), 0, blocks.shape, tables) is None  # type: ignore[arg-type]


def test_window_and_scale_are_those_that_the_layer_tells_its_attention(tmp_path):
    """However far the window reaches: rows as short as those compared would not show it."""
    blocks = load("mistral", tmp_path)
    layer = copy.deepcopy(blocks.layers[0])
    layer.self_attn.config = copy.deepcopy(layer.self_attn.config)
    layer.self_attn.config.sliding_window, layer.self_attn.scaling = 4096, 0.5
    tables = blocks.rotary.rows([(past, past + 1) for past in SAMPLE_PASTS])[blocks.rotary_kinds[0]]
    ours = FusedBlock.of(layer, 0, blocks.shape, tables)
    assert ours is not None and (ours._window, ours._scale) == (4096, 0.5)


def test_more_rows_than_pay_run_as_the_library_has_it(tmp_path, monkeypatch):
    blocks, taken = load("llama", tmp_path), []
    real = FusedBlock.run

    def run(self: FusedBlock, hidden: torch.Tensor, *rest) -> torch.Tensor:
        taken.append(hidden.shape[1])
        return real(self, hidden, *rest)

    monkeypatch.setattr(FusedBlock, "run", run)
    executor, hidden = Executor(blocks), torch.randn(1, 64)
    assert fused(blocks) is not None and taken == [len(SAMPLE_PASTS)]
    for index in range(1, 4):
        fused(blocks, index)
    taken.clear()
    blocks.few_rows.most = 3
    for rows in (1, 3, 4):
        executor.run([PassItem(blocks.seat(0, 4), hidden) for _ in range(rows)])
    executor.run([PassItem(blocks.seat(0, 4), torch.randn(2, 64))])  # a chunk
    executor.run([PassItem(blocks.seat(0, 4), hidden), PassItem(blocks.seat(0, 4), torch.randn(5, 64))])
    assert taken == [1] * 4 + [3] * 4
