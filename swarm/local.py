"""A swarm of real peer processes on this machine's loopback: for the demo, notebooks, tests and benchmarks.

    with LocalSwarm("smollm2", ["0:15", "15:30", "10:30"]) as swarm:
        print(swarm.join_code)
        swarm.peers[1].kill()

Peers end with this process, however it ends: each leaves when its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from routing.errors import StartError, TimedOut
from routing.types import Span

CODE_FOLLOWS = "-"  # as a join code: the peer reads it from its standard input when it is ready for it
START_S = 120.0
LEAVE_S = 25.0


class LocalPeer:
    """One peer process. `facts` is what it said when it began to serve."""

    def __init__(self, process: subprocess.Popen[str], span: str | None, log: Path):
        self.process, self.span, self.log = process, span, log
        self.facts: dict[str, Any] = {}
        self.launched_at, self.served_at = time.monotonic(), 0.0
        self.leaving = False  # was asked to

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def peer_id(self) -> str:
        return self.facts["peer_id"]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_serving(self, timeout_s: float = START_S) -> None:
        """Raises StartError with what the peer said, TimedOut."""
        assert self.process.stdout is not None
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            for line in self.process.stdout:
                facts = json.loads(line)
                if facts.get("event") == "serving":
                    self.facts, self.served_at = facts, time.monotonic()
                    return
                if facts.get("event") == "error":
                    raise StartError(f"{facts['error']}: {facts['message']}", advice=facts.get("advice", ""))
        finally:
            fired = not timer.is_alive()
            timer.cancel()
        if fired:
            raise TimedOut(f"the peer for blocks {self.span} did not serve within {timeout_s:g} s")
        raise StartError(f"the peer for blocks {self.span} ended: {self.log.read_text()[-2000:]}")

    def give_code(self, join_code: str) -> None:
        """To a peer that was started without one."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `wait_serving` says why
            self.process.stdin.write(join_code + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def leave(self, timeout_s: float = LEAVE_S) -> int:
        """In good order, as by Ctrl-C. Returns the exit code."""
        self.ask_to_leave()
        return self.ended(timeout_s)

    def ask_to_leave(self) -> None:
        self.leaving = True
        if self.alive:
            self.thaw()
            self.process.terminate()

    def ended(self, timeout_s: float) -> int:
        """Waits for the end of the process, and makes one if it takes longer. Returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode


class LocalSwarm:
    """Peers for the given spans, one process each; the first begins the swarm, the others join it.

    All are started at once: the others make ready while the first begins the swarm, and get the join code from it.
    """

    def __init__(
        self,
        model: str,
        spans: Sequence[str | Span | None],
        *,
        threads: int | None = 1,
        dtype: str = "float32",
        quantize: str = "none",
        host: str = "127.0.0.1",
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        progress: Callable[[str], object] | None = None,
    ):
        """`options` are further options of `swarm serve`, for all peers; `environment` is added to this one's.

        `progress` is called with a line for people as the start gets on: `print`, for example.
        """
        self.model, self.spans, self.host = model, [str(span) if span else None for span in spans], host
        self._options = ["--dtype", dtype, "--quantize", quantize, *options]
        if threads is not None:
            self._options += ["--threads", str(threads)]
        self._environment = {**os.environ, **(environment or {})}
        self._progress = progress or _silent
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.peers: list[LocalPeer] = []
        self.join_code = ""

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> LocalSwarm:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> LocalSwarm:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Raises StartError, TimedOut."""
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-")
        since = time.monotonic()
        self._progress(f"starting {len(self.spans)} peers; the first begins the swarm, the others join it")
        founder = self.launch(self.spans[0])
        others = [self._launch(span, join=CODE_FOLLOWS) for span in self.spans[1:]]
        founder.wait_serving()
        self.join_code = founder.facts["join_code"]
        for peer in others:
            peer.give_code(self.join_code)
        for peer in (founder, *others):
            if peer is not founder:
                peer.wait_serving()
            seconds = peer.served_at - since
            self._progress(f"peer {peer.peer_id[-6:]} serves blocks {peer.facts['span']} after {seconds:.1f} s")

    def add(self, span: str | None = None, *, identity: str | None = None) -> LocalPeer:
        """One more peer; returns when it serves."""
        peer = self.launch(span, identity=identity)
        peer.wait_serving()
        return peer

    def launch(self, span: str | None, *, identity: str | None = None, held: bool = False) -> LocalPeer:
        """Start a peer process without waiting. `identity` names a key: the same name is the same peer again. `held`:
        it makes ready, and joins when it is given the code."""
        return self._launch(span, join=CODE_FOLLOWS if held else self.join_code, identity=identity)

    def _launch(self, span: str | None, *, join: str, identity: str | None = None) -> LocalPeer:
        assert self._folder is not None
        folder = Path(self._folder.name)
        name = identity or f"peer-{len(self.peers)}"
        before, host = self._place(name)
        command = [*before, sys.executable, "-m", self._program(name), self.model, "--json", "--until-stdin-closes"]
        command += self._options
        command += ["--host", host, "--identity", str(folder / f"{name}.key")]
        if span:
            command += ["--blocks", span]
        if join:
            command += ["--join", join]
        log = folder / f"{name}.log"
        with log.open("a") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=self._environment, start_new_session=True,
            )  # fmt: skip
        peer = LocalPeer(process, span, log)
        self.peers.append(peer)
        return peer

    def _program(self, name: str) -> str:
        """The module that a peer runs. The seam for peers with faults."""
        return "peer"

    def _place(self, name: str) -> tuple[list[str], str]:
        """What stands before a peer's command, and the address it listens at. The seam for peers on other hosts."""
        return [], self.host

    def close(self) -> None:
        for peer in self.peers:
            peer.ask_to_leave()
        for peer in self.peers:
            peer.ended(LEAVE_S)
            for stream in (peer.process.stdin, peer.process.stdout):
                if stream is not None:
                    stream.close()
        if self._folder is not None:
            self._folder.cleanup()

    def by_id(self, peer_id: str) -> LocalPeer:
        return next(peer for peer in reversed(self.peers) if peer.facts.get("peer_id") == peer_id)


def _silent(line: str) -> None:
    pass
