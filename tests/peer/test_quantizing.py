"""Blocks with quantized weights: what they take, that they compute with just these; and which ones a peer chooses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from peer import cuda, devices, quantizing
from peer.blocks import Blocks, Loading, estimated_block_bytes, packed_shapes
from peer.config import PeerConfig
from peer.cuda import check_device
from peer.executor import Executor, PassItem
from peer.packing import check_packable, importances, quantize
from peer.quantizing import choose, pays
from routing.errors import BadInput, UnsupportedQuantization
from routing.types import Span
from swarm import native
from swarm.checkpoint import open_checkpoint
from swarm.compute import ComputeThread
from swarm.experts import PRODUCTS, PackedExperts, matrices
from swarm.families import family_of
from swarm.few_rows import FewRows, FewRowsLinear
from swarm.library_int4 import LibraryInt4Linear
from swarm.memory import ALIGNMENT, HUGE_PAGE
from swarm.quantized import INT4, INT8, NF4, NONE, QUANTIZATIONS, pack, unpack
from tests.tiny import make_tiny

DTYPES = (torch.float32, torch.bfloat16)
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llama(tmp_path):
    return open_checkpoint(str(make_tiny("llama", tmp_path)))


def load(checkpoint, quantization: str, dtype: torch.dtype = torch.float32) -> Blocks:
    family = family_of(checkpoint.config)
    return Loading(checkpoint, family, Span(0, 4), dtype, quantization=quantization).load_all()


def put_unpacked(plain: Blocks, quantized: Blocks) -> None:
    """Into the linear layers and the experts of `plain`, the weights that `quantized` computes with."""
    for ours, theirs in zip(plain.layers, quantized.layers, strict=True):
        for name, module in theirs.named_modules():
            if isinstance(module, PackedExperts):
                for product in PRODUCTS:
                    target = matrices(ours.get_submodule(name), product)
                    for wide, packed in zip(target, getattr(module.library, product), strict=True):
                        wide.copy_(unpack(packed, target.shape[2], torch.float32))
            if isinstance(module, FewRowsLinear):
                weight = unpack(module.weight, module.in_features, torch.float32)
                target = ours.get_submodule(name).weight
                target.copy_(weight if isinstance(ours.get_submodule(name), torch.nn.Linear) else weight.T)


def test_blocks_of_every_family_compute_with_just_the_packed_weights(checkpoint, monkeypatch):
    compute_with_just_the_packed_weights(checkpoint, INT8, monkeypatch)


@pytest.mark.parametrize("family", ["llama", "gpt2", *MIXTURES])
@pytest.mark.parametrize("quantization", [INT4, NF4])
def test_so_they_do_however_they_are_packed(tmp_path, family, quantization, monkeypatch):
    compute_with_just_the_packed_weights(open_checkpoint(str(make_tiny(family, tmp_path))), quantization, monkeypatch)


def compute_with_just_the_packed_weights(checkpoint, quantization, monkeypatch):
    """By torch's kernels, which round next to nothing; how near ours are is told of products and of experts alone."""
    monkeypatch.setattr(native, "_loaded", None)
    quantized, plain = load(checkpoint, quantization), load(checkpoint, NONE)
    assert any(isinstance(module, FewRowsLinear) for layer in quantized.layers for module in layer.modules())
    torch.manual_seed(0)
    put_unpacked(plain, quantized)
    chunks = [torch.randn(rows, plain.shape.hidden) for rows in (7, 1)]
    results = []
    for blocks in (quantized, plain):
        seat = blocks.seat(0, 4)
        results.append([Executor(blocks).run([PassItem(seat, chunk)]).outputs[0] for chunk in chunks])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(("quantization", "dtype"), [(INT8, torch.float32), (INT4, torch.bfloat16)])
def test_they_take_what_was_said(checkpoint, quantization, dtype):
    blocks, family = load(checkpoint, quantization, dtype), family_of(checkpoint.config)
    said = [estimated_block_bytes(checkpoint.config, family, index, dtype, quantization) for index in range(4)]
    assert list(blocks.block_bytes) == said
    for layer in blocks.layers:
        assert {tensor.dtype for tensor in layer.parameters()} == {torch.uint8, dtype}
        assert not any(tensor.requires_grad for tensor in layer.parameters())


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_are_packed_from_what_is_stored_whatever_the_dtype(native_kernels, monkeypatch, llama, quantization):
    monkeypatch.setattr(native, "_loaded", native_kernels)
    packed = [[each.weight for each in load(llama, quantization, dtype).linears()] for dtype in DTYPES]
    assert all(torch.equal(*pair) for pair in zip(*packed, strict=True))


def test_they_lie_in_one_stretch_once(checkpoint):
    blocks = load(checkpoint, INT4, torch.bfloat16)
    tensors = [tensor for layer in blocks.layers for tensor in layer.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) <= blocks.nbytes + len(tensors) * ALIGNMENT + HUGE_PAGE


def test_every_matrix_is_packed_but_routers(checkpoint):
    """Linear layers, gpt2's, and experts."""
    blocks, family = load(checkpoint, INT8), family_of(checkpoint.config)
    for layer in blocks.layers:
        wide = [name for name, each in layer.named_parameters() if each.dtype != torch.uint8 and each.dim() > 1]
        assert all(name.endswith(("gate.weight", "router.weight", "_bias", "_norm.weight")) for name in wide), wide
    packed = [tensor for layer in blocks.layers for tensor in layer.parameters() if tensor.dtype == torch.uint8]
    shapes = [shape for index in range(4) for shape in packed_shapes(checkpoint.config, family, index)]
    assert sorted(tensor.shape[-2] for tensor in packed) == sorted(outputs for outputs, _ in shapes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("ours", [True, False])
def test_torchs_product_is_taken_where_ours_are_not_and_it_is_near_enough(
    native_kernels, monkeypatch, llama, quantization, dtype, ours
):
    monkeypatch.setattr(native, "_loaded", native_kernels if ours else None)
    blocks = load(llama, quantization, dtype)
    taken = [module for layer in blocks.layers for module in layer.modules() if isinstance(module, LibraryInt4Linear)]
    wanted = not ours and quantization == INT4 and dtype == torch.bfloat16
    assert (len(taken), len(blocks.linears())) == ((28, 0) if wanted else (0, 28))


def test_important_is_what_has_large_weights_before_it(llama):
    layer = llama.reference_model(torch.float32).model.layers[1].requires_grad_(False)
    down = layer.mlp.down_proj
    layer.mlp.gate_proj.weight[[7, 60]] *= 30
    (found,) = importances(layer).items()
    assert found[0] is down
    gate, up = (linear.weight.square().sum(1) for linear in (layer.mlp.gate_proj, layer.mlp.up_proj))
    torch.testing.assert_close(found[1].float(), gate * up)
    quantize(layer, INT8, FewRows(torch.float32, packed=True), torch.float32, "cpu")
    assert torch.equal(layer.mlp.down_proj.weight, pack(down.weight, INT8, gate * up))
    assert not torch.equal(layer.mlp.down_proj.weight, pack(down.weight, INT8))


def test_it_is_known_of_the_second_half_of_an_mlp_alone(checkpoint):
    layer = family_of(checkpoint.config).build_block(checkpoint.config, 0)
    found = importances(layer)
    names = {name.rpartition(".")[2] for name, module in layer.named_modules() if module in found}
    assert names <= {"down_proj", "c_proj", "fc2", "dense_4h_to_h"}
    assert names or checkpoint.config.model_type in MIXTURES  # of experts: tests/swarm/test_experts.py


# -- which one -------------------------------------------------------------------------------------------------


async def chosen(checkpoint, **options) -> str:
    config = PeerConfig(model="m", **options)
    async with ComputeThread(threads=1) as thread:
        return await choose(config, checkpoint.config, family_of(checkpoint.config), thread)


async def test_what_was_asked_for_is_taken(llama, monkeypatch):
    asked = []

    async def prepare() -> bool:
        asked.append(True)
        return False

    monkeypatch.setattr(native, "prepare", prepare)
    for quantization in (NONE, *QUANTIZATIONS):
        assert await chosen(llama, quantize=quantization) == quantization
    assert len(asked) == len(QUANTIZATIONS)  # before weights are laid out, if they are packed


async def test_auto_is_int8_where_that_is_quicker(llama, monkeypatch):
    async def ready() -> bool:
        return True

    monkeypatch.setattr(native, "prepare", ready)
    quicker = SimpleNamespace(answer=True)
    monkeypatch.setattr(quantizing, "pays", lambda *arguments: quicker.answer)
    assert await chosen(llama, quantize="auto", blocks=Span(0, 4)) == INT8
    with monkeypatch.context() as patch:
        patch.setattr(devices, "choose_devices", lambda wanted: (wanted,))  # as if it were here
        assert await chosen(llama, quantize="auto", device="cuda") == NONE
    quicker.answer = False
    assert await chosen(llama, quantize="auto") == NONE


async def test_auto_is_int4_where_int8_does_not_fit(llama, monkeypatch):
    async def ready() -> bool:
        return True

    family = family_of(llama.config)
    needed = sum(estimated_block_bytes(llama.config, family, index, torch.float32, INT8) for index in range(4))
    monkeypatch.setattr(native, "prepare", ready)
    monkeypatch.setattr(quantizing, "pays", lambda *arguments: True)
    for spare, wanted in ((0, INT8), (-1, INT4)):
        monkeypatch.setattr(quantizing, "free_memory", lambda spare=spare: quantizing.RESERVE_BYTES + needed + spare)
        assert await chosen(llama, quantize="auto", blocks=Span(0, 4)) == wanted
    monkeypatch.setattr(quantizing, "free_memory", lambda: 1 << 40)
    monkeypatch.setattr(quantizing, "estimated_block_bytes", lambda *arguments: 1 << 20)
    for limit, wanted in ((4 << 20, INT8), ((4 << 20) - 1, INT4)):
        assert await chosen(llama, quantize="auto", blocks=Span(0, 4), max_memory_bytes=limit) == wanted


async def test_auto_is_none_without_the_kernels(llama, monkeypatch):
    async def none() -> bool:
        return False

    monkeypatch.setattr(native, "prepare", none)
    assert await chosen(llama, quantize="auto") == NONE


def test_what_pays_is_measured(native_kernels, monkeypatch):
    """On a clock that goes by the bytes of weights that were read, or by how many were unpacked."""
    clock = [0.0]
    by_bytes = lambda linear: linear.weight.nbytes  # noqa: E731
    cost = {"of": by_bytes}
    monkeypatch.setattr(quantizing, "MEASURED_BYTES", 1 << 16)
    monkeypatch.setattr(quantizing.time, "perf_counter", lambda: clock[0])

    def forward(self: FewRowsLinear, x: torch.Tensor) -> None:
        clock[0] += cost["of"](self)

    monkeypatch.setattr(FewRowsLinear, "forward", forward)
    assert pays([(64, 64), (32, 64)], torch.bfloat16)
    cost["of"] = lambda linear: linear.weight.nbytes * (5 if linear.weight.dtype == torch.uint8 else 1)
    assert not pays([(64, 64), (32, 64)], torch.bfloat16)
    assert not pays([], torch.bfloat16)  # no linear layers


# -- what cannot be --------------------------------------------------------------------------------------------


def test_an_unknown_name_is_refused():
    with pytest.raises(BadInput, match="'int3' is not known; choose one of none, int8, int4, nf4, auto"):
        PeerConfig(model="m", quantize="int3")


def test_what_a_device_cannot_do_is_told_before_anything_is_loaded(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(cuda, "import_module", missing)
    for quantization, device, advice in (
        (INT8, "cuda", r"pip install 'swarm-runtime\[quantization\]'"),
        (NF4, "cuda:1", r"pip install 'swarm-runtime\[quantization\]'"),
        (INT4, "cuda", "nf4"),
        (INT8, "mps", "none"),
    ):
        with pytest.raises(UnsupportedQuantization) as refused:
            check_device(quantization, device)
        assert refused.value.exit_code == 6
        assert refused.match(quantization) and advice.replace("\\", "") in refused.value.advice
    for quantization, device in ((NONE, "cuda"), ("auto", "mps"), (INT4, "cpu")):
        check_device(quantization, device)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixtures_experts_are_refused_on_a_gpu_before_anything_is_loaded(family, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(str(make_tiny(family, tmp_path)))
    monkeypatch.setattr(type(checkpoint), "load", None)
    source = checkpoint, family_of(checkpoint.config), Span(0, 1), torch.float32
    with pytest.raises(UnsupportedQuantization, match="experts are not quantized on cuda"):
        Loading(*source, "cuda", quantization=INT8).load_all()


def test_matrices_of_a_kind_that_is_not_known_are_refused(tmp_path):
    checkpoint = open_checkpoint(str(make_tiny("mixtral", tmp_path)))
    layer = family_of(checkpoint.config).build_block(checkpoint.config, 0)
    check_packable(layer, INT8, "cpu")
    layer.mlp.experts.has_gate = False  # as if it had another form
    with pytest.raises(UnsupportedQuantization, match=r"mlp\.experts\.gate_up_proj"):
        check_packable(layer, INT8, "cpu")
    check_packable(layer, NONE, "cpu")
