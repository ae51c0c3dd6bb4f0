"""A span is loaded and nothing else, all of it, once; what is not stored is what the library would compute."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from peer.attention import NAME
from peer.blocks import (
    Loading,
    RotaryTables,
    cache_shape,
    estimated_block_bytes,
)
from routing.errors import BadInput, DamagedWeights
from routing.types import Span
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
from swarm.memory import ALIGNMENT, HUGE_PAGE
from tests.tiny import LONGROPE, make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama(tmp_path):
    return make_tiny("llama", tmp_path)


def test_only_the_span_is_read_each_block_checked_before(checkpoint, monkeypatch):
    family, available = family_of(checkpoint.config), checkpoint.tensor_names()
    events: list[tuple[str, tuple[str, ...]]] = []
    load = type(checkpoint).load

    def spy(self, names, dtype=None):
        events.append(("load", tuple(names)))
        return load(self, names, dtype)

    monkeypatch.setattr(type(checkpoint), "load", spy)
    reports = []
    Loading(
        checkpoint,
        family,
        Span(1, 3),
        torch.float32,
        progress=lambda label, done, total: reports.append((done, total)),
        check=lambda names: events.append(("check", tuple(names))),
    ).load_all()
    wanted = [family.block_tensors(checkpoint.config, index, available) for index in (1, 2)]
    assert events == [(what, names) for names in wanted for what in ("check", "load")]
    assert reports == [(1, 2), (2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_all_there_once_and_cost_what_was_said(checkpoint, dtype):
    family = family_of(checkpoint.config)
    blocks = Loading(checkpoint, family, Span(1, 4), dtype).load_all()
    for index, (layer, nbytes) in enumerate(zip(blocks.layers, blocks.block_bytes, strict=True), start=1):
        tensors = [*layer.parameters(), *layer.buffers()]
        assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors)
        assert all(tensor.dtype == dtype for tensor in tensors)
        assert sum(tensor.nbytes for tensor in tensors) == nbytes
        assert nbytes == estimated_block_bytes(checkpoint.config, family, index, dtype)
    assert blocks.nbytes == sum(blocks.block_bytes)
    # Storages, not shapes: a view into something larger would keep that alive.
    tensors = [tensor for layer in blocks.layers for tensor in (*layer.parameters(), *layer.buffers())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) <= blocks.nbytes + len(tensors) * ALIGNMENT + HUGE_PAGE
    assert blocks.shape == cache_shape(checkpoint.config, family, dtype)


def test_the_configuration_given_stays_as_it_is(checkpoint):
    before = dict(vars(checkpoint.config))
    Loading(checkpoint, family_of(checkpoint.config), Span(0, 1), torch.float32).load_all()
    assert vars(checkpoint.config) == before
    assert checkpoint.reference_model().config._attn_implementation != NAME


def test_layers_know_their_place(checkpoint):
    blocks = Loading(checkpoint, family_of(checkpoint.config), Span(2, 4), torch.float32).load_all()
    # Some MLPs (hunyuan) have a place as well, which is None and never read.
    places = {vars(module).get("layer_idx") for layer in blocks.layers for module in layer.modules()}
    assert places - {None} == {2, 3}


def test_blocks_that_are_not_there_are_refused(checkpoint):
    family = family_of(checkpoint.config)
    with pytest.raises(BadInput, match="4"):
        Loading(checkpoint, family, Span(3, 5), torch.float32).load_all()
    blocks = Loading(checkpoint, family, Span(1, 3), torch.float32).load_all()
    for entry, exit in ((0, 2), (2, 4), (2, 2)):
        with pytest.raises(BadInput):
            blocks.seat(entry, exit)


def test_a_tensor_of_another_shape_is_damage(llama):
    config = json.loads((llama / "config.json").read_text())
    config["intermediate_size"] += 8
    (llama / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(str(llama))
    with pytest.raises(DamagedWeights, match=r"mlp.*block 1.*136"):
        Loading(checkpoint, family_of(checkpoint.config), Span(1, 2), torch.float32).load_all()


def test_a_missing_tensor_is_damage(llama):
    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, llama / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(llama))
    family = family_of(checkpoint.config)
    Loading(checkpoint, family, Span(0, 1), torch.float32).load_all()
    with pytest.raises(DamagedWeights, match="up_proj"):
        Loading(checkpoint, family, Span(0, 2), torch.float32).load_all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_are_exactly_the_librarys(checkpoint, dtype):
    family, config = family_of(checkpoint.config), checkpoint.config
    rotary = family.rotary(config)
    kinds = sorted({kind for i in range(4) if (kind := family.rotary_kind(config, i)) is not None})
    tables = RotaryTables(family, config, kinds, dtype, "cpu")
    for spans in ([(5, 6)], [(0, 3), (40, 41), (7, 9)], [(700, 703)], [(3, 5), (1500, 1501)]):
        rows = tables.rows([(start, end, False) for start, end in spans])
        assert sorted(rows) == kinds
        for kind in kinds:
            positions = torch.cat([torch.arange(start, end) for start, end in spans])
            like = torch.empty(1, 1, dtype=dtype)
            expected = rotary(like, positions[None], kind) if kind else rotary(like, positions[None])
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows[kind], expected, strict=True))


def test_longrope_has_tables_for_each_regime(tmp_path):
    """Whatever else is asked for in the same pass or was asked for before."""
    checkpoint = open_checkpoint(str(make_tiny("phi3", tmp_path, **LONGROPE)))
    family = family_of(checkpoint.config)
    rotary = family.rotary(checkpoint.config)
    tables = RotaryTables(family, checkpoint.config, [""], torch.float32, "cpu")
    assert [tables.is_long(context) for context in (0, 24, 25)] == [False, False, True]
    like = torch.empty(1, 1)
    for last in (10, 24, 600, 2000):
        for long in (False, True):
            cos, _ = tables.rows([(5, 9, long), (last - 3, last, True)])[""]
            expected, _ = rotary(like, torch.arange(25 if long else 24)[None])
            assert torch.equal(cos[0, :4], expected[0, 5:9])
            expected, _ = rotary(like, torch.arange(max(25, last))[None])
            assert torch.equal(cos[0, 4:], expected[0, last - 3 : last])


def test_gemma3_has_two_kinds_of_rotary_embedding(tmp_path):
    checkpoint = open_checkpoint(str(make_tiny("gemma3_text", tmp_path)))
    blocks = Loading(checkpoint, family_of(checkpoint.config), Span(0, 4), torch.float32).load_all()
    assert blocks.rotary_kinds == ("sliding_attention", "full_attention") * 2
    tables = blocks.rotary.rows([(0, 9, False)])
    assert not torch.equal(tables["sliding_attention"][0], tables["full_attention"][0])


def test_linears_choose_their_kernel_and_lie_in_one_stretch(llama):
    checkpoint = open_checkpoint(str(llama))
    for dtype in (torch.bfloat16, torch.float32):
        blocks = Loading(checkpoint, family_of(checkpoint.config), Span(0, 2), dtype).load_all()
        weights = [linear.weight for linear in blocks.linears()]
        assert len(weights) == 14
        starts = [weight.data_ptr() for weight in weights]
        assert max(starts) - min(starts) < blocks.nbytes
        parameters = [parameter for layer in blocks.layers for parameter in layer.parameters()]
        assert all(parameter.is_contiguous() and parameter.data_ptr() % 64 == 0 for parameter in parameters)
