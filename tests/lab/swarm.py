"""Swarms for chaos: peers on hosts of the lab, one a host, or on loopback; some with a wrong clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.local import LocalPeer, LocalSwarm
from tests.lab.lab import Lab


class SkewedSwarm(LocalSwarm):
    """On loopback; the clocks of some are wrong."""

    def __init__(self, model: str, spans: Sequence[str | None], **options: Any):
        super().__init__(model, spans, **options)
        self.skewed: set[str] = set()  # names of peers whose clock is wrong when they start next

    def _program(self, name: str) -> str:
        return "tests.lab.skewed" if name in self.skewed else "peer"


class LabSwarm(SkewedSwarm):
    """Host 1 is the client's; the peers are on hosts 2, 3, ... in their order."""

    def __init__(self, lab: Lab, model: str, spans: Sequence[str | None], **options: Any):
        super().__init__(model, spans, **options)
        self.lab = lab
        self._host_of: dict[str, int] = {}

    def _place(self, name: str) -> tuple[list[str], str]:
        host = self._host_of.setdefault(name, len(self._host_of) + 2)
        return self.lab.on(host), self.lab.address(host)

    def host_of(self, peer: LocalPeer) -> int:
        return self._host_of[peer.log.stem]
