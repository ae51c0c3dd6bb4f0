"""A hub id: the cache is asked first, the hub only for what is missing. Its part is played on loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch

from routing.errors import ModelNotFound
from swarm.checkpoint import INDEX, SINGLE, open_checkpoint
from swarm.hub import HubCheckpoint, open_hub_checkpoint
from swarm.progress import silent
from tests.full_disk import full_disk
from tests.tiny import make_tiny

SHA = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"


class FakeHub:
    """The answers of a hub that a download needs, for one repository; `requests` are the paths asked."""

    def __init__(self, folder: Path, repo_id: str = REPO):
        hub, self.requests = self, []
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                path = self.path.partition("?")[0]
                hub.requests.append(path)
                body, headers = hub.reply(path, repo_id, files)
                self.send_response(404 if body is None else 200)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body or b"")

            do_GET = do_HEAD = answer

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    @staticmethod
    def reply(path: str, repo_id: str, files: dict[str, bytes]) -> tuple[bytes | None, dict[str, str]]:
        if path in (f"/api/models/{repo_id}", f"/api/models/{repo_id}/revision/main"):
            return json.dumps({"id": repo_id, "modelId": repo_id, "sha": SHA, "siblings": []}).encode(), {}
        if path == f"/api/models/{repo_id}/tree/{SHA}":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return json.dumps(tree).encode(), {}
        if path.startswith(f"/{repo_id}/resolve/"):
            name = path.rsplit("/", 1)[1]
            if name in files:
                etag = hashlib.sha1(files[name]).hexdigest()
                return files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}
            return None, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
        return None, {"X-Error-Code": "RepoNotFound"}

    def __enter__(self) -> FakeHub:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def shards_asked(self) -> set[str]:
        return {name for path in self.requests if (name := path.rsplit("/", 1)[1]).endswith(".safetensors")}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model"), max_shard_size="100KB", tokenizer=True)


@pytest.fixture(scope="module")
def one_file(tmp_path_factory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("one"), layers=1)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return cache


@pytest.fixture
def use(monkeypatch):
    """Directs the library to another hub."""

    def direct(url: str) -> None:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return direct


@pytest.fixture
def no_network(use, monkeypatch):
    """Every request fails at once, and is counted."""
    requests = []

    def refuse(*address: object, **_: object) -> None:
        requests.append(address)
        raise OSError("Network is unreachable")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        use(f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(socket, "create_connection", refuse)
        yield requests


def fill_cache(cache: Path, model: Path, names: list[str]) -> Path:
    """The hub's own layout: blobs, and a snapshot of links to them."""
    folder = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = folder / "snapshots" / SHA
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(SHA)
    (folder / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for name in names:
        blob = folder / "blobs" / hashlib.sha1((model / name).read_bytes()).hexdigest()
        shutil.copy(model / name, blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def names_of(model: Path) -> list[str]:
    return [path.name for path in model.iterdir() if path.is_file()]


def shards_of(model: Path) -> dict[str, str]:
    return json.loads((model / INDEX).read_text())["weight_map"]


def open_tiny(**options) -> HubCheckpoint:
    opened = open_checkpoint(REPO, **options)
    assert isinstance(opened, HubCheckpoint)
    return opened


def test_a_cached_model_is_used_without_a_request(model, hub_cache, no_network, tmp_path):
    fill_cache(hub_cache, model, names_of(model))
    opened = open_tiny(cache_dir=tmp_path / "cache")
    assert opened.source == REPO
    local = open_checkpoint(str(model), cache_dir=tmp_path / "cache")
    loaded, expected = opened.load(opened.tensor_names()), local.load(local.tensor_names())
    assert loaded.keys() == expected.keys() == shards_of(model).keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert opened.tokenizer()("x").input_ids == local.tokenizer()("x").input_ids
    assert no_network == []


def test_the_cache_directory_can_be_given(model, hub_cache, no_network, tmp_path):
    fill_cache(tmp_path / "elsewhere", model, names_of(model))
    opened = open_hub_checkpoint(
        REPO, cache_dir=tmp_path, allow_download=False, progress=silent, hub_cache=tmp_path / "elsewhere"
    )
    assert opened.tensor_names() == shards_of(model).keys() and no_network == []


def test_only_the_shards_that_are_needed_are_fetched(model, hub_cache, use, tmp_path):
    where = shards_of(model)
    wanted = ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"]
    reports: list[tuple[str, int, int]] = []
    with FakeHub(model) as hub:
        use(hub.url)
        opened = open_tiny(cache_dir=tmp_path, progress=lambda *report: reports.append(report))
        assert opened.tensor_names() == where.keys() and hub.shards_asked() == set()
        loaded = opened.load(wanted)
        assert hub.shards_asked() == {where[name] for name in wanted} != set(where.values())
        asked = len(hub.requests)
        opened.load(wanted)
        again = open_tiny(cache_dir=tmp_path)
        again.load(wanted)
        assert len(hub.requests) == asked, "nothing is asked twice"
        opened.reference_model()
        assert hub.shards_asked() == set(where.values())
    local = open_checkpoint(str(model), cache_dir=tmp_path)
    assert all(torch.equal(tensor, local.load([name])[name]) for name, tensor in loaded.items())
    shard = where[wanted[0]]
    of_shard = [report for report in reports if report[0] == f"{REPO}/{shard}"]
    assert of_shard[-1][1] == of_shard[-1][2] == (model / shard).stat().st_size


def test_a_model_of_one_file_without_an_index(one_file, hub_cache, use, tmp_path):
    with FakeHub(one_file) as hub:
        use(hub.url)
        assert "model.norm.weight" in open_tiny(cache_dir=tmp_path).tensor_names()
        assert hub.shards_asked() == {SINGLE}


def test_a_snapshot_without_weights_is_completed(model, hub_cache, use, tmp_path):
    """Such a one is left behind by loading the tokenizer alone."""
    fill_cache(hub_cache, model, ["config.json", "tokenizer.json"])
    with FakeHub(model) as hub:
        use(hub.url)
        assert open_tiny(cache_dir=tmp_path).tensor_names() == shards_of(model).keys()


def test_a_shard_that_is_missing_from_the_cache_when_downloads_are_off(model, hub_cache, no_network, tmp_path):
    where = shards_of(model)
    missing = where["model.norm.weight"]
    fill_cache(hub_cache, model, [name for name in names_of(model) if name != missing])
    opened = open_tiny(cache_dir=tmp_path, allow_download=False)
    opened.load([next(name for name in where if where[name] != missing)])
    with pytest.raises(ModelNotFound, match=f"{missing} of {REPO} is not in the hub's cache, and downloads are off"):
        opened.load(["model.norm.weight"])
    assert no_network == []


def test_without_a_network_the_answer_comes_at_once_with_advice(hub_cache, no_network, tmp_path):
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="cannot be reached") as caught:
        open_tiny(cache_dir=tmp_path)
    assert time.monotonic() - started < 3
    assert "Connect to the internet" in caught.value.advice
    assert no_network, "it was tried"
    with pytest.raises(ModelNotFound, match="downloads are off"):
        open_tiny(cache_dir=tmp_path, allow_download=False)


def test_a_shard_without_a_network(model, hub_cache, no_network, tmp_path):
    fill_cache(hub_cache, model, [name for name in names_of(model) if not name.endswith(".safetensors")])
    opened = open_tiny(cache_dir=tmp_path)
    started = time.monotonic()
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        opened.load(["model.norm.weight"])
    assert time.monotonic() - started < 3


def test_a_full_disk_is_told_as_that(model, hub_cache, use, tmp_path):
    with FakeHub(model) as hub:
        use(hub.url)
        with full_disk(), pytest.raises(ModelNotFound, match="cannot be kept in the hub's cache") as caught:
            open_tiny(cache_dir=tmp_path)
        assert "HF_HOME" in caught.value.advice
        opened = open_tiny(cache_dir=tmp_path)
        with full_disk(), pytest.raises(ModelNotFound, match="cannot be kept in the hub's cache"):
            opened.load(["model.norm.weight"])


def test_offline_mode_is_respected(model, hub_cache, no_network, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="offline mode is on"):
        open_tiny(cache_dir=tmp_path)
    fill_cache(hub_cache, model, [name for name in names_of(model) if not name.endswith(".safetensors")])
    with pytest.raises(ModelNotFound, match="offline mode is on"):
        open_tiny(cache_dir=tmp_path).load(["model.norm.weight"])
    assert no_network == []


def test_a_hub_that_never_answers_does_not_hold_anyone(hub_cache, use, monkeypatch, tmp_path):
    monkeypatch.setattr("swarm.hub.ANSWER_WITHIN_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent_server:
        use(f"http://127.0.0.1:{silent_server.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelNotFound, match="cannot be reached"):
            open_tiny(cache_dir=tmp_path)
        assert time.monotonic() - started < 5


def test_a_model_that_the_hub_has_not(model, hub_cache, use, tmp_path):
    with FakeHub(model, "org/other") as hub:
        use(hub.url)
        with pytest.raises(ModelNotFound, match="has no model org/tiny"):
            open_tiny(cache_dir=tmp_path)


def test_a_model_without_safetensors(one_file, hub_cache, use, tmp_path):
    folder = shutil.copytree(one_file, tmp_path / "bin")
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with FakeHub(folder) as hub:
        use(hub.url)
        with pytest.raises(ModelNotFound, match="no weights as safetensors"):
            open_tiny(cache_dir=tmp_path / "cache")
        assert not any("pytorch_model" in path for path in hub.requests)
