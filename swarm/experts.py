"""A mixture's experts with packed weights: each one's matrices are packed and computed with like a linear layer's.

The library holds the matrices of all experts of a block in one tensor for each of the two products; in some families
transposed, with biases, or with gates and values in turns. What comes between the products is its own code. Which
experts a row goes to, and what each counts, is the router's, whose weights stay as they are.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from swarm.few_rows import FewRows, few_rows_linear
from swarm.quantized import importance_after, pack

PRODUCTS = ("gate_up_proj", "down_proj")


def are_packable(module: Any) -> bool:
    """Whether it is a module of the library with experts of that kind."""
    if not getattr(module, "has_gate", False) or module.has_post_expert_norm:
        return False
    return all(getattr(module, product).dim() == 3 for product in PRODUCTS)


def matrices(library: Any, product: str) -> torch.Tensor:
    """[experts, outputs, inputs] of one of `PRODUCTS`."""
    weight = getattr(library, product)
    return weight.mT if library.is_transposed else weight


class PackedExperts(torch.nn.Module):
    """In place of the library's module, whose weights it packs."""

    def __init__(self, library: Any, few_rows: FewRows, quantization: str):
        super().__init__()
        self.library, self._few_rows = library, few_rows
        packed: tuple[list[torch.Tensor], ...] = [], []
        for opening, closing in zip(*(matrices(library, product) for product in PRODUCTS), strict=True):
            packed[0].append(pack(opening, quantization))
            packed[1].append(pack(closing, quantization, importance_after(_gates_and_values(library, opening))))
        for product, weights in zip(PRODUCTS, packed, strict=True):
            setattr(library, product, torch.nn.Parameter(torch.stack(weights), requires_grad=False))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """hidden [rows, size]; `chosen` experts of each row, and what each counts: both [rows, k] -> [rows, size]."""
        places = defaultdict(list)  # of the outputs, by expert
        for place, expert in enumerate(chosen.flatten().tolist()):
            places[expert].append(place)
        outputs = hidden.new_empty(chosen.numel(), hidden.shape[1])
        for expert, some in places.items():
            rows = hidden[[place // chosen.shape[1] for place in some]]
            gate_up = self._product(rows, "gate_up_proj", expert)
            outputs[some] = self._product(self.library._apply_gate(gate_up), "down_proj", expert)
        return (outputs.view(*chosen.shape, -1) * shares[..., None]).sum(1).to(hidden.dtype)

    def _product(self, x: torch.Tensor, product: str, expert: int) -> torch.Tensor:
        bias = getattr(self.library, f"{product}_bias")[expert] if self.library.has_bias else None
        return few_rows_linear(x, getattr(self.library, product)[expert], bias, self._few_rows)


def _gates_and_values(library: Any, opening: torch.Tensor) -> torch.Tensor:
    """[2 * inner, size] of one expert -> [2, inner, size]."""
    return opening.unflatten(0, (2, -1)) if library.is_concatenated else opening.unflatten(0, (-1, 2)).transpose(0, 1)
