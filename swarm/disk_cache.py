"""Owns writing what was computed once to disk, all or nothing. A cache is a convenience: a disk that is full or may not
be written is told once, and the program goes on without."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)  # its warnings are shown to users
_told: set[Path] = set()


def keep(path: Path, data: bytes) -> bool:
    """Whether `path` holds `data` now. Whoever reads it meanwhile reads the old bytes or the new."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)  # a full disk is not filled further
        without(path.parent, error)
        return False
    return True


def without(folder: Path, error: OSError) -> None:
    """Says, once for each folder, that nothing is kept there."""
    if folder not in _told:
        _told.add(folder)
        log.warning("nothing can be kept in %s (%s); going on without", folder, error.strerror or error)
