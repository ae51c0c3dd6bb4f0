"""Owns which weights of a layer are packed: those of its linear layers, and of a mixture's experts. On a CPU that is
`swarm/quantized.py`, elsewhere bitsandbytes. The rest (norms, biases, routers) stays in the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from peer.cuda import quantized_linear
from routing.errors import UnsupportedQuantization
from swarm.experts import PRODUCTS, PackedExperts, are_packable, matrices
from swarm.few_rows import FewRows, FewRowsLinear
from swarm.library_int4 import LibraryInt4Linear
from swarm.quantized import NONE, importance_after, row_bytes

if TYPE_CHECKING:
    from transformers.pytorch_utils import Conv1D


def linears(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear | Conv1D]]:
    """(parent, name, product) of those that the library has as layers of their own."""
    for parent, name, child in _children(layer):
        if type(child) is torch.nn.Linear or type(child).__name__ == "Conv1D":  # the library's
            yield parent, name, cast("torch.nn.Linear | Conv1D", child)


def _mixtures(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """(parent, name, experts)."""
    for parent, name, child in _children(layer):
        if are_packable(child):
            yield parent, name, child


def _children(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Of all modules, as they are now."""
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child


def weights(layer: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters that are packed, each with its matrices: [outputs, inputs], or [experts, outputs, inputs]."""
    for _, _, linear in linears(layer):
        yield linear.weight, as_linear(linear).weight
    for _, _, experts in _mixtures(layer):
        for product in PRODUCTS:
            yield getattr(experts, product), matrices(experts, product)


def check_packable(layer: torch.nn.Module, quantization: str, device: torch.device | str) -> None:
    """Before it has weights. Raises UnsupportedQuantization where most of them would stay in the dtype."""
    if quantization == NONE:
        return
    kind, known = torch.device(device).type, {id(parameter) for parameter, _ in weights(layer)}
    if kind != "cpu" and any(_mixtures(layer)):
        raise UnsupportedQuantization(
            f"a mixture's experts are not quantized on {kind} yet", advice="Use --quantize none, or --device cpu."
        )
    for name, parameter in layer.named_parameters():
        if parameter.dim() > 2 and id(parameter) not in known:
            raise UnsupportedQuantization(
                f"{name} holds matrices in a way that is not known, so they cannot be quantized",
                advice="Use --quantize none.",
            )


def sizes(layers: Sequence[torch.nn.Module], dtype: torch.dtype, quantization: str) -> Iterator[int]:
    """Bytes of each parameter of layers without weights, once they are loaded on a CPU."""
    for layer in layers:
        packed = {id(parameter): each for parameter, each in weights(layer)} if quantization != NONE else {}
        for parameter in layer.parameters():
            if id(parameter) in packed:
                *outputs, inputs = packed[id(parameter)].shape
                yield torch.Size(outputs).numel() * row_bytes(inputs, quantization)
            else:
                yield parameter.numel() * dtype.itemsize


def quantize(
    layer: torch.nn.Module, quantization: str, few_rows: FewRows, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Packs its weights, and moves it to the device, all else in `dtype`."""
    ours = torch.device(device).type == "cpu"
    important = importances(layer) if ours else {}
    for parent, name, child in linears(layer):
        linear = as_linear(child)
        if ours:
            packed = FewRowsLinear.packing(linear, few_rows, quantization, important.get(child))
            setattr(parent, name, LibraryInt4Linear.instead(packed, dtype))
        else:
            setattr(parent, name, quantized_linear(linear, quantization, dtype))
    for parent, name, experts in _mixtures(layer):
        setattr(parent, name, PackedExperts(experts, few_rows, quantization))
    layer.to(dtype)  # what is floating-point yet
    layer.to(device)


def importances(layer: torch.nn.Module) -> dict[torch.nn.Module, torch.Tensor]:
    """For `quantized.pack`, of products that come after one or two others of their module, input by input, as down_proj
    after gate_proj and up_proj: what is large there has large weights before it.
    """
    found: dict[torch.nn.Module, torch.Tensor] = {}
    modules: dict[torch.nn.Module, list[tuple[torch.nn.Module, torch.Tensor]]] = {}
    for parent, _, child in linears(layer):
        modules.setdefault(parent, []).append((child, as_linear(child).weight))
    for products in modules.values():
        for product, weight in products:
            outputs, inputs = weight.shape
            before = [other for _, other in products if other.shape in ((inputs, outputs), (2 * inputs, outputs))]
            if inputs > outputs and len(before) == len(products) - 1 and 1 <= len(before) <= 2:
                found[product] = importance_after(torch.cat([other.view(-1, inputs, outputs) for other in before]))
    return found


def as_linear(product: torch.nn.Linear | Conv1D) -> torch.nn.Linear:
    """gpt2's Conv1D is a linear layer with its weight transposed."""
    if isinstance(product, torch.nn.Linear):
        return product
    inputs, outputs = product.weight.shape
    with torch.device("meta"):
        linear = torch.nn.Linear(inputs, outputs)
    linear.weight, linear.bias = torch.nn.Parameter(product.weight.T, requires_grad=False), product.bias
    return linear
