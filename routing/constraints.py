"""Which peers may run which blocks at all: what a session's owner allows, whatever it costs.

Owns that answer alone. Hard, unlike what a plan merely avoids: rather no route than one that breaks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from routing.errors import BadInput
from routing.types import Hop, PeerId, PeerRecord, parse_region


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """`only` these peers, `never` those. `trusted`: those for the first and the last block, whose inputs and outputs
    tell most of a text; the others see hidden states between, which hide a prompt from nobody who tries hard, but are
    not the text itself. `region`: peers that state one of these. `exact`: peers that state that they compute in this
    dtype. None: all peers. Raises BadInput."""

    only: frozenset[PeerId] | None = None
    never: frozenset[PeerId] = frozenset()
    trusted: frozenset[PeerId] | None = None
    region: frozenset[str] | None = None
    exact: str | None = None

    def __post_init__(self) -> None:
        for name, peers in (("only", self.only), ("trusted", self.trusted)):
            if peers is not None and not peers - self.never:
                raise BadInput(f"{name} leaves no peer; name at least one that is not among never")
        if self.region is not None and not self.region:
            raise BadInput("region leaves no peer; name at least one")

    @classmethod
    def of(
        cls,
        *,
        only: Iterable[PeerId] | None = None,
        never: Iterable[PeerId] = (),
        trusted: Iterable[PeerId] | None = None,
        region: str | Iterable[str] | None = None,
        exact: str | None = None,
    ) -> Constraints:
        """As users write them. Raises BadInput."""
        regions = (region,) if isinstance(region, str) else region
        return cls(
            only=None if only is None else frozenset(only),
            never=frozenset(never),
            trusted=None if trusted is None else frozenset(trusted),
            region=None if regions is None else frozenset(map(parse_region, regions)),
            exact=exact,
        )

    @property
    def any(self) -> bool:
        return self != Constraints()

    def forbids(self, record: PeerRecord) -> str:
        """The constraint, by its name, that lets a peer run no block at all; empty: none does."""
        if record.peer_id in self.never:
            return "never"
        if self.only is not None and record.peer_id not in self.only:
            return "only"
        if self.region is not None and record.region not in self.region:
            return "region"
        return "exact" if self.exact is not None and record.dtype != self.exact else ""

    def forbids_block(self, record: PeerRecord, block: int, n_blocks: int) -> str:
        """The same for one block."""
        name = self.forbids(record)
        if name or self.trusted is None or 0 < block < n_blocks - 1 or record.peer_id in self.trusted:
            return name
        return "trusted"

    def allow_hop(self, record: PeerRecord, hop: Hop, n_blocks: int) -> bool:
        """Whether that peer may run all blocks of a hop."""
        return not any(self.forbids_block(record, block, n_blocks) for block in (hop.entry, hop.exit - 1))

    def left_out(self, records: Iterable[PeerRecord]) -> Mapping[str, tuple[PeerId, ...]]:
        """Peers that may run no block at all, by the name of the constraint."""
        return _by_name((self.forbids(record), record.peer_id) for record in records)

    def forbidden(
        self, records: Iterable[PeerRecord], blocks: Iterable[int], n_blocks: int
    ) -> Mapping[str, tuple[PeerId, ...]]:
        """Peers that serve some of these blocks and may not, by the name of the constraint."""
        blocks = frozenset(blocks)
        return _by_name(
            (self.forbids_block(record, block, n_blocks), record.peer_id)
            for record in records
            for block in blocks.intersection(range(record.span.start, record.span.end))
        )


def _by_name(found: Iterable[tuple[str, PeerId]]) -> Mapping[str, tuple[PeerId, ...]]:
    peers: dict[str, set[PeerId]] = {}
    for name, peer_id in found:
        if name:
            peers.setdefault(name, set()).add(peer_id)
    return {name: tuple(sorted(peers[name])) for name in sorted(peers)}
