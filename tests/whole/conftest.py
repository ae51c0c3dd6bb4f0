"""One tiny model and its local reference for all whole-swarm tests, and the event loop that real processes use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import uvloop

from tests.tiny import make_tiny
from tests.whole.reference import Reference

BLOCKS = 6


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of six blocks, sharp, one token a byte."""
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"), layers=BLOCKS, tokenizer=True)


@pytest.fixture(scope="session")
def local(tiny: Path) -> Iterator[Reference]:
    reference = Reference(tiny)
    yield reference
    print(f"\nwhole-swarm tests: {reference.ties} texts parted from the local one at a near tie")
