"""What tests of all parts share: one torch thread, and either set of kernels."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

from swarm import native

hypothesis.settings.register_profile("swarm", deadline=None)  # that a machine is busy is no error
hypothesis.settings.load_profile("swarm")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native_kernels() -> Any:
    """Built from the source as it stands. Not in a folder of their own: a process can load them only once."""
    if not shutil.which("c++"):
        pytest.skip("this machine has no C++ compiler")
    native.build()
    assert native.load()
    return native.kernels()


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both sets in turn, as the code under test finds them; None for torch's own."""
    ops = request.getfixturevalue("native_kernels") if request.param == "native" else None
    monkeypatch.setattr(native, "_loaded", ops)
    return ops
