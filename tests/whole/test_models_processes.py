"""One process that serves two models of unlike families, with clients of both, real p2pds and the command line."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.joincode import JoinCode
from swarm.local import LocalPeer
from swarm.model import SwarmModel
from swarm.status import look
from tests.tiny import make_tiny
from tests.whole.reference import Reference
from tests.whole.scenes import Text

pytestmark = pytest.mark.processes


class Models:
    """`peers` serve both: each said once for each model what it serves."""

    def __init__(self, folder: Path, models: list[Path]):
        self.folder, self.models = folder, models
        self.peers: list[LocalPeer] = []
        self.said: list[list[dict[str, Any]]] = []

    def launch(self, *options: str, models: list[Path] | None = None) -> LocalPeer:
        name = f"peer-{len(self.peers)}"
        command = [sys.executable, "-m", "peer", *map(str, models or self.models), "--json", "--until-stdin-closes"]
        command += ["--host", "127.0.0.1", "--threads", "1", "--identity", str(self.folder / f"{name}.key"), *options]
        log = self.folder / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        peer = LocalPeer(process, None, log)
        self.peers.append(peer)
        return peer

    def add(self, *options: str) -> list[dict[str, Any]]:
        """What it says of each model."""
        peer = self.launch(*options)
        said = []
        for _ in self.models:
            peer.wait_serving()
            said.append(peer.facts)
        self.said.append(said)
        return said

    def close(self) -> None:
        for peer in self.peers:
            peer.ask_to_leave()
        for peer in self.peers:
            peer.ended(25)
            for stream in (peer.process.stdin, peer.process.stdout):
                assert stream is not None
                stream.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt2 of four blocks."""
    return make_tiny("gpt2", tmp_path_factory.mktemp("other"), layers=4, tokenizer=True, seed=1)


@pytest.fixture(scope="module")
def two(tiny: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """A founder of both swarms, and one that joins both; together they have all blocks."""
    models = Models(tmp_path_factory.mktemp("peers"), [tiny, other])
    try:
        first, second = models.add("--blocks", "0:4", "--blocks", "0:2", "--metrics-port", "0")
        codes = ["--join", first["join_code"], "--join", second["join_code"]]
        models.add("--blocks", "3:6", "--blocks", "1:4", *codes)
        yield models
    finally:
        models.close()


async def test_clients_of_both_get_the_texts_of_their_models_and_a_peer_that_leaves_hands_over_both(
    two: Models, tiny: Path, other: Path, local: Reference
) -> None:
    first, second = (said["join_code"] for said in two.said[0])
    references = local, Reference(other)
    async with (
        SwarmModel.connect(str(tiny), join=first) as one, one.session() as in_one,
        SwarmModel.connect(str(other), join=second) as another, another.session() as in_another,
    ):  # fmt: skip
        texts = [Text(in_one, references[0]), Text(in_another, references[1])]
        await asyncio.gather(*(text.more(16) for text in texts))
        assert [hop.peer_id for hop in in_one.route] == [peer.peer_id for peer in two.peers]
        assert [hop.peer_id for hop in in_another.route] == [peer.peer_id for peer in two.peers]
        await asyncio.to_thread(
            two.add, "--blocks", "3:6", "--blocks", "1:4", "--join", first, "--join", second
        )
        leaving, taking = two.peers[1], two.peers[2]
        for model in (one, another):
            await model._client.refresh()
        leaving.ask_to_leave()
        while leaving.alive:
            await asyncio.gather(*(text.more(1) for text in texts))
        assert leaving.process.returncode == 0
        await asyncio.gather(*(text.more(2) for text in texts))
        for session in (in_one, in_another):
            assert session.route[-1].peer_id == taking.peer_id


async def test_status_and_metrics_tell_the_models_apart(two: Models) -> None:
    founder = two.said[0]
    assert founder[0]["peer_id"] == founder[1]["peer_id"] and founder[0]["address"] == founder[1]["address"]
    assert [said["span"] for said in founder] == ["0:4", "0:2"]
    names = [path.name for path in two.models]
    seen = [await look(JoinCode.parse(said["join_code"])) for said in founder]
    assert [snapshot.about.model for snapshot in seen] == names
    assert [snapshot.about.family for snapshot in seen] == ["llama", "gpt2"]
    for snapshot, said in zip(seen, founder, strict=True):
        assert not snapshot.uncovered
        mine = next(peer for peer in snapshot.peers if peer.record.peer_id == said["peer_id"])
        assert str(mine.record.span) == said["span"] and mine.serves

    def read() -> str:
        with urllib.request.urlopen(founder[0]["metrics"], timeout=10) as answer:
            return answer.read().decode()

    page = await asyncio.to_thread(read)
    opened = [line for line in page.splitlines() if line.startswith("swarm_peer_sessions_opened_total{")]
    assert len(opened) == 2 and all(any(f'model="{name}"' in line for line in opened) for name in names)
    assert page.count("# TYPE swarm_peer_sessions gauge") == 1 and "swarm_peer_p2pd_restarts_total 0.0" in page


def test_which_model_cannot_be_served_is_said(two: Models, tiny: Path) -> None:
    missing = two.folder / "missing"
    failing = two.launch(models=[tiny, missing])
    typing = two.launch("--join", two.said[0][0]["join_code"])
    assert failing.process.stdout is not None and typing.process.stdout is not None
    assert failing.process.wait(120) == 3 and typing.process.wait(120) == 2
    error = json.loads(failing.process.stdout.read().splitlines()[-1])
    assert error["error"] == "ModelNotFound" and error["message"].startswith(f"{missing}: ")
    error = json.loads(typing.process.stdout.read().splitlines()[-1])
    assert error["error"] == "BadInput" and "2 models" in error["message"] and "--join" in error["advice"]
