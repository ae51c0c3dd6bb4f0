"""`python -m bench.local_model MODEL DTYPE`: the yardstick: the whole model, `generate` of transformers."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from swarm.checkpoint import open_checkpoint
from swarm.codec import COMPUTE_DTYPES


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


def main() -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(sys.argv[1])
    tokenizer = checkpoint.tokenizer()
    model = checkpoint.reference_model(COMPUTE_DTYPES[sys.argv[2]])
    say({"event": "ready"})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "encode":
            say({"event": "done", "ids": [list(tokenizer(text).input_ids) for text in request["texts"]]})
        else:
            say(generate(model, request["ids"], request["new"]))


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
