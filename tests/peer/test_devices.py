"""What stands behind an error of torch's or the system's: the real ones, but for a device that is gone."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peer import devices
from peer.capacity import free_memory
from peer.devices import computes, failure
from routing.errors import DeviceLost, NotEnoughMemory

MUCH = 1 << 60


@pytest.mark.parametrize(
    "take", [lambda: torch.empty(MUCH, dtype=torch.uint8), lambda: bytearray(MUCH), lambda: mmap.mmap(-1, MUCH)]
)
def test_too_little_memory_is_named(take: Callable[[], Any]) -> None:
    with pytest.raises((RuntimeError, MemoryError, OSError)) as caught:
        take()
    named = failure(caught.value, "cpu")
    assert isinstance(named, NotEnoughMemory) and named.exit_code == 6 and "--blocks" in named.advice


def test_too_little_memory_of_a_gpu_is_named() -> None:
    named = failure(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual"), "cuda:1")
    assert isinstance(named, NotEnoughMemory)
    assert str(named) == "the memory of cuda:1 is not enough: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_what_computes_is_not_taken_for_lost() -> None:
    assert computes("cpu") and failure(RuntimeError("sizes do not match"), "cpu") is None


def test_what_computes_nothing_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not computes("meta"), "which has tensors, and no values"
    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
    named = failure(error, "meta")
    assert isinstance(named, DeviceLost) and named.exit_code == 6 and "--device cpu" in named.advice
    assert str(named) == "meta does not compute any more: CUDA error: unspecified launch failure"
    monkeypatch.setattr(devices, "computes", lambda device: pytest.fail("a file that is not there says nothing of it"))
    assert failure(FileNotFoundError("config.json"), "meta") is None


def test_a_device_that_cannot_tell_its_memory_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: str) -> tuple[int, int]:
        raise torch.AcceleratorError("CUDA error: device not ready")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    monkeypatch.setattr(devices, "computes", lambda device: False)
    with pytest.raises(DeviceLost, match="device not ready"):
        free_memory("cuda:0")
