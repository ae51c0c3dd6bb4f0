"""What a peer is told at start, checked before anything is begun."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner

from peer import __main__ as command
from peer import borrowed
from peer.capacity import Speed
from peer.config import PeerConfig
from peer.node import Serving
from peer.sizes import parse_size
from routing.errors import BadInput, ModelNotFound, NoSuchDevice, Unreachable
from routing.types import Span
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.manifest import Manifest
from swarm.terminal import Console


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


@pytest.mark.parametrize(
    ("options", "environment", "limit"),
    [([], {}, 64 << 30), ([], {"SWARM_MODEL_CACHE": "3G"}, 3 << 30),
     (["--model-cache", "900M"], {"SWARM_MODEL_CACHE": "3G"}, 900 << 20), (["--model-cache", "0"], {}, 0)],
)  # fmt: skip
def test_models_from_others_take_what_the_owner_allows(
    options: list[str], environment: dict[str, str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[PeerConfig] = []

    async def serve(configs: list[PeerConfig], *_: object) -> None:
        told.extend(configs)

    monkeypatch.setattr(command, "_serve", serve)
    monkeypatch.setattr(command, "run", asyncio.run)
    for name in ("setup_logging", "_import"):
        monkeypatch.setattr(command, name, lambda *_: None)
    monkeypatch.delenv("SWARM_MODEL_CACHE", raising=False)
    result = CliRunner().invoke(command.app, ["m", *options], env=environment)
    assert result.exit_code == 0 and [config.model_cache_bytes for config in told] == [limit]


class Nobody:
    """The swarm's network as who is alone finds it."""

    peer_id = "me"

    async def open(self, peer_id: str, protocol: str, timeout_s: float) -> NoReturn:
        raise Unreachable(f"{peer_id} is not there")


async def test_before_a_model_is_borrowed_others_make_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowed, "default_cache_dir", lambda: tmp_path)
    founder = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    join, manifest = JoinCode(bootstrap=(founder,), fingerprint=bytes(32)), Manifest(config_hash=b"", tensors={})
    for limit, left in ((1 << 20, True), (1000, False)):
        old = tmp_path / "models" / "old"
        old.mkdir(parents=True, exist_ok=True)
        (old / "weights").write_bytes(bytes(100_000))
        absent = borrowed.Borrowed(Nobody(), join, manifest, ModelNotFound("no"), limit)
        async with AsyncExitStack() as stack:
            with pytest.raises(ModelNotFound):
                await absent.open_model(stack)
        assert old.exists() == left


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
    has["cuda"] = 1
    assert PeerConfig(model="m").devices == ("cuda",)
    has["cuda"] = 3
    assert PeerConfig(model="m").devices == ("cuda:0", "cuda:1", "cuda:2"), "all of them"
    assert PeerConfig(model="m", device="cuda:1").devices == ("cuda:1",)
    assert PeerConfig(model="m", device="cuda:2, cuda:0,cpu").devices == ("cuda:2", "cuda:0", "cpu")
    assert PeerConfig(model="m", device="cpu,cpu").devices == ("cpu", "cpu"), "each with a part of it"
    with pytest.raises(NoSuchDevice, match="cuda:3: 3 of its kind are here"):
        PeerConfig(model="m", device="cpu,cuda:3")
    for nonsense in ("gpu", "meta", "cuda:x", "cpu,gpu", "cpu,", ",", "cuda:0;cuda:1", "cpu,auto"):
        with pytest.raises(BadInput, match="is not a device"):
            PeerConfig(model="m", device=nonsense)
    for twice in ("cuda:1,cuda:1", "cuda,cpu,cuda:0", "mps,mps"):
        with pytest.raises(BadInput, match="is named twice"):
            PeerConfig(model="m", device=twice)


@pytest.mark.parametrize(
    ("device", "said"),
    [("cpu,gpu", "BadInput: 'gpu' is not a device"), ("cpu,", "BadInput: '' is not a device"),
     ("cpu,cuda:7", "NoSuchDevice: this machine has no device cuda:7")],
)  # fmt: skip
def test_a_device_that_cannot_be_is_named_by_the_command(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "setup_logging", lambda verbose: None)  # of this process
    result = CliRunner().invoke(command.app, ["m", "--device", device])
    assert result.exit_code in (2, 6) and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("devices", "said"),
    [(("cuda:0 (blocks 0:20)", "cuda:1 (blocks 20:30)"), "computing on cuda:0 (blocks 0:20) and cuda:1 (blocks 20:30)"),
     (("cpu",), None)],
)  # fmt: skip
def test_an_owner_is_told_which_device_has_what(
    devices: tuple[str, ...], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    span, speed = Span(0, 30), Speed(decode={1: 1e-3}, prefill={64: 1e-2})
    serving = Serving(
        model="m", peer_id="me", span=span, loads=span, n_blocks=30, join_code="code", address="here",
        weights_bytes=1 << 30, devices=devices, dtype="float32", cache_positions=1000, speed=speed,
    )  # fmt: skip
    command._announce(serving, Console())
    out = capsys.readouterr().out
    assert said in out if said else "computing on" not in out
    command._announce(serving, Console(as_json=True))
    assert json.loads(capsys.readouterr().out)["devices"] == list(devices)
