"""A disk that takes nothing more, for this process and as long as wanted."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made, but not a byte can be written to one: the system's own refusal (EFBIG), not a stand-in's. It
    holds for whatever the process writes, so nothing else may be printed meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # Python ignores the signal that comes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
