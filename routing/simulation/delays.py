"""How long things take that hold an answer up: dials, and what a route has not got yet.

Owns these two sums, of what is true and not of what a client believes. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from routing.request import CHUNK
from routing.simulation.client import Client
from routing.types import Hop, PeerId, Route

HANDSHAKE = 2.0  # round trips of a dial


def dial(client: Client, route: Route) -> tuple[float, frozenset[PeerId]]:
    """How long it takes to know of each peer of a route whether it is there, or that a dial is late; and who is known
    not to be there then."""
    scenario, now = client.world.scenario, client.world.agenda.now
    longest_s, late_s, gone = 0.0, math.inf, dict[PeerId, float]()
    for peer in (client.world.by_id[hop.peer_id] for hop in route):
        rtt_s, linked = client.world.rtt_s(client.place, peer.place), peer.id in client.links
        if not peer.alive:
            gone[peer.id] = rtt_s
            if peer.silent and linked:
                gone[peer.id] = scenario.silence_s
            elif peer.silent:
                gone[peer.id] = client.dial_silent(peer) - now
                late_s = min(late_s, client.dials.next_late_s([peer.id], now) or math.inf)
            longest_s = max(longest_s, gone[peer.id])
        elif not linked:
            longest_s = max(longest_s, HANDSHAKE * rtt_s)
    wait_s = min(longest_s, late_s)
    return wait_s, frozenset(peer_id for peer_id, known_s in gone.items() if known_s <= wait_s)


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
