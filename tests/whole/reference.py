"""What one process computes locally with `transformers`, and the design's clause on exactness ("Exactness")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEAR_TIE = 1e-3
"""Where the two best logits are closer than this, another order of additions may choose the other token."""


class Reference:
    """A local model, by default the one in a folder, and the answers that it has given."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._take(model, AutoTokenizer.from_pretrained(folder))

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Reference:
        reference = cls.__new__(cls)
        reference._take(model, tokenizer)
        return reference

    def _take(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.ties = model.eval(), tokenizer, 0
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text).input_ids

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], **settings: Any) -> list[int]:
        """New tokens by transformers' own `generate`."""
        prompt = torch.tensor([list(ids)])
        out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        return out[0, len(ids) :].tolist()

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """With end-of-text tokens ignored."""
        known = self._greedy.get(tuple(ids), [])
        if len(known) < count:
            known = self.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)
            self._greedy[tuple(ids)] = known
        return known[:count]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Teacher-forced, fp32 [len(ids), vocab]."""
        return self.model(torch.tensor([list(ids)])).logits[0].float()

    def check(self, ids: Sequence[int], tokens: Sequence[int], count: int) -> None:
        """`tokens` are the `count` greedy ones after `ids`, or part from them where the best two are as good as equal.

        Compared with what `generate` gave, where it was asked; else, in one pass, with the best token at each
        position, given those before.
        """
        assert len(tokens) == count, f"{len(tokens)} tokens came, {count} were wanted"
        logits = None
        expected = self._greedy.get(tuple(ids), [])[:count]
        if len(expected) < count:
            logits = self.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
            expected = logits.argmax(-1).tolist()
        if list(tokens) == expected:
            return
        at = next(i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1])
        last = self.logits([*ids, *expected[:at]])[-1] if logits is None else logits[at]
        best, second = last.topk(2).values.tolist()
        assert best - second < NEAR_TIE, f"other tokens from {at} on (the best two are {best - second:.4f} apart)"
        self.ties += 1
        print(f"a near tie at token {at}: the two best logits are {best - second:.1e} apart")
