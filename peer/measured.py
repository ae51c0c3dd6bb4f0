"""Owns the measurement of this machine's speed that is kept on disk: a peer that starts again need not measure again.

It counts for one setting (processor, threads, libraries, model, dtype, quantization, how many blocks); in another one
it is measured anew. Which blocks they are is not part of it: those of a model are built alike, and what is measured
while a peer serves corrects the rest.
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from peer.blocks import Blocks
from peer.capacity import DECODE_ROWS, PREFILL_TOKENS, Speed, measure
from swarm import disk_cache, native

log = logging.getLogger(__name__)  # its warnings are shown to users

Setting = dict[str, str | int | bool]


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    setting: Setting
    speed: Speed


def setting_of(blocks: Blocks, fingerprint: bytes, dtype: str) -> Setting:
    """All that the measurement depends on. `dtype`: as the peer's record states it, so with the quantization. Call it
    on the compute thread: the number of threads is that thread's own."""
    return machine_setting(blocks.shape.device, fingerprint, dtype) | {
        "blocks": len(blocks.span),
        "hidden": blocks.shape.hidden,
        "bytes": blocks.nbytes,
    }


def machine_setting(device: torch.device, fingerprint: bytes, dtype: str) -> Setting:
    """The part of it that is known before there are blocks."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "package": _package_version(),
        "kernels": native.load(),
        "model": fingerprint.hex(),
        "dtype": dtype,
        "device": str(device),
    }


def kept_decode_s(setting: Setting, folder: Path) -> float:
    """Seconds of one token through one block, by the newest measurement kept in `folder` for a setting that holds all
    of `setting`: where only the machine's is known, however many blocks it was. 0: there is none."""
    ages = []
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError):  # that it is damaged is told where it is needed
            ages.append((path.stat().st_mtime, _decode(path.read_bytes(), setting).decode_s))
    return max(ages, default=(0.0, 0.0))[1]


def measured(blocks: Blocks, setting: Setting, folder: Path, measure: Callable[[Blocks], Speed] = measure) -> Speed:
    """The speed kept in `folder` for `setting`, else what `measure` says now, which is kept. One that is damaged is
    told, and measured again."""
    digest = hashlib.blake2b(msgspec.json.encode(setting, order="sorted"), digest_size=16).hexdigest()
    path = folder / f"{digest}.json"
    speed = _read(path, setting)
    if speed is None:
        speed = measure(blocks)
        disk_cache.keep(path, msgspec.json.encode(_Kept(setting=setting, speed=speed)))
    return speed


def _read(path: Path, setting: Setting) -> Speed | None:
    try:
        return _decode(path.read_bytes(), setting)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("the measurement in %s is damaged (%s); measuring again", path, error)
        return None


def _decode(data: bytes, setting: Setting) -> Speed:
    """Raises ValueError (so do msgspec's errors) unless it is a measurement made in what `setting` says."""
    kept = msgspec.json.decode(data, type=_Kept)
    speed = kept.speed
    fits = setting.items() <= kept.setting.items()
    if not fits or set(speed.decode) != set(DECODE_ROWS) or set(speed.prefill) != set(PREFILL_TOKENS):
        raise ValueError("it is of something else")
    seconds = *speed.decode.values(), *speed.prefill.values(), speed.int8_value_s
    if not all(math.isfinite(s) and s > 0 for s in seconds):
        raise ValueError("it holds times that cannot be")
    return speed


def _processor() -> str:
    """The model's name, where the system tells it; two machines that share a home are told apart by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _package_version() -> str:
    try:
        return version("swarm-runtime")
    except PackageNotFoundError:  # run from a source tree
        return ""
