"""`python -m bench.make_moe FOLDER`: a random mixture of experts with the tokenizer of smollm2, some 400 MB in fp32."""

from __future__ import annotations

import json
import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from swarm.checkpoint import open_checkpoint


def main(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = open_checkpoint("smollm2").tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=576, num_hidden_layers=10, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, moe_intermediate_size=512, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=True,
        max_position_embeddings=8192, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps({"event": "done"}), flush=True)
    sys.stdin.read()  # whoever asked closes it


if __name__ == "__main__":
    main(sys.argv[1])
