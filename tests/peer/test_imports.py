"""What a peer need not wait for when it starts: each of these takes tenths of a second, some a whole one."""

from __future__ import annotations

import subprocess
import sys

from swarm.checkpoint import open_checkpoint
from tests.tiny import make_tiny

HEAVY = [
    "pydantic", "scipy", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers",
]  # fmt: skip
SERVES = """
import sys
import torch
import peer.__main__, peer.node
from peer.blocks import Blocks, Loading
from peer.capacity import measure
from pathlib import Path
from routing.types import Span
from swarm.checkpoint import open_checkpoint
from swarm.families import family_of
checkpoint = open_checkpoint(sys.argv[1], cache_dir=Path(sys.argv[2]))
measure(Loading(checkpoint, family_of(checkpoint.config), Span(0, 2), torch.float32).load_all())
print(*sys.modules)
"""


def imported(*arguments: str) -> set[str]:
    said = subprocess.run([sys.executable, "-c", SERVES, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return set(said.stdout.split())


def test_a_peer_of_a_family_with_layers_of_our_own_imports_no_modeling_code(tmp_path):
    folder, cache = make_tiny("llama", tmp_path / "model"), tmp_path / "cache"
    open_checkpoint(str(folder), cache_dir=cache)  # by the library: from now on its configuration is kept
    assert not imported(str(folder), str(cache)) & set(HEAVY)
