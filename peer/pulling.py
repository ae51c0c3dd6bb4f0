"""A standby takes pages of keys, values and outputs from the hop that it stands by for, piece after piece. Sans-IO.

Cheaper than computing it anew where the network is quicker than the arithmetic, and the only way to use one peer for
prompts and another for what follows. Each piece says what it hashes to, and after which name it ends.
"""

from __future__ import annotations

from hashlib import blake2b

from swarm.frames import Frame, Pages
from swarm.names import NAME_BYTES, name_at

DIGEST_BYTES = 16
FIRST = 16  # positions of the first piece; what it weighs says how long the others may be
PIECE_BYTES = 512 << 10
UNDER_WAY = 4  # pieces


def digest(dtype: str, data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES, person=dtype.encode()[:16]).digest()


class Pull:
    """Of one seat, from the position held to `end`, where the names are D[end]."""

    def __init__(self, start: int, names: bytes, end: int):
        """`names` are D[0..] of at least `end` positions."""
        self.end, self._names = end, names
        self._asked = self._got = start
        self._piece = FIRST
        self._under_way = 0

    @property
    def tip(self) -> tuple[int, bytes]:
        return self.end, name_at(self._names, self.end)

    def next_asks(self) -> list[tuple[int, int]]:
        """Positions to ask for now."""
        asks = []
        while self._asked < self.end and self._under_way < UNDER_WAY:
            end = min(self.end, self._asked + self._piece)
            asks.append((self._asked, end))
            self._asked, self._under_way = end, self._under_way + 1
        return asks

    def check(self, frame: Frame) -> bytes | None:
        """The new names of a piece that is what was asked for; None if it is not."""
        body: Pages = frame.body
        good = frame.start == self._got and frame.end <= self._asked and len(body.data) > 0
        if not good or body.name != name_at(self._names, frame.end) or digest(body.dtype, body.data) != body.digest:
            return None
        self._got, self._under_way = frame.end, self._under_way - 1
        self._piece = max(1, PIECE_BYTES * (frame.end - frame.start) // len(body.data))
        return self._names[(frame.start + 1) * NAME_BYTES : (frame.end + 1) * NAME_BYTES]

    @property
    def done(self) -> bool:
        return self._got >= self.end
