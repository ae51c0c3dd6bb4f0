"""Which few of many peers are worth a search: for each block those that look cheapest, kept in order as things change.

Owns a score a peer and its order by block. A plan over ten thousand peers then searches some hundred of them. Knows no
route; what a peer costs it asks of `Costs`, when a record or a measurement has changed, never when a plan is wanted.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping

from routing.cost import CLIENT, LONGEST_S, Costs
from routing.errors import BadInput
from routing.request import Request
from routing.types import Objective, PeerId, PeerRecord, PeerState, Span
from routing.view import View

FEW = 64
"""So many peers are searched as they are."""

DECODE_EACH, PREFILL_EACH, LOOK_EACH = 6, 12, 2
"""Peers for a block in each order. Prompts want few hops, which depends less on the single peer. Who is on a route
already only looks around, often, between two tokens."""

ALONE = 8

_Kind = tuple[int, Objective]
"""Requests of a kind have the same candidates: those with as many tokens, about, that want the same."""


class Candidates:
    """Over the views of one swarm. Mutable; follows a view when it is asked for a short one."""

    def __init__(self, n_blocks: int, costs: Costs, *, row_bytes: int = 0, few: int = FEW, each: int | None = None):
        """`row_bytes`: as in a request. `each`: peers for a block, whatever the kind of request."""
        if each is not None and each < 1:
            raise BadInput(f"at least one candidate a block, not {each}")
        self._n_blocks, self._costs, self._row_bytes = n_blocks, costs, row_bytes
        self._few, self._each = few, each
        self._orders: dict[_Kind, tuple[_Order, ...]] = {}
        self._view = View({}, n_blocks)

    def short_view(
        self, view: View, now: float, *requests: Request, without: frozenset[PeerId] = frozenset()
    ) -> View:
        """`view` with the peers alone that plans for these requests need to look at, and none of `without`."""
        self._follow(view)
        if len(view.records) <= self._few:
            picked = set(view.records)
        else:
            picked = set().union(*(self._picked(request, now, without) for request in requests))
        return View({peer_id: view.records[peer_id] for peer_id in picked - without}, view.n_blocks)

    def _picked(self, request: Request, now: float, without: frozenset[PeerId]) -> set[PeerId]:
        kind = _kind(request)
        usual = DECODE_EACH if kind[0] == 1 else PREFILL_EACH
        each = self._each or (usual if request.prefer is None else LOOK_EACH)
        forbids = request.constraints.forbids_block if request.constraints.any else None
        picked: set[PeerId] = set()
        for order in self._orders_of(kind):
            for block, peers in enumerate(order.peers[: request.n_blocks]):
                # A trusted peer may be wanted for an end alone, which its score does not tell.
                alone = request.constraints.trusted is not None and block in (0, request.n_blocks - 1)
                most = each * ALONE if alone else each
                self._pick(picked, block, peers, request, now, without, most, forbids)
        in_use = request.held if request.prefer is None else request.held | request.prefer.peers
        return picked | (in_use & self._view.records.keys())

    def _pick(
        self,
        picked: set[PeerId],
        block: int,
        peers: list[PeerId],
        request: Request,
        now: float,
        without: frozenset[PeerId],
        each: int,
        forbids: Callable[[PeerRecord, int, int], str] | None,
    ) -> None:
        """The cheapest that nothing speaks against, and the cheapest of the others: they may be all that is left."""
        good = bad = 0
        records = self._view.records
        barred: list[PeerId] = []
        for peer_id in peers:
            if records[peer_id].expires_at < now or peer_id in without:
                continue
            if forbids is not None and forbids(records[peer_id], block, request.n_blocks):
                barred.append(peer_id)
            elif peer_id in request.avoid_peers or peer_id in request.penalties:
                bad += 1
                if bad <= each:
                    picked.add(peer_id)
            else:
                good += 1
                picked.add(peer_id)
                if good == each:
                    return
        if not good and not bad:
            picked.update(barred[:each])  # a plan can say then what leaves the block bare

    def _follow(self, view: View) -> None:
        """What differs from the view before is scored anew, and so is whatever was measured since."""
        changed = self._costs.take_changed() & view.records.keys()
        before = self._view.records
        gone: set[PeerId] = set()
        if view is not self._view:
            differ = view.changed if view.before is before else _differing(before, view.records)
            gone = {peer_id for peer_id in differ if peer_id not in view.records}
            changed |= differ - gone
        self._view = view
        for kind, orders in self._orders.items():
            for peer_id in changed:
                self._put(kind, view.records[peer_id])
            for order in orders:
                for peer_id in gone:
                    order.remove(peer_id)

    def _orders_of(self, kind: _Kind) -> tuple[_Order, ...]:
        orders = self._orders.get(kind)
        if orders is None:
            orders = self._orders[kind] = (_Order(self._n_blocks), _Order(self._n_blocks))
            records = [record for record in self._view.records.values() if record.state is PeerState.SERVING]
            scores = [self._scores(kind, record) for record in records]
            for index, order in enumerate(orders):
                order.fill((record, both[index]) for record, both in zip(records, scores, strict=True))
        return orders

    def _put(self, kind: _Kind, record: PeerRecord) -> None:
        if record.state is not PeerState.SERVING:
            for order in self._orders[kind]:
                order.remove(record.peer_id)
            return
        for order, score in zip(self._orders[kind], self._scores(kind, record), strict=True):
            order.put(record, score)

    def _scores(self, kind: _Kind, record: PeerRecord) -> tuple[float, float]:
        """Seconds a block, with the toll of its span and the way into it shared by its blocks. In the first order as if
        the whole chain were where this peer is, so that all blocks share the way there and back; in the second as if it
        alone were not where the client is: that one fills what the others leave bare. Where hops are to be few, first
        by how far it reaches: who reaches furthest from each block makes a chain of the fewest."""
        costs, blocks = self._costs, len(record.span)
        tokens, objective = kind
        there_s = costs.link_s(CLIENT, record.peer_id)
        toll_s = costs.queue_s(record) + costs.transfer_s(
            CLIENT, record.peer_id, tokens * self._row_bytes, there_s
        )
        own_s = costs.block_s(record, tokens) + toll_s / blocks
        into_s = min(costs.least_link_s(record.peer_id), there_s)
        reach_s = 2 * LONGEST_S * (self._n_blocks - record.span.end) if objective is Objective.HOPS else 0.0
        region_s, near_s = into_s / blocks + 2 * there_s / self._n_blocks, 2 * there_s / blocks
        return reach_s + own_s + region_s, reach_s + own_s + near_s


class _Order:
    """Peers by block, the least score first, and of equal scores by id."""

    def __init__(self, n_blocks: int):
        self.peers: list[list[PeerId]] = [[] for _ in range(n_blocks)]
        self._scores = [array("d") for _ in range(n_blocks)]  # of those peers: plain numbers, near each other in memory
        self._put: dict[PeerId, tuple[Span, float]] = {}

    def put(self, record: PeerRecord, score: float) -> None:
        """Also if it is there already, with another span or score."""
        if self._put.get(record.peer_id) == (record.span, score):
            return
        self.remove(record.peer_id)
        self._put[record.peer_id] = record.span, score
        for block in range(record.span.start, record.span.end):
            index = self._index(block, record.peer_id, score)
            self.peers[block].insert(index, record.peer_id)
            self._scores[block].insert(index, score)

    def fill(self, scored: Iterable[tuple[PeerRecord, float]]) -> None:
        """Many at once, which one by one would each be put in its place."""
        scores: list[list[float]] = [[] for _ in self.peers]
        for score, peer_id, span in sorted((score, record.peer_id, record.span) for record, score in scored):
            self._put[peer_id] = span, score
            for block in range(span.start, span.end):
                self.peers[block].append(peer_id)
                scores[block].append(score)
        self._scores = [array("d", each) for each in scores]

    def remove(self, peer_id: PeerId) -> None:
        put = self._put.pop(peer_id, None)
        if put is not None:
            span, score = put
            for block in range(span.start, span.end):
                index = self._index(block, peer_id, score)
                del self.peers[block][index], self._scores[block][index]

    def _index(self, block: int, peer_id: PeerId, score: float) -> int:
        """Where a peer is, or belongs."""
        peers, scores = self.peers[block], self._scores[block]
        first = bisect_left(scores, score)
        if first == len(scores) or scores[first] > score or peers[first] == peer_id:
            return first
        return bisect_left(peers, peer_id, first, bisect_right(scores, score, first))


def _differing(before: Mapping[PeerId, PeerRecord], after: Mapping[PeerId, PeerRecord]) -> frozenset[PeerId]:
    new = {peer_id for peer_id, record in after.items() if before.get(peer_id) is not record}
    return frozenset(new | (before.keys() - after.keys()))


def _kind(request: Request) -> _Kind:
    tokens = request.pass_rows if request.objective is Objective.THROUGHPUT else request.tokens
    return 1 if tokens == 1 else 32 if tokens <= 64 else 512, request.objective
