"""Commands in processes of their own, as a shell starts them, and how they ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

PATIENCE_S = 120.0


class Result:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in err and "Traceback" not in out

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


@pytest.fixture
def launch() -> Iterator[Any]:
    """A command in a process and a process group of its own, as a shell starts it. `before`: what runs the command."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, before: Sequence[str] = (), **options: Any) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [*before, sys.executable, "-m", "swarm.cli", *arguments]
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **{**streams, **options}))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:  # the test has failed
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=PATIENCE_S)
    return Result(process.returncode, out, err)
