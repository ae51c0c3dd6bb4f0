"""Owns the one way in which slow work (downloads, digests, loading) says how far it is. Knows no terminal."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called with `done` of `total` units (bytes, tensors) of the work named `label`, until done == total."""

    def __call__(self, label: str, done: int, total: int) -> None: ...


def silent(label: str, done: int, total: int) -> None:
    """Reports nothing."""
