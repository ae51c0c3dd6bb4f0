"""Builds and loads the kernels of `kernels/`: once a machine, in the background, with whatever C++ compiler it has.

Without a compiler, or with `SWARM_NATIVE=0`, everything runs on torch's own kernels, slower. What was built is tried
out by a process of its own before anyone loads it, so that a compiler's fault cannot take a peer down.
`python -m swarm.native` builds now and says what came of it.

torch.utils.cpp_extension would do the building, but it needs ninja, and a lock that it left behind when a build was
killed stops every later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from routing.errors import SwarmError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels")
BUILD_S = 300.0
CHECK_S = 60.0
SWITCH = "SWARM_NATIVE"

_loaded: Any = None


class BuildError(SwarmError):
    """The kernels could not be built; torch's own are used."""


def kernels() -> Any:
    """`torch.ops.swarm_native` once it is loaded, else None."""
    return _loaded


def default_folder() -> Path:
    return Path.home() / ".cache" / "swarm" / "native"


def load(folder: Path | None = None) -> bool:
    """Loads what was built before, if it was. Takes a millisecond."""
    global _loaded
    if _loaded is None and os.environ.get(SWITCH) != "0" and (path := _target(folder)).exists():
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            log.warning("the native kernels in %s cannot be loaded: %s", path, error)
            with contextlib.suppress(OSError):  # where nothing can be written, they are not built anew either
                path.unlink()
        else:
            _loaded = torch.ops.swarm_native
    return _loaded is not None


def build(folder: Path | None = None) -> Path:
    """Builds and tries out, unless that was done already; a few seconds, at the lowest priority. Raises BuildError."""
    path = _target(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _one_at_a_time(path.parent):
            if not path.exists():
                made = path.with_suffix(".new")  # the same name every time: one that was killed leaves no heap of them
                _run(_compile_command(made), BUILD_S)
                _try_out(made)
                made.replace(path)
    except OSError as error:
        raise BuildError(f"no native kernels: {error}") from error
    return path


async def prepare(folder: Path | None = None) -> bool:
    """Loads the kernels, after building them if need be. False, and a line in the log, if that cannot be."""
    if load(folder):
        return True
    if os.environ.get(SWITCH) == "0":
        return False
    arguments = ["--folder", str(folder)] if folder else []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "swarm.native", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, said = await process.communicate()
    except asyncio.CancelledError:  # nobody waits for a compiler in order to leave
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if said:
        log.info("%s", said.decode(errors="replace").strip())
    return load(folder)


def try_out(ops: Any) -> None:
    """Raises BuildError unless the kernels agree with torch's."""
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        for rows, inputs, outputs in ((1, 576, 192), (3, 100, 7), (9, 64, 33), (40, 64, 48)):
            x, bias = torch.randn(1, rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
            weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
            for given in (None, bias):
                _same(ops.linear(x, weight, given), F.linear(x, weight, given), tolerance)
        _try_out_packed(ops, dtype, tolerance)
        x, weight = torch.randn(3, 100).to(dtype), torch.randn(100).to(dtype)
        _same(ops.rms_norm(x, weight, 1e-5), F.rms_norm(x, (100,), weight, 1e-5), tolerance)
        gate, up = torch.randn(2, 5, 100).to(dtype)
        _same(ops.gated(gate, up), F.silu(gate) * up, tolerance)
        width = 2 * ops.lanes()
        heads, (cos, sin) = torch.randn(1, 5, 3, width).to(dtype), torch.randn(2, 1, 5, width).to(dtype)
        half = width // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
        _same(ops.rotated(heads, cos, sin), heads * cos[:, :, None] + turned * sin[:, :, None], tolerance)
        query, key, value = (torch.randn(1, heads, 2, width).to(dtype) for heads in (6, 2, 2))
        held = [torch.randn(1, 2, 20, width).to(dtype) for _ in range(4)]
        pasts = [5, 19]
        found = ops.attend_rows(query, key, value, held[:2], held[2:], pasts, 0, 0.25)
        for row, past in enumerate(pasts):
            keys, values = (held[i + row][:, :, : past + 1].repeat_interleave(3, 1) for i in (0, 2))
            wanted = F.scaled_dot_product_attention(query[:, :, row : row + 1], keys, values, scale=0.25)
            _same(found[:, row : row + 1], wanted.transpose(1, 2), tolerance)
    x = torch.randn(5, 100)
    data, back = torch.empty(5, 136, dtype=torch.uint8), torch.empty(5, 100)
    if ops.pack_rows(x, data) >= 0 or ops.unpack_rows(data, back) >= 0:
        raise BuildError("the native kernels refuse good rows")
    _same(back, x, 2e-2)


def _try_out_packed(ops: Any, dtype: torch.dtype, tolerance: float) -> None:
    from swarm.quantized import QUANTIZATIONS, pack, unpack  # which asks this module for the kernels

    for quantization in QUANTIZATIONS:
        packed = pack(torch.randn(48, 100) / 10, quantization)
        weight = unpack(packed, 100, dtype)
        _same(ops.widened(packed, 100, weight), weight, tolerance)
        for rows in (1, 8, 40):
            x = torch.randn(1, rows, 100).to(dtype)
            _same(ops.linear(x, packed, None), F.linear(x, weight), tolerance)


def _same(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    if not torch.allclose(found.float(), wanted.float(), atol=tolerance, rtol=tolerance):
        raise BuildError("the native kernels compute something else than torch")


def _target(folder: Path | None) -> Path:
    """Where the kernels for this source, torch and processor lie."""
    key = hashlib.sha256()
    sources = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    for part in (*sources, torch.__version__.encode(), platform.machine().encode(), _processor()):
        key.update(hashlib.sha256(part).digest())
    return (folder or default_folder()) / f"{key.hexdigest()[:24]}.so"


def _processor() -> bytes:
    """What `-march=native` depends on."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
        return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
    return platform.processor().encode()


def _compile_command(output: Path) -> list[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise BuildError("no native kernels: this machine has no C++ compiler")
    torch_folder = Path(torch.__file__).parent
    command = [
        *(["nice", "-n", "19"] if shutil.which("nice") else []),
        *compiler.split(),
        *("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-fvisibility=hidden", "-w"),
        f"-I{torch_folder / 'include'}",
        str(SOURCES / "library.cpp"),
        *("-o", str(output)),
        f"-L{torch_folder / 'lib'}",
        *("-ltorch_cpu", "-lc10"),
    ]
    return command


def _try_out(path: Path) -> None:
    _run([sys.executable, "-m", "swarm.native", "--try-out", str(path)], CHECK_S)


def _run(command: list[str], timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise BuildError(f"no native kernels: {command[0]} took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise BuildError(f"no native kernels: {said[-1] if said else f'it ended with {done.returncode}'}")


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Peers that start together on one machine build once. The system drops the lock of a process that ends."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["--try-out"]:
            torch.ops.load_library(arguments[1])
            try_out(torch.ops.swarm_native)
        elif os.environ.get(SWITCH) == "0":
            print(f"native kernels: switched off by {SWITCH}=0")
        else:
            build(Path(arguments[1]) if arguments[:1] == ["--folder"] else None)
            print("native kernels: ready")
    except BuildError as error:
        print(f"{error}; torch's own are used", file=sys.stderr)
        return int(arguments[:1] == ["--try-out"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
