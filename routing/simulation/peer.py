"""One machine of a simulated swarm: how quick it is, what it serves, which sessions are there.

A peer packs steps of its sessions in passes: a pass with `n` of them takes `1 + slope * (n - 1)` times as long as one
alone. How many come together, and what they wait, is in `queueing.py`.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from routing.coordinates import Coordinate
from routing.rebalancing import Rebalancer
from routing.request import CHUNK
from routing.types import PeerId, PeerState, Span

if TYPE_CHECKING:
    from routing.simulation.client import Client
    from routing.simulation.generation import Generation


class Peer:
    """One machine. Where it stands among the others never changes, its load and speed do."""

    def __init__(
        self, number: int, peer_id: PeerId, place: Coordinate, told: Coordinate, block_s: float, prefill_share: float
    ):
        self.number, self.id, self.place, self.told = number, peer_id, place, told
        self.block_s, self.prefill_share, self.factor = block_s, prefill_share, 1.0
        self.queue_s = 0.0  # that a step waited here lately
        self.span, self.capacity = Span(0, 1), 1  # its span comes later, and with it how many blocks it can hold
        self.rebalancer = Rebalancer(peer_id)
        self.state = PeerState.JOINING
        self.alive, self.silent = True, False
        self.sequence = 0
        self.claimed_s = 0.0  # in its last record
        self.renewing = False
        self.sessions: dict[Generation, int] = {}  # and how many blocks each runs here
        self.linked: dict[Client, None] = {}
        self.counts: deque[tuple[float, int]] = deque([(0.0, 0)])
        self.served_since = 0.0
        self.work = 0.0  # tokens times blocks

    @property
    def decode_s(self) -> float:
        """One token through one block, alone: only such passes tell."""
        return self.block_s * self.factor

    @property
    def held_up_s(self) -> float:
        """A step here, as its record says."""
        return len(self.span) * self.decode_s + self.queue_s

    @property
    def decoding(self) -> int:
        """Sessions that do."""
        return sum(generation.running for generation in self.sessions)

    @property
    def prompts(self) -> int:
        """That are computed here: of new sessions, and texts of sessions that have come."""
        return sum(self.id in generation.filling for generation in self.sessions)

    def chunk_s(self, prompts: int, rows: int) -> float:
        """One block of a pass with so many prompts, of a chunk each. No pass takes less than a step does."""
        return self.decode_s * max(1.0, prompts * min(rows, CHUNK) * self.prefill_share)

    @property
    def most(self) -> int:
        """Steps in a pass: as `Service._decode_share` has it."""
        share = sum(1 / len(generation.route) for generation in self.sessions if generation.route is not None)
        return max(1, math.ceil(share - 1e-9))

    def sessions_at(self, when: float) -> int:
        """As a ping at that moment told."""
        found = 0
        for at, count in self.counts:
            if at > when:
                break
            found = count
        return found

    def counted(self, now: float, keep_s: float) -> None:
        self.counts.append((now, len(self.sessions)))
        while len(self.counts) > 1 and self.counts[1][0] < now - keep_s:
            self.counts.popleft()
