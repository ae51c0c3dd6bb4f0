"""Quantized linear layers on a device that is not a CPU: bitsandbytes, imported here alone. On a CPU it is slower than
plain fp32.
"""

from __future__ import annotations

from importlib import import_module

import torch

from peer.config import AUTO
from routing.errors import UnsupportedQuantization
from swarm.quantized import INT4, INT8, NF4, NONE


def check_device(quantization: str, device: torch.device | str) -> None:
    """Before anything is loaded. Raises UnsupportedQuantization."""
    kind = torch.device(device).type
    if quantization in (NONE, AUTO) or kind == "cpu":
        return
    if kind != "cuda":
        raise UnsupportedQuantization(f"no weights in {quantization} on {kind}")
    if quantization == INT4:
        raise UnsupportedQuantization("int4 is for CPUs", advice="Use --quantize nf4 on CUDA, which takes as little.")
    try:
        import_module("bitsandbytes")
    except ImportError as error:
        raise UnsupportedQuantization(
            f"{quantization} on CUDA needs bitsandbytes: {error}",
            advice="Run: pip install 'swarm-runtime[quantization]', or use --quantize none.",
        ) from None


def quantized_linear(linear: torch.nn.Linear, quantization: str, dtype: torch.dtype) -> torch.nn.Module:
    """A layer of bitsandbytes in place of `linear` that computes in `dtype`; its weight is quantized when it is moved
    to the device.
    """
    modules = import_module("bitsandbytes").nn
    sizes = {"input_features": linear.in_features, "output_features": linear.out_features}
    bias, weight = linear.bias is not None, linear.weight.data.to(dtype).contiguous()
    if quantization == INT8:
        layer = modules.Linear8bitLt(**sizes, bias=bias, has_fp16_weights=False)
        layer.weight = modules.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        assert quantization == NF4
        layer = modules.Linear4bit(**sizes, bias=bias, quant_type=NF4, compute_dtype=dtype)
        layer.weight = modules.Params4bit(weight, requires_grad=False, quant_type=NF4)
    layer.bias = linear.bias
    return layer.eval()  # type: ignore[no-any-return]
