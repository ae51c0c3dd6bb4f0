"""The file of a saved session: whole or not at all, readable by its owner only, and every wrong one is named."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest

from routing.errors import BadInput
from swarm import saved
from swarm.saved import SavedGeneration, SavedSession
from tests.full_disk import full_disk

SESSION = SavedSession(
    fingerprint=b"f" * 32,
    client_id="12D3KooW",
    session=bytes(range(16)),
    epoch=3,
    scope=1,
    peers=["a", "b"],
    tokens=[5, 6, 7],
    generation=SavedGeneration(
        held=1, prompt=[6], said=[7, 8], settings={"seed": 4, "stop": ["\n"]}, sampler=b"\x00\xff"
    ),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a text.json"
    for session in (SESSION, msgspec.structs.replace(SESSION, generation=None)):
        saved.write(path, session)
        assert saved.read(path) == session
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_version_before(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    saved.write(path, SESSION)
    before = path.read_bytes()
    with full_disk(), pytest.raises(BadInput, match=r"cannot be saved in .*text.json"):
        saved.write(path, SESSION)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    for nowhere in (tmp_path / "no such folder", path):
        with pytest.raises(BadInput, match="cannot be saved"):
            saved.write(nowhere / "text.json", SESSION)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not a saved session"),
        (b"{}", "not a saved session"),
        (b"\xff\xfe", "not a saved session"),
        (b'{"tokens": "many"}', "not a saved session"),
    ],
)
def test_what_is_no_saved_session_is_named(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=named):
        saved.read(path)


def test_another_format_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    saved.write(path, SESSION)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(BadInput, match="format 2"):
        saved.read(path)
    with pytest.raises(BadInput, match="No such file"):
        saved.read(tmp_path / "nothing")
