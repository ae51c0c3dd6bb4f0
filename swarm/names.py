"""Names of content: which tokens a position stands for, without telling which tokens they are.

`D[0] = MAC(root)`, `D[i + 1] = MAC(D[i] || token i)`, keyed BLAKE2b cut to 8 bytes, under a secret that never
leaves the client. Peers only compare names: since each name covers all before it, equal names at a position mean
equal tokens up to it. With an unkeyed hash a peer could try every token and read the prompt from the names.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from swarm.frames import NAME_BYTES


class NameChain:
    """The names `D[0..n]` of a growing token sequence."""

    def __init__(self, secret: bytes, root: bytes = b""):
        self._secret = secret
        self._names = bytearray(self._mac(root))

    def _mac(self, message: bytes) -> bytes:
        return blake2b(message, digest_size=NAME_BYTES, key=self._secret).digest()

    def __len__(self) -> int:
        """Positions named, so that `D[len(self)]` is the last name."""
        return len(self._names) // NAME_BYTES - 1

    def extend(self, tokens: Sequence[int]) -> None:
        last = bytes(self._names[-NAME_BYTES:])
        for token in tokens:
            last = self._mac(last + token.to_bytes(4, "little"))
            self._names += last

    def truncate(self, position: int) -> None:
        del self._names[(position + 1) * NAME_BYTES :]

    def slice(self, start: int, end: int) -> bytes:
        """`D[start..end]`, end included: one name more than positions."""
        return bytes(self._names[start * NAME_BYTES : (end + 1) * NAME_BYTES])


def name_at(names: bytes | bytearray, index: int) -> bytes:
    return bytes(names[index * NAME_BYTES : (index + 1) * NAME_BYTES])


def count(names: bytes | bytearray) -> int:
    """Positions that a run of names spans."""
    return len(names) // NAME_BYTES - 1


def common_positions(held: bytes | bytearray, offset: int, names: bytes, limit: int) -> int:
    """How many positions after `offset` are the same in `held` (from position 0) and `names` (from `offset`).

    Names are chained, so agreement is monotonous and a bisection finds its end; the caller has compared the
    first name. `limit` bounds the answer.
    """
    low, high = 0, min(limit, count(held) - offset, count(names))
    if high <= 0:
        return 0
    if name_at(held, offset + high) == name_at(names, high):  # the usual case: all agree
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if name_at(held, offset + middle) == name_at(names, middle):
            low = middle
        else:
            high = middle - 1
    return low


def common_prefix(held: bytes | bytearray, names: bytes, limit: int | None = None) -> int:
    """How many positions two sequences of names from position 0 have in common, up to `limit`; 0 under other roots."""
    if name_at(held, 0) != name_at(names, 0):
        return 0
    return common_positions(held, 0, names, count(names) if limit is None else limit)
