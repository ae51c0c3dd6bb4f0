"""Folders of living and of killed processes, in a temporary folder of the test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from swarm.scratch import Scratch


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grow_old(path: str | Path) -> None:
    os.utime(path, (0, 0))


def killed() -> Path:
    """The folder of a process that was killed, with a file in it."""
    code = "import os, tempfile, sys; tempfile.tempdir = sys.argv[1]; from swarm.scratch import Scratch; s = Scratch()"
    code += "; open(s.name + '/file', 'w').close(); print(s.name, flush=True); os.kill(os.getpid(), 9)"
    command = [sys.executable, "-c", code, tempfile.gettempdir()]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert child.returncode == -9
    return Path(child.stdout.strip())


def test_a_folder_is_private_and_goes_with_all_that_is_in_it():
    scratch = Scratch()
    assert os.stat(scratch.name).st_mode & 0o777 == 0o700
    Path(scratch.name, "file").touch()
    scratch.cleanup()
    scratch.cleanup()  # twice does no harm
    assert not os.path.exists(scratch.name)


def test_what_a_killed_process_left_goes_with_the_next_one(temporary):
    left = killed()
    assert left.parent == temporary and os.listdir(left) == ["file"]
    Scratch().cleanup()
    assert left.exists()  # still young: its maker may be about to lock it
    grow_old(left)
    Scratch().cleanup()
    assert not left.exists()


def test_nothing_else_is_touched(temporary):
    living = Scratch()
    others = temporary / "other.abcdefgh"
    others.mkdir()
    target = temporary / "target"
    target.mkdir()
    link = temporary / "swarm.link"
    link.symlink_to(target)
    file = temporary / "swarm.file"
    file.touch()
    for path in (living.name, others, target, file):
        grow_old(path)
    Scratch().cleanup()
    assert Path(living.name).exists() and others.exists() and target.exists() and link.is_symlink() and file.exists()
    living.cleanup()


def test_anothers_folder_is_not_touched(temporary, monkeypatch):
    folder = temporary / "swarm.abcdefgh"
    folder.mkdir()
    grow_old(folder)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    Scratch().cleanup()
    assert folder.exists()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    Scratch().cleanup()
    assert not folder.exists()  # it was its owner that mattered
