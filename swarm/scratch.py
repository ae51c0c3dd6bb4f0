"""A private folder for as long as its process lives.

Owns where control sockets lie, and that a killed process leaves nothing for good: its folder goes when the next one
is made. Does not know what lies in it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "swarm."  # short: the path of a Unix socket has about a hundred bytes
_YOUNG_S = 60.0  # its maker may not have locked it yet


class Scratch:
    """A new folder, mode 0700, at the path `name`; `cleanup` removes it with all that is in it.

    It is locked while this process lives, which the system undoes whatever ends the process: an unlocked one is
    left over. A tidier of the temporary folder that honours such locks (systemd-tmpfiles) leaves it alone too.
    """

    def __init__(self) -> None:
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.name: str = self._folder.name
        self._lock: int | None = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without such locks: nothing is ever swept there either
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def cleanup(self) -> None:
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep() -> None:
    """Remove this user's folders whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(_PREFIX + "*"):
        with suppress(OSError):  # locked, gone meanwhile, or no folder of ours
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _YOUNG_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(lock)
