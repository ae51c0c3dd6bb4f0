"""What a peer is told at start, checked before anything is begun."""

from __future__ import annotations

import pytest
import torch

from peer.config import PeerConfig
from peer.sizes import parse_size
from routing.errors import BadInput, NoSuchDevice


def test_a_region_that_nobody_could_ask_for_is_refused() -> None:
    assert PeerConfig(model="m", region="EU-west").region == "EU-west"
    with pytest.raises(BadInput, match="'my home' is not a region"):
        PeerConfig(model="m", region="my home")


@pytest.mark.parametrize(
    ("text", "size"), [("4G", 4 << 30), ("1.5g", 3 << 29), ("900M", 900 << 20), ("2KiB", 2048), ("65536", 65536)]
)
def test_sizes_are_written_with_a_suffix(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "4X", "-1G", "G", "1e9", "4 G G"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadInput, match="is not a size"):
        parse_size(text)


def test_the_best_device_that_is_here_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"cuda": 0, "mps": False}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has["cuda"] > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["cuda"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has["mps"])
    assert PeerConfig(model="m").device == "cpu"
    with pytest.raises(NoSuchDevice, match="no device cuda"):
        PeerConfig(model="m", device="cuda")
    has["mps"] = True
    assert PeerConfig(model="m").device == "mps"
    has["cuda"] = 2
    assert PeerConfig(model="m").device == "cuda" and PeerConfig(model="m", device="cuda:1").device == "cuda:1"
    assert PeerConfig(model="m", device="cpu").device == "cpu"
    with pytest.raises(NoSuchDevice, match="cuda:2: 2 of its kind are here"):
        PeerConfig(model="m", device="cuda:2")
    for nonsense in ("gpu", "meta", "cuda:x"):
        with pytest.raises(BadInput, match="is not a device"):
            PeerConfig(model="m", device=nonsense)
