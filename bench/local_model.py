"""`python -m bench.local_model MODEL DTYPE`: the yardstick: the whole model, `generate` of transformers."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from swarm import native
from swarm.checkpoint import open_checkpoint
from swarm.codec import COMPUTE_DTYPES, decode_rows, encode_rows
from swarm.frames import Codec


class Clock(BaseStreamer):
    """Notes when each new token is there. The first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.times.append(time.monotonic())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def generate(model: Any, ids: list[int], new: int) -> dict[str, Any]:
    clock = Clock()
    prompt = torch.tensor([ids])
    began = time.monotonic()
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        streamer=clock,
    )
    return {"event": "done", "began": began, "ids": output[0, len(ids) :].tolist(), "times": clock.times}


def loss(model: Any, texts: list[list[int]], codec: Codec, blocks: list[int]) -> dict[str, Any]:
    """What is lost when the inputs of those blocks go through a codec: mean KL of the next token, in nats, and how many
    of the likeliest tokens are others."""

    def through(module: Any, inputs: Any, options: Any) -> Any:
        hidden, *more = inputs
        rows = decode_rows(encode_rows(hidden[0], codec), codec, hidden.shape[-1]).to(hidden.dtype)
        return (rows[None], *more), options

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([model(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in texts])

    exact = logits()
    hooks = [model.model.layers[block].register_forward_pre_hook(through, with_kwargs=True) for block in blocks]
    lost = logits()
    for hook in hooks:
        hook.remove()
    kl = float((exact.exp() * (exact - lost)).sum(-1).mean())
    differ = int((exact.argmax(-1) != lost.argmax(-1)).sum())
    return {"event": "done", "kl": kl, "differ": differ, "positions": len(exact)}


def main() -> None:
    torch.set_num_threads(1)
    native.load()
    checkpoint = open_checkpoint(sys.argv[1])
    tokenizer = checkpoint.tokenizer()
    model = checkpoint.reference_model(COMPUTE_DTYPES[sys.argv[2]])
    say({"event": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "encode":
            say({"event": "done", "ids": [list(tokenizer(text).input_ids) for text in request["texts"]]})
        elif request["do"] == "loss":
            say(loss(model, request["texts"], Codec[request["codec"]], request["blocks"]))
        else:
            say(generate(model, request["ids"], request["new"]))


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
