"""Owns the comparison with llama.cpp's RPC: the same model in 4 bits over two servers, beside ours over two peers.

Wants a build of llama.cpp with `-DGGML_RPC=ON`; LLAMA_CPP names the folder with its `llama-bench` and
`ggml-rpc-server` (`rpc-server` in older ones). One thread each, all blocks on the servers.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.children import ChildFailed
from bench.engine import NEW, TWO_PEERS
from bench.figures import Figure, decode_rate, take_turns
from bench.quantized import PROMPTS
from bench.setting import Setting
from swarm.checkpoint import PACKAGED, packaged_model

FOLDER = "LLAMA_CPP"
CONTEXT = 40  # positions held, about as many as our prompts have
START_S, RUN_S = 20.0, 120.0


def rival(setting: Setting) -> list[Figure]:
    """Tokens a second in decode."""
    if setting.model not in PACKAGED:
        raise ChildFailed(f"the same file must be read by both: one of {', '.join(PACKAGED)}")
    prompts = [setting.prompt(index) for index in range(PROMPTS)]
    setting.end_local()
    with ExitStack() as stack:
        servers = [stack.enter_context(_server()) for _ in TWO_PEERS]
        swarm = stack.enter_context(setting.swarm(TWO_PEERS, "bfloat16", ("--quantize", "int4")))
        client = stack.enter_context(setting.client(swarm, "bfloat16"))
        model = str(packaged_model(setting.model))
        _their_rate(model, servers)
        client.generate(prompts[0], NEW)
        rounds = take_turns(
            setting.rounds,
            lambda turn: _their_rate(model, servers),
            lambda turn: decode_rate(client.generate(prompts[turn % PROMPTS], NEW)),
        )
    note = f"Q4_1 there; {CONTEXT} tokens of context"
    return [
        Figure.of_median("one session, int4, two peers", "x llama.cpp's RPC", rounds.ratios(lambda rate: rate), note),
        Figure.of_median("llama.cpp's RPC, two servers", "tokens/s", rounds.yardstick, note),
        Figure.of_median("ours, two peers", "tokens/s", rounds.subject, note),
    ]


def _their_rate(model: str, servers: Sequence[str]) -> float:
    command = [
        _program("llama-bench"), "-m", model, "-rpc", ",".join(servers), "-ngl", "99", "-t", "1", "-o", "json",
        "-p", "0", "-n", str(NEW), "-d", str(CONTEXT), "-r", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    if done.returncode:
        raise ChildFailed(f"llama-bench: {done.stderr[-500:].strip()}")
    (run,) = json.loads(done.stdout)
    return float(run["avg_ts"])


@contextmanager
def _server() -> Iterator[str]:
    """HOST:PORT of one that listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [_program("ggml-rpc-server", "rpc-server"), "-t", "1", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(server, port)
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise ChildFailed("llama.cpp's server did not start")


def _program(*names: str) -> str:
    folder = os.environ.get(FOLDER, "")
    found = (shutil.which(name, path=folder) for name in names) if folder else ()
    if path := next(filter(None, found), None):
        return str(Path(path).resolve())
    raise ChildFailed(f"set {FOLDER} to the folder of {names[0]}, of a build of llama.cpp with GGML_RPC")
