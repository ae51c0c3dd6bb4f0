"""The processes beneath this one: which have been there, which are left, and which of them is a peer's p2pd."""

from __future__ import annotations

import contextlib

import psutil


class Family:
    """Every process that this test process has ever had beneath it."""

    def __init__(self) -> None:
        self.before = set(psutil.Process().children(recursive=True))
        self.seen: dict[psutil.Process, str] = {}  # and their names

    def look(self) -> None:
        for process in set(psutil.Process().children(recursive=True)) - self.before - self.seen.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen[process] = process.name()

    def left(self) -> list[str]:
        self.look()
        running = [each for each in self.seen if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        return [f"{self.seen[each]} ({each.pid})" for each in running]


def daemon_of(pid: int | None = None) -> psutil.Process | None:
    """The p2pd of a process."""
    children = psutil.Process(pid).children()
    return next((child for child in children if "p2pd" in child.name()), None)
