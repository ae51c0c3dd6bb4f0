"""One tiny model and its local reference for all whole-swarm tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny import make_tiny
from tests.whole.launched import launch  # noqa: F401  a fixture for all
from tests.whole.reference import Reference

BLOCKS = 6


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of six blocks, sharp, one token a byte."""
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), layers=BLOCKS, tokenizer=True)


@pytest.fixture(scope="session")
def local(tiny: Path) -> Iterator[Reference]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference = Reference(tiny)
    yield reference
    torch.set_num_threads(threads)
    print(f"\nwhole-swarm tests: {reference.ties} texts parted from the local one at a near tie")
