"""Where a new session had better not go: what other sessions on a peer cost it, and a little chance between equals.

Owns those penalties, of a token or of a prompt. Knows no route and no link: how many sessions a peer has is asked of
the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from routing.cost import Costs
from routing.request import Request
from routing.types import PeerId
from routing.view import View

SPREAD, SPREAD_S = 0.05, 0.001  # of what a hop computes, and in seconds: routes that differ by less are as good
CROWD = 0.1  # of what it computes: by so much, about, each session that is there slows down another one


class Uniform(Protocol):
    """What is needed of a `random.Random`."""

    def uniform(self, a: float, b: float) -> float: ...


def crowd_penalties(
    view: View, costs: Costs, request: Request, sessions: Callable[[PeerId], int], spread: Uniform | None = None
) -> dict[PeerId, float]:
    """The penalties of `request`, and for each peer what its sessions cost one more; a running session's own peers were
    measured with their crowd. With `spread`, for a new session: clients that plan at the same moment do not all take
    the same of some that are as good."""
    penalties = dict(request.penalties)
    for peer_id in sorted(view.records.keys() - (request.held if spread is None else frozenset())):
        record = view.records[peer_id]
        compute_s = len(record.span) * costs.block_s(record, request.tokens)
        more_s = CROWD * sessions(peer_id) * compute_s
        if spread is not None:
            more_s += spread.uniform(0.0, SPREAD * compute_s + SPREAD_S)
        if more_s:
            penalties[peer_id] = penalties.get(peer_id, 0.0) + more_s
    return penalties
