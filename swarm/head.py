"""Owns the client's part of the model: embeddings before the first block, final norm and head after the last.

It is on the path of every token (in fp32 a fifth of the time of a small model). Knows no blocks, no session,
no network.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from routing.errors import BadInput, PromptTooLong
from swarm.checkpoint import Checkpoint
from swarm.families import Family, text_config
from swarm.few_rows import FewRows, FewRowsNorm, few_rows_linear
from swarm.memory import Arena


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """Embeddings, final norm and head. Its methods may be called from any thread, also at once."""

    embedding: torch.Tensor  # [vocab, hidden]
    weight: torch.Tensor  # [vocab, hidden]; the same tensor as `embedding` if the model ties them
    norm: torch.nn.Module
    bias: torch.Tensor | None  # [vocab], of the logits (phi)
    positions: torch.Tensor | None  # [context + position_offset, hidden]: learned positions (gpt2)
    position_offset: int
    scale: float | None  # of the embeddings (gemma)
    logit_scale: float | None  # (cohere)
    softcap: float | None  # of the logits (gemma2)
    few_rows: FewRows

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, family: Family, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Head:
        """Reads only the client's tensors. Raises DamagedWeights, ModelError."""
        config = text_config(checkpoint.config)
        names = family.client_tensors(config, checkpoint.tensor_names())
        tensors = checkpoint.load(names.values(), dtype)
        by_role = {role: tensors.pop(name).to(device) for role, name in names.items()}
        if torch.device(device).type == "cpu":
            role = "head" if "head" in by_role else "embed"
            by_role[role] = Arena(by_role[role].nbytes).place(by_role[role])
        norm = family.build_norm(config)
        norm.load_state_dict(
            {role.removeprefix("norm."): tensor for role, tensor in by_role.items() if role.startswith("norm.")},
            assign=True,
        )
        return cls(
            embedding=by_role["embed"],
            weight=by_role.get("head", by_role["embed"]),
            norm=FewRowsNorm.of(norm.requires_grad_(False)),
            bias=by_role.get("head.bias"),
            positions=by_role.get("position"),
            position_offset=family.position_offset,
            scale=family.embed_scale(config, dtype),
            logit_scale=family.logit_scale(config),
            softcap=getattr(config, "final_logit_softcapping", None),
            few_rows=FewRows(dtype),
        )

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        held = [self.embedding, *self.norm.parameters()]
        held += [] if self.weight is self.embedding else [self.weight]
        held += [tensor for tensor in (self.bias, self.positions) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """token_ids [T], positions [T] (int64) -> hidden [T, hidden]. Raises BadInput, PromptTooLong."""
        if token_ids.numel() and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < self.embedding.shape[0]:
            raise BadInput(f"a token id is not in the model's vocabulary of {self.embedding.shape[0]}")
        hidden = F.embedding(token_ids, self.embedding)
        if self.scale is not None:
            hidden = hidden * self.scale
        if self.positions is not None:
            held = self.positions.shape[0] - self.position_offset
            if positions.numel() and int(positions.max()) >= held:
                raise PromptTooLong(f"the model holds {held} positions")
            hidden = hidden + F.embedding(positions + self.position_offset, self.positions)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, hidden] -> logits fp32 [N, vocab]. Rows are independent: sessions may share a call."""
        normed = self.norm(hidden.to(self.weight.dtype))
        if self.weight.is_cpu:
            logits = few_rows_linear(normed, self.weight, self.bias, self.few_rows)
        else:
            logits = F.linear(normed, self.weight, self.bias)
        if self.logit_scale is not None:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.float()
