"""The kernels are built once, tried out before anyone loads them, and their absence is no error."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from swarm import native
from tests.full_disk import full_disk
from tests.whole.stand_ins import until


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_loaded", None)


def compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the compiler, which writes a line to `calls` each time."""
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))
    return folder / "calls"


def test_without_a_compiler_there_are_none(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.BuildError, match="no C\\+\\+ compiler"):
        native.build(tmp_path / "kernels")
    assert not native.load(tmp_path / "kernels") and native.kernels() is None


async def test_a_compiler_that_fails_is_no_error(tmp_path, monkeypatch, caplog):
    compiler(tmp_path, "echo 'no such option' >&2; exit 1", monkeypatch)
    with caplog.at_level("INFO"):
        assert not await native.prepare(tmp_path / "kernels")
    assert "no such option" in caplog.text and "torch's own are used" in caplog.text


def test_what_does_not_work_is_not_kept(tmp_path, monkeypatch):
    """The compiler makes a file, and it is no library."""
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', monkeypatch)
    with pytest.raises(native.BuildError):
        native.build(tmp_path / "kernels")
    assert not native.load(tmp_path / "kernels")


def test_peers_that_start_together_build_once(tmp_path, monkeypatch):
    calls = compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo something > "$2"', monkeypatch)
    monkeypatch.setattr(native, "_try_out", lambda path: None)
    builders = [threading.Thread(target=native.build, args=(tmp_path / "kernels",)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert calls.read_text().count("called") == 1


def test_a_damaged_file_is_removed_and_not_loaded(tmp_path, native_kernels):
    path = native._target(tmp_path)
    path.write_bytes(b"\x7fELF and then nothing")
    assert not native.load(tmp_path)
    assert not path.exists()


def test_a_damaged_file_that_cannot_be_removed_is_not_loaded_either(tmp_path, monkeypatch):
    native._target(tmp_path).write_bytes(b"damaged")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert not native.load(tmp_path)


def test_on_a_full_disk_there_are_none(tmp_path, monkeypatch):
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo something > "$2"', monkeypatch)
    with full_disk(), pytest.raises(native.BuildError):
        native.build(tmp_path / "kernels")
    assert not native.load(tmp_path / "kernels")


async def test_nobody_waits_for_the_compiler_in_order_to_leave(tmp_path, monkeypatch):
    compiler(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 600", monkeypatch)
    os.mkfifo(tmp_path / "pid")
    preparing = asyncio.create_task(native.prepare(tmp_path / "kernels"))
    pid = int(await asyncio.wait_for(asyncio.to_thread((tmp_path / "pid").read_text), 60))
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    with contextlib.suppress(psutil.NoSuchProcess):  # killed by now; whoever inherits it may still have to reap it
        await until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_it_can_be_switched_off(tmp_path, monkeypatch):
    calls = compiler(tmp_path, "exit 1", monkeypatch)
    monkeypatch.setenv(native.SWITCH, "0")
    assert not native.load() and not await native.prepare(tmp_path)
    assert not calls.exists()


def test_the_command_says_what_came_of_it(tmp_path, native_kernels):
    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "swarm.native"],
            env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    assert run().stdout == "native kernels: ready\n"
    failed = run(CXX="/bin/false", HOME=str(tmp_path))
    assert failed.returncode == 0 and "torch's own are used" in failed.stderr and "Traceback" not in failed.stderr
    assert "switched off" in run(SWARM_NATIVE="0").stdout
