"""How long things take that hold an answer up: dials, and what a route has not got yet.

Owns these two sums, of what is true and not of what a client believes. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from routing.request import CHUNK
from routing.simulation.client import Client
from routing.types import Hop, PeerId, Route

HANDSHAKE = 2.0  # round trips of a dial


def dial(client: Client, route: Route) -> tuple[float, frozenset[PeerId]]:
    """How long it takes to know of each peer of a route whether it is there, and who is not."""
    scenario, longest_s, refused = client.world.scenario, 0.0, set()
    for peer in (client.world.by_id[hop.peer_id] for hop in route):
        rtt_s, linked = client.world.rtt_s(client.place, peer.place), peer.id in client.links
        if not peer.alive:
            refused.add(peer.id)
            silent_s = scenario.silence_s if linked else scenario.connect_s
            longest_s = max(longest_s, silent_s if peer.silent else rtt_s)
        elif not linked:
            longest_s = max(longest_s, HANDSHAKE * rtt_s)
    return longest_s, frozenset(refused)


def catch_up_s(
    client: Client, before: Route | None, route: Route, rows: int, standbys: Mapping[Hop, PeerId]
) -> float:
    """Until a route has what a text of `rows` positions needs: at first the prompt, later what new hops have not got.

    Chunks go down the chain one behind the other: the slowest hop takes all of them, the others one each. A new hop
    that stood by has the inputs, and a warm one has computed them.
    """
    world, scenario = client.world, client.world.scenario
    held = set(before or ())
    new = [hop for hop in route if hop not in held]
    if not new:
        return 0.0
    stood_by = {(peer_id, hop.entry, hop.exit) for hop, peer_id in standbys.items()}
    each_s, transfer_s = [], 0.0
    for hop in new:
        peer, ready = world.by_id[hop.peer_id], (hop.peer_id, hop.entry, hop.exit) in stood_by
        if not ready:
            transfer_s = rows * scenario.row_bytes / scenario.bandwidth
        token_s = (hop.exit - hop.entry) * peer.block_s * peer.factor * scenario.prefill_share
        each_s.append(0.0 if ready and scenario.standby == "warm" else token_s)
    slowest_s = max(each_s)
    chunks_s = rows * slowest_s + min(rows, CHUNK) * (sum(each_s) - slowest_s)
    if before is None:
        return client.links_s(route) + transfer_s + chunks_s
    farthest_s = max(world.rtt_s(client.place, world.by_id[hop.peer_id].place) for hop in new)
    return 2 * farthest_s + transfer_s + chunks_s
