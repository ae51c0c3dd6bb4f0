"""Chains for other ends than the least latency: where many rows flow at once, the one whose slowest stage is shortest.

Owns what a stage is: a transfer of a pass, or all that one peer computes of it. `throughput.py` finds the chain.
"""

from __future__ import annotations

import math
from collections import defaultdict

from routing.cost import CLIENT, Costs
from routing.request import Edge, Request, edge_s, edges, toll_s
from routing.throughput import END, Pipeline
from routing.types import Hop, PeerId, PeerRecord, Route
from routing.view import View


def pipelined(
    view: View, costs: Costs, request: Request, servers: list[list[PeerId]], broken: frozenset[Edge]
) -> Route:
    """The chain of highest throughput, and of those the cheapest."""
    peers = sorted({peer for those in servers for peer in those})
    number = {peer: index for index, peer in enumerate(peers)}
    records = [view.records[peer] for peer in peers]
    names = {END: CLIENT, **dict(enumerate(peers))}

    def transfer(a: int, b: int) -> float:
        edge = names[a], names[b]
        return math.inf if edge in broken else _transfer_s(costs, request, *edge, 0 if a == END else None)

    stays = Pipeline(
        servers=[[number[peer] for peer in those] for those in servers],
        stage_block=[_stage_block_s(costs, request, record) for record in records],
        stage_toll=[toll_s(costs, request, record) for record in records],
        transfer=transfer,
        block_cost=[costs.block_s(record, request.tokens) + request.replay_s(costs, record) for record in records],
        toll=[toll_s(costs, request, record) for record in records],
        link=lambda a, b: edge_s(costs, request, names[a], names[b], 0 if a == END else None),
    ).run()
    return Route(tuple(Hop(peers[index], start, end) for index, start, end in stays))


def slowest_s(route: Route, view: View, costs: Costs, request: Request) -> float:
    """The longest stage: a transfer, or all that a peer computes for the chain."""
    busy_s: dict[PeerId, float] = defaultdict(float)
    for hop in route:
        record = view.records[hop.peer_id]
        busy_s[hop.peer_id] += toll_s(costs, request, record) + len(hop) * _stage_block_s(costs, request, record)
    into = [*(hop.entry for hop in route), None]
    ways = (_transfer_s(costs, request, *edge, block) for edge, block in zip(edges(route), into, strict=True))
    return max(*busy_s.values(), *ways)


def _stage_block_s(costs: Costs, request: Request, record: PeerRecord) -> float:
    return costs.block_s(record, request.pass_rows) + request.replay_s(costs, record)


def _transfer_s(costs: Costs, request: Request, a: PeerId, b: PeerId, block: int | None) -> float:
    if b == CLIENT:
        return costs.transfer_s(a, b, request.pass_rows * request.row_bytes)
    return costs.rows_s(a, b, request.pass_rows, request.written, block=block)
