"""Which blocks a newcomer should serve: those that the swarm has fewest peers for.

Owns that choice alone. Does not know what fits in a machine (the caller says how many blocks) nor how fast it
is.
"""

from __future__ import annotations

from routing.errors import BadInput
from routing.types import PeerId, PeerState, Span
from routing.view import View


def least_covered_span(
    view: View,
    n_blocks: int,
    capacity_blocks: int,
    now: float,
    *,
    without: frozenset[PeerId] = frozenset(),
) -> Span:
    """The window of `capacity_blocks` consecutive blocks (all, if that many fit) that the swarm needs most.

    Windows are compared by the coverage they hold, sorted, lowest first; ties go to the lowest start. SERVING
    and JOINING peers count, so that two newcomers one after the other do not fill the same gap; DRAINING and
    LEAVING ones do not, since their blocks are about to be missing. A peer that moves names itself in
    `without`. Raises BadInput.
    """
    if capacity_blocks < 1:
        raise BadInput(f"a peer serves at least one block, not {capacity_blocks}")
    if n_blocks != view.n_blocks:
        raise BadInput(f"the view is of a model of {view.n_blocks} blocks, not {n_blocks}")
    if capacity_blocks >= n_blocks:
        return Span(0, n_blocks)
    coverage = view.count(now, PeerState.SERVING, PeerState.JOINING, without=without)
    starts = range(n_blocks - capacity_blocks + 1)
    start = min(starts, key=lambda at: sorted(coverage[at : at + capacity_blocks]))
    return Span(start, start + capacity_blocks)
