"""Owns the processes that measure: the local model, and the swarm's client. JSON lines go in and out.

Both run apart from this process, so that neither the client's event loop nor the orchestration disturbs what is
measured, and so that this process holds no torch: memory that it shared with a peer would make the peer look small.
They end when their standard input closes, however this process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import Run

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0
ANSWER_S = 300.0  # a guard against waiting for ever; a busy machine is slow
LEAVE_S = 15.0


class ChildFailed(Exception):
    """A measuring process ended, was silent for too long, or says that something failed."""


class Child:
    """One measuring process."""

    leave_s = LEAVE_S  # what its own end may take

    def __init__(self, module: str, arguments: Sequence[str], folder: Path, before: Sequence[str] = ()):
        """`before` is put before the command: to run it on another host."""
        self._name = module
        self._log = folder / f"{module}-{time.monotonic_ns()}.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                [*before, sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                start_new_session=True,
            )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(f"{self._name} has ended: {self._last_words()}") from None

    def next(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """The next thing it says. Raises ChildFailed."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildFailed(f"{self._name} said nothing for {timeout_s:g} s") from None
        if line is None:
            raise ChildFailed(f"{self._name} has ended: {self._last_words()}")
        facts = json.loads(line)
        if facts["event"] == "failed":
            raise ChildFailed(facts["error"])
        return facts

    def ask(self, request: dict[str, Any], timeout_s: float = ANSWER_S) -> dict[str, Any]:
        self.send(request)
        return self.next(timeout_s)

    def _last_words(self) -> str:
        return self._log.read_text()[-2000:].strip() or f"exit code {self._process.poll()}"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self.leave_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        # The reading thread ends with the pipe; closing under it would block.


def make(arguments: Sequence[str], folder: Path) -> None:
    """`bench.make_moe` in a process of its own. Raises ChildFailed."""
    maker = Child("bench.make_moe", arguments, folder)
    try:
        maker.next(START_S)
    finally:
        maker.close()


class LocalModel(Child):
    """`transformers` generate, the yardstick, one torch thread."""

    leave_s = 1.0  # it starts nothing that must be ended: a generation under way is just broken off

    def __init__(self, model: str, folder: Path, dtype: str = "float32"):
        super().__init__("bench.local_model", [model, dtype], folder)
        try:
            self.next(START_S)
        except BaseException:
            self.close()
            raise

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.ask({"do": "encode", "texts": list(texts)})["ids"]

    def generate(self, ids: Sequence[int], new: int) -> Run:
        return as_run(self.ask({"do": "generate", "ids": list(ids), "new": new}))

    def loss(self, texts: Sequence[Sequence[int]], codec: str, blocks: Sequence[int]) -> dict[str, Any]:
        """See `bench/local_model.py`."""
        return self.ask({"do": "loss", "texts": [list(ids) for ids in texts], "codec": codec, "blocks": list(blocks)})


class Client(Child):
    """A `SwarmModel` in a process of its own, one torch thread for its head."""

    def __init__(
        self,
        model: str,
        join_code: str,
        folder: Path,
        dtype: str = "float32",
        before: Sequence[str] = (),
        wait_s: float = 0.0,
        wire: str = "exact",
    ):
        """`wait_s`: how long it waits for blocks that nobody serves. `wire` as in `SwarmModel.connect`."""
        super().__init__("bench.swarm_client", [model, join_code, dtype, str(wait_s), wire], folder, before)
        self.spent_ms: dict[str, float] = {}  # of a decode step in the last run, by what it was spent on
        try:
            self.next(START_S)
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Sequence[int] | str, new: int) -> Run:
        return self.batch([prompt], new)[0]

    def batch(
        self,
        prompts: Sequence[Sequence[int] | str],
        new: int,
        timeout_s: float = ANSWER_S,
        standby: str = "inputs",
    ) -> list[Run]:
        """Raises ChildFailed: also where the deadline passed."""
        answer = self.ask(self.request(prompts, new, timeout_s=timeout_s, standby=standby), timeout_s + LEAVE_S)
        self.spent_ms = answer["runs"][0]["spent_ms"]
        return [as_run(run) for run in answer["runs"]]

    def request(
        self,
        prompts: Sequence[Sequence[int] | str],
        new: int,
        *,
        tell_at: int = 0,
        timeout_s: float = ANSWER_S,
        standby: str = "inputs",
        without: Sequence[str] = (),
        most_s: float | None = None,
    ) -> dict[str, Any]:
        """`tell_at`: say so, with the route, as soon as so many tokens are there, and standbys, if any, are warm.
        `without`: peers that must not be used. `most_s`: the first token that comes later is the last."""
        request = {"do": "generate", "prompts": list(prompts), "new": new, "tell_at": tell_at}
        return request | {"timeout_s": timeout_s, "standby": standby, "without": list(without), "most_s": most_s}

    def do(self, what: str, prompts: Sequence[Sequence[int]], new: int, **more: Any) -> list[Run]:
        """One of the client's other works, see `bench/swarm_client.py`."""
        answer = self.ask({**self.request(prompts, new), **more, "do": what})
        return [as_run(run) for run in answer["runs"]]

    def wait_for_peers(self, count: int) -> None:
        """Until so many peers serve and answer this client. Raises ChildFailed."""
        self.ask({"do": "wait", "peers": count, "timeout_s": START_S}, START_S + LEAVE_S)


def as_run(facts: dict[str, Any]) -> Run:
    return Run(began=facts["began"], ids=tuple(facts["ids"]), times=tuple(facts["times"]))
