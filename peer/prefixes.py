"""What closed sessions leave: content that the next session of the same client need not send or compute again.

A question after another under one system prompt, the next turn of a chat, the best of several answers. Found by names,
so only the client that knows the tokens finds it, and only under the same root (codec, scope). What lost something on
the wire is found only by those who lose as much (numeric class). Kept until somebody needs the room, some minutes at
most. Sans-IO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from peer.seats import SeatStore
from routing.types import PeerId
from swarm.names import common_prefix, count

LEAST = 16  # positions: less is not worth keeping
MOST = 256  # entries


@dataclass(slots=True, eq=False)
class Kept:
    client_id: PeerId
    key: tuple[int, int]  # entry, exit
    names: bytes
    store: SeatStore
    at: float
    numeric_class: int


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """A store whose first `positions` are those of some names. Of an open session unless it is `kept`."""

    store: SeatStore
    positions: int
    kept: Kept | None = None

    @classmethod
    def of(cls, held: bytes | bytearray, store: SeatStore, names: bytes, kept: Kept | None = None) -> Donor | None:
        """None if they have too little in common."""
        positions = common_prefix(held, names)
        return cls(store, positions, kept) if positions >= LEAST else None


class Prefixes:
    def __init__(self, kept_s: float):
        self._kept_s = kept_s
        self._kept: list[Kept] = []  # the one used longest ago first

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        client_id: PeerId,
        key: tuple[int, int],
        names: bytes,
        store: SeatStore,
        now: float,
        numeric_class: int = 0,
    ) -> None:
        """Takes over `store`, which holds what `names` say, from position 0 on."""
        if count(names) < LEAST:
            store.evict()
            return
        for other in list(self._of(client_id, key)):
            covered = common_prefix(other.names, names) == count(other.names)
            if covered and numeric_class <= other.numeric_class:
                self._drop(other)  # all of it is in the new one
        self._kept.append(Kept(client_id, key, names, store, now, numeric_class))
        if len(self._kept) > MOST:
            self.drop_oldest()

    def find(
        self, client_id: PeerId, key: tuple[int, int], names: bytes, now: float, most_class: int = 0
    ) -> Donor | None:
        """What holds the longest prefix of `names`, of that numeric class at most."""
        able = [kept for kept in self._of(client_id, key) if kept.numeric_class <= most_class]
        best = max(able, key=lambda kept: common_prefix(kept.names, names), default=None)
        donor = None if best is None else Donor.of(best.names, best.store, names, best)
        if best is not None and donor is not None:
            self._kept.remove(best)
            self._kept.append(best)
            best.at = now
        return donor

    def stores(self) -> Iterator[SeatStore]:
        return (kept.store for kept in self._kept)

    def take(self, kept: Kept) -> SeatStore:
        """Its store is the caller's now."""
        self._kept.remove(kept)
        return kept.store

    def drop_oldest(self) -> bool:
        """False if there was none."""
        if self._kept:
            self._drop(self._kept[0])
            return True
        return False

    def tick(self, now: float) -> None:
        while self._kept and now - self._kept[0].at >= self._kept_s:
            self.drop_oldest()

    def _drop(self, kept: Kept) -> None:
        self._kept.remove(kept)
        kept.store.evict()

    def _of(self, client_id: PeerId, key: tuple[int, int]) -> Iterator[Kept]:
        return (kept for kept in self._kept if kept.client_id == client_id and kept.key == key)
