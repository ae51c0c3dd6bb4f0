"""Weights from other peers: whole models come through, and whatever goes wrong on the way is noticed and gone round."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from routing.errors import DamagedWeights, ProtocolError, StartError, SwarmError, Unreachable, WrongModel
from swarm import lending, manifest
from swarm.borrowing import Borrower, in_use, make_room
from swarm.checkpoint import Checkpoint, open_checkpoint, packaged_model
from swarm.lending import PROTOCOL, lend
from swarm.plain_config import FOLDER
from swarm.progress import silent
from tests.full_disk import full_disk
from tests.tiny import make_tiny
from tests.whole.stand_ins import MemoryCarrier, MemoryNet

WANTED = "model.layers.2."


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "tiny", max_shard_size="100KB")


@asynccontextmanager
async def lenders(*checkpoints: Checkpoint) -> AsyncIterator[MemoryCarrier]:
    """A carrier to peers `lender-0` and so on."""
    net = MemoryNet()
    for number, checkpoint in enumerate(checkpoints):
        await lend(MemoryCarrier(f"lender-{number}", net), checkpoint)
    yield MemoryCarrier("borrower", net)
    for carrier in list(net.carriers.values()):
        await carrier.close()


async def borrow(carrier: Any, source: Checkpoint, folder: Path, peers: list[str]) -> Checkpoint:
    borrower = Borrower(carrier, manifest.build(source), folder)
    checkpoint = await borrower.open_model(peers, folder.parent)
    names = [name for name in checkpoint.tensor_names() if name.startswith(WANTED)]
    assert names
    await borrower.fetch(checkpoint, dict.fromkeys(names, peers), silent)
    return checkpoint


def check(source: Checkpoint, borrowed: Checkpoint) -> None:
    assert borrowed.tensor_names() == source.tensor_names()
    names = [name for name in source.tensor_names() if name.startswith(WANTED)]
    manifest.check(borrowed, names, manifest.build(source))
    for name, tensor in source.load(names).items():
        assert torch.equal(tensor, borrowed.load([name])[name])


def open_here(model: Path | str, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(str(model), cache_dir=tmp_path / "cache")


async def test_only_what_is_wanted_comes_and_it_stays(tiny: Path, tmp_path: Path) -> None:
    source, folder = open_here(tiny, tmp_path), tmp_path / "kept" / "model"
    async with lenders(source) as carrier:
        check(source, await borrow(carrier, source, folder, ["lender-0"]))
        borrowed = open_here(folder, tmp_path)
        with pytest.raises(DamagedWeights):
            manifest.check(borrowed, ["model.embed_tokens.weight"], manifest.build(source))
        check(source, await borrow(carrier, source, folder, []))  # again, with nobody there
    assert not list(folder.parent.glob(".new-*"))


async def test_a_gguf_file_comes_too(tmp_path: Path) -> None:
    source = open_here(packaged_model("smollm2"), tmp_path)
    async with lenders(source) as carrier:
        check(source, await borrow(carrier, source, tmp_path / "kept" / "model", ["lender-0"]))


async def test_a_stream_that_breaks_goes_on_from_where_it_was(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, sent = open_here(tiny, tmp_path), []
    pieces: Counter[asyncio.StreamWriter] = Counter()
    monkeypatch.setattr(lending, "PIECE_BYTES", 1000)
    send = lending._send

    async def breaking(writer: asyncio.StreamWriter, data: bytes) -> None:
        sent.append(len(data))
        pieces[writer] += 1
        if pieces[writer] > 3:
            raise ConnectionResetError
        await send(writer, data)

    monkeypatch.setattr(lending, "_send", breaking)
    async with lenders(source) as carrier:
        check(source, await borrow(carrier, source, tmp_path / "kept" / "model", ["lender-0"]))
    names = [name for name in source.tensor_names() if name.startswith(WANTED)]
    assert sum(sent) < 2 * sum(source.nbytes(name) for name in names) + 100_000  # not from the start each time


async def test_on_a_full_disk_it_says_so_and_goes_on_when_there_is_room(tiny: Path, tmp_path: Path) -> None:
    source, folder = open_here(tiny, tmp_path), tmp_path / "kept" / "model"
    async with lenders(source) as carrier:
        with full_disk(), pytest.raises(StartError, match=r"weights cannot be kept in .*kept"):
            await borrow(carrier, source, folder, ["lender-0"])
        assert not list(folder.parent.iterdir())
        borrower = Borrower(carrier, manifest.build(source), folder)
        checkpoint = await borrower.open_model(["lender-0"], folder.parent)
        names = [name for name in checkpoint.tensor_names() if name.startswith(WANTED)]
        with full_disk(), pytest.raises(StartError, match=r"cannot be kept in .*model"):
            await borrower.fetch(checkpoint, {name: ["lender-0"] for name in names}, silent)
        check(source, await borrow(carrier, source, folder, ["lender-0"]))


def test_where_no_model_can_be_kept_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(StartError, match="weights cannot be kept"), in_use(tmp_path / "kept" / "model"):
        pass


def damaged(tiny: Path, folder: Path) -> Path:
    """A copy with other weights under the same headers."""
    shutil.copytree(tiny, folder)
    for file in folder.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-8:] = bytes(8)
        start = 8 + int.from_bytes(data[:8], "little")
        data[start : start + 4000] = bytes(4000)
        file.write_bytes(data)
    return folder


async def test_wrong_weights_are_noticed_and_another_peer_is_asked(tiny: Path, tmp_path: Path) -> None:
    source, liar = open_here(tiny, tmp_path), open_here(damaged(tiny, tmp_path / "liar"), tmp_path)
    folder = tmp_path / "kept" / "model"
    async with lenders(liar, source) as carrier:
        with pytest.raises(DamagedWeights, match="lender-0 gives it differs from the swarm's manifest"):
            await borrow(carrier, source, folder, ["lender-0"])
        assert not folder.exists()  # nor is what says where the tensors lie
        check(source, await borrow(carrier, source, folder, ["lender-0", "lender-1"]))


async def test_another_model_is_refused_and_nothing_of_it_kept(tiny: Path, tmp_path: Path) -> None:
    source = open_here(tiny, tmp_path)
    other = open_here(make_tiny("llama", tmp_path / "other", layers=5), tmp_path)
    folder = tmp_path / "kept" / "model"
    async with lenders(other) as carrier:
        with pytest.raises(WrongModel):
            await borrow(carrier, source, folder, ["lender-0"])
        with pytest.raises(Unreachable):
            await borrow(carrier, source, folder, ["nobody"])
    kept = {path.name for path in folder.parent.iterdir()}
    assert kept <= {FOLDER}  # what its configuration's bytes come to, which is true of whoever sends them


@pytest.mark.parametrize(
    "offer", ['[{"name":"../x.json","nbytes":9,"head":9}]', '[{"name":"x.py","nbytes":9,"head":9}]', "[]",
              '[{"name":"x.json","nbytes":9,"head":10}]', "{", '[{"name":"x.gguf","nbytes":99999999999999,"head":9}]'],
)  # fmt: skip
async def test_files_that_are_no_models_are_not_taken(tiny: Path, tmp_path: Path, offer: str) -> None:
    source, folder = open_here(tiny, tmp_path), tmp_path / "kept" / "model"
    async with lenders() as carrier:

        async def answer(_: str, __: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(offer.encode())
            writer.close()

        await MemoryCarrier("liar", carrier._net).serve(PROTOCOL, answer)
        with pytest.raises((ProtocolError, Unreachable)):
            await borrow(carrier, source, folder, ["liar"])
    assert not list(folder.parent.iterdir())


@pytest.mark.parametrize(("name", "start"), [("secret.json", 0), ("../secret.json", 0), ("config.json", -1)])
async def test_nothing_but_the_model_is_given_away(tiny: Path, tmp_path: Path, name: str, start: int) -> None:
    (tiny / "secret.json").write_text("{}")
    (tiny.parent / "secret.json").write_text("{}")
    source = open_here(tiny, tmp_path)
    async with lenders(source) as carrier:
        with pytest.raises(SwarmError):
            await Borrower(carrier, manifest.build(source), tmp_path / "kept")._range("lender-0", name, start, 2)


def test_the_model_unused_for_longest_goes_first_and_one_in_use_stays(tmp_path: Path) -> None:
    for number, name in enumerate(("used", "old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(100_000))
        (tmp_path / f"{name}.lock").touch()
        os.utime(tmp_path / f"{name}.lock", (number, number))
    with in_use(tmp_path / "used"):
        os.utime(tmp_path / "used.lock", (0, 0))
        make_room(tmp_path, 250_000)
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"used", "new"}
        make_room(tmp_path, 0)
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"used"}
    make_room(tmp_path, 0)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
