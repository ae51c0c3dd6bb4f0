"""Owns a model's configuration without the library: its values, kept on disk as the library once worked them out.

The library's classes for configurations take a second to import. What they make of a file follows from its bytes and
from the library's version, which are what a kept configuration is named by. Only for families whose layers are our own,
with rotary frequencies that need no code of the library; every other model's configuration is read by the library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarm import disk_cache
from swarm.families import SUPPORTED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FOLDER = "configurations"


class PlainConfig:
    """The values that the library's configuration has, as attributes."""

    model_type: str

    def __init__(self, values: dict[str, Any]):
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def config_of(source: bytes, cache_dir: Path, read: Callable[[], PreTrainedConfig]) -> PreTrainedConfig:
    """What `read`, the library's way, makes of a file whose configuration is in the bytes `source`. To those who use it
    a `PlainConfig` is no other than the library's."""
    key = hashlib.blake2b(source, digest_size=16, person=version("transformers").encode()[:16]).hexdigest()
    path = cache_dir / FOLDER / f"{key}.json"
    values = _read(path)
    if values is None:
        config = read()
        if suits(config):
            disk_cache.keep(path, msgspec.json.encode(config.to_dict()))
        return config
    return PlainConfig(values)  # type: ignore[return-value]


def suits(config: PreTrainedConfig) -> bool:
    """Whether nothing here needs more of it than its values."""
    family = SUPPORTED.get(config.model_type)
    return family is not None and family.own_layers and config.rope_parameters["rope_type"] == "default"


def _read(path: Path) -> dict[str, Any] | None:
    """None if there is none, or a damaged one."""
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return values if values.get("model_type") in SUPPORTED else None
