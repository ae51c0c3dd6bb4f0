"""`python -m bench.losses MODEL`: what quantized weights change, without a swarm: JSON on stdout.

The next token's distribution on the benchmark's texts, by the local model in fp32 with its blocks' weights as they are
and packed and unpacked again: the mean KL divergence in nats. A file may hold weights that are on the grid of 4 bits
already; so the same again with each weight moved at random by up to half a step of such a grid.
"""

from __future__ import annotations

import json
import sys
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

from bench.prompts import PROMPTS
from peer.packing import importances
from swarm import native
from swarm.checkpoint import open_checkpoint
from swarm.few_rows import FewRows, few_rows_linear
from swarm.quantized import GROUP, QUANTIZATIONS, pack, unpack

STEPS = 15  # of 4 bits
ROWS = 4


class Texts:
    """A model, and what it says after each token of the texts."""

    def __init__(self, model: Any, tokenizer: Any):
        self._model, self._ids = model, [torch.tensor([list(tokenizer(text).input_ids)]) for text in PROMPTS]
        head = model.get_output_embeddings()
        self._linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        self.weights = [linear.weight.detach().clone() for linear in self._linears]

    def packed(self, quantization: str) -> list[torch.Tensor]:
        """The weights that the model has now, as they are once packed."""
        important = {linear: each for layer in self._model.model.layers for linear, each in importances(layer).items()}
        weights = ((linear.weight, important.get(linear)) for linear in self._linears)
        return [unpack(pack(each, quantization, counts), each.shape[1], torch.float32) for each, counts in weights]

    def put(self, weights: list[torch.Tensor]) -> None:
        for linear, weight in zip(self._linears, weights, strict=True):
            linear.weight.copy_(weight)

    def says(self) -> list[torch.Tensor]:
        """Logarithms of probabilities [tokens, vocabulary] of each text."""
        return [self._model(ids).logits[0].float().log_softmax(-1) for ids in self._ids]


def divergence(truth: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    each = [(p.exp() * (p - q)).sum(-1) for p, q in zip(truth, other, strict=True)]
    return float(torch.cat(each).mean())


def moved(weight: torch.Tensor) -> torch.Tensor:
    """Inputs must be whole groups."""
    groups = weight.view(len(weight), -1, GROUP)
    step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
    return (groups + (torch.rand_like(groups) - 0.5) * step).view(weight.shape)


def of_random_products(shapes: set[tuple[int, ...]], quantization: str) -> list[float]:
    """Of each shape with normal weights and rows: what the product is off, over its size."""
    errors = []
    for outputs, inputs in sorted(shapes):  # type: ignore[misc]
        weight, x = torch.randn(outputs, inputs), torch.randn(ROWS, inputs)
        exact = F.linear(x, weight)
        found = few_rows_linear(x, pack(weight, quantization), None, FewRows(torch.float32, packed=True))
        errors.append(float((found - exact).norm() / exact.norm()))
    return errors


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    native.load()
    checkpoint = open_checkpoint(sys.argv[1])
    texts = Texts(checkpoint.reference_model(torch.float32), checkpoint.tokenizer())
    facts: dict[str, Any] = {"event": "done", "linear_weights": sum(weight.numel() for weight in texts.weights)}
    shapes = {tuple(weight.shape) for weight in texts.weights}
    facts["products"] = {name: mean(of_random_products(shapes, name)) for name in QUANTIZATIONS}
    for kind, weights in (("kl", texts.weights), ("kl_moved", [moved(weight) for weight in texts.weights])):
        texts.put(weights)
        truth, facts[kind] = texts.says(), {}
        for name in QUANTIZATIONS:
            texts.put(weights)
            texts.put(texts.packed(name))
            facts[kind][name] = divergence(truth, texts.says())
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
