"""A session on disk, so that another process can continue the same text: after a crash, a closed laptop, a restart.

Owns the file alone: JSON, readable by its owner only, replaced as a whole, so that a crash while writing leaves the
version before. It holds the text's tokens in the clear.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from routing.errors import BadInput
from swarm.frames import Codec

FORMAT = 1


class SavedGeneration(msgspec.Struct, kw_only=True):
    """One that was under way."""

    held: int  # tokens of the session before it
    prompt: list[int]
    said: list[int]
    settings: dict[str, Any]  # the fields of GenerationSettings, with the model's defaults filled in
    sampler: bytes  # `Sampler.state`


class SavedSession(msgspec.Struct, kw_only=True):
    fingerprint: bytes  # of the swarm's manifest: the very weights
    client_id: str  # whose names and sessions these are
    session: bytes
    epoch: int
    scope: int  # of the names
    peers: list[str]  # of the last route: they may still hold what was computed
    tokens: list[int]  # held
    codecs: dict[int, Codec] = {}  # of what comes into a block, for those that were ever the first of a hop
    generation: SavedGeneration | None = None
    messages: list[dict[str, str]] | None = None  # of a chat; the last one may be an answer under way
    format: int = FORMAT


def write(path: str | os.PathLike[str], saved: SavedSession) -> None:
    """Raises BadInput if it cannot be written."""
    target = Path(path)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(saved))
        fresh.replace(target)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink()
        raise BadInput(f"the session cannot be saved in {target}: {error}") from error


def read(path: str | os.PathLike[str]) -> SavedSession:
    """Raises BadInput."""
    try:
        saved = msgspec.json.decode(Path(path).read_bytes(), type=SavedSession)
    except OSError as error:
        raise BadInput(f"no saved session can be read from {path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a saved session: {error}") from error
    if saved.format != FORMAT:
        raise BadInput(f"{path} has format {saved.format} of saved sessions; this version reads {FORMAT}")
    return saved
