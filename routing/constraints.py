"""Which peers may run which blocks at all: what a session's owner allows, whatever it costs.

Owns that answer alone. Hard, unlike what a plan merely avoids: rather no route than one that breaks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.errors import BadInput
from routing.types import Hop, PeerId


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """`only` these peers, `never` those. `trusted`: those for the first and the last block, whose inputs and outputs
    tell most of a text; the others see hidden states between, which hide a prompt from nobody who tries hard, but are
    not the text itself. None: all peers. Raises BadInput."""

    only: frozenset[PeerId] | None = None
    never: frozenset[PeerId] = frozenset()
    trusted: frozenset[PeerId] | None = None

    def __post_init__(self) -> None:
        for name, peers in (("only", self.only), ("trusted", self.trusted)):
            if peers is not None and not peers - self.never:
                raise BadInput(f"{name} leaves no peer; name at least one that is not among never")

    @property
    def any(self) -> bool:
        return self != Constraints()

    def allows(self, peer_id: PeerId, block: int, n_blocks: int) -> bool:
        if peer_id in self.never or (self.only is not None and peer_id not in self.only):
            return False
        return self.trusted is None or 0 < block < n_blocks - 1 or peer_id in self.trusted

    def allow_hop(self, peer_id: PeerId, hop: Hop, n_blocks: int) -> bool:
        """Whether that peer may run all blocks of a hop."""
        return all(self.allows(peer_id, block, n_blocks) for block in (hop.entry, hop.exit - 1))
