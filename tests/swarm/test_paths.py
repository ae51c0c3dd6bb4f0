"""Several peers on a machine have identities of their own, and keep them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from routing.errors import StartError
from swarm import paths
from swarm.identity import Identity
from swarm.paths import earlier_peers, free_peer_key, held

HOLD = """
import sys
from pathlib import Path
from swarm.paths import free_peer_key
with free_peer_key(Path(sys.argv[1])) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def test_peers_at_the_same_time_have_identities_of_their_own(tmp_path: Path) -> None:
    with free_peer_key(tmp_path) as first, free_peer_key(tmp_path) as second:
        assert Identity.load_or_create(first).peer_id != Identity.load_or_create(second).peer_id
        assert (earlier_peers(first), earlier_peers(second)) == (0, 1)
        with held(first) as taken:
            assert taken is None
    with free_peer_key(tmp_path) as again:
        assert again == first


def test_an_identity_is_free_when_its_process_was_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first = Path(process.stdout.readline().strip())
        with free_peer_key(tmp_path) as second:
            assert second != first
    finally:
        process.kill()
        process.communicate()
    with free_peer_key(tmp_path) as again:
        assert again == first


def test_where_no_identity_can_be_kept_that_is_said(tmp_path: Path) -> None:
    in_the_way = tmp_path / "a file"
    in_the_way.touch()
    with pytest.raises(StartError, match=r"peer-0.key cannot be kept") as error, free_peer_key(in_the_way / "peers"):
        pass
    assert "--identity" in error.value.advice


def test_when_all_are_in_use_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "MOST_PEERS", 1)
    with free_peer_key(tmp_path), pytest.raises(StartError, match="in use"), free_peer_key(tmp_path):
        pass
