"""Where this program keeps what outlives a process: identities and converted models, under the user's home."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from routing.errors import StartError

MOST_PEERS = 1000


def config_dir() -> Path:
    return Path.home() / ".config" / "swarm"


def client_key() -> Path:
    """The client's identity, shared by all its processes: prefixes can be shared between its sessions."""
    return config_dir() / "client.key"


@contextmanager
def free_peer_key(folder: Path | None = None) -> Iterator[Path]:
    """The first identity file that no other peer on this machine is using, held while in use.

    Several peers on one machine so get identities of their own, and each keeps its one over restarts.
    """
    folder = folder or config_dir() / "peers"
    for number in range(MOST_PEERS):
        with held(folder / f"peer-{number}.key") as path:
            if path is not None:
                yield path
                return
    raise StartError(f"all {MOST_PEERS} identities in {folder} are in use")


def earlier_peers(path: Path) -> int:
    """How many peers were on this machine when `free_peer_key` gave `path`."""
    return int(path.stem.removeprefix("peer-"))


@contextmanager
def held(path: Path) -> Iterator[Path | None]:
    """Hold an identity file for this process; None if another process holds it. Raises StartError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(
            f"the identity {path} cannot be kept: {error.strerror}",
            advice="See that it has room and may be written, or name a file elsewhere with --identity.",
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        yield path
    finally:
        os.close(lock)
