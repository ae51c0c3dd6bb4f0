"""How long things take that hold an answer up: dials, and what a route has not got yet.

Owns these sums, of what is true and not of what a client believes. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from routing.request import CHUNK
from routing.simulation.client import Client
from routing.simulation.queueing import beside_s, prompt_rate
from routing.types import Hop, PeerId, Route

HANDSHAKE = 4.0  # round trips of a dial: TCP's, TLS's, the listener's nonce, and the verdict on the hello


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


def hold_up_s(
    client: Client, before: Route | None, route: Route, rows: int, standbys: Mapping[Hop, PeerId], *, in_step: bool
) -> float:
    """From the OPEN of a route to the output of a text of `rows` positions: at first all of it, later what new hops
    have not got. `in_step`: the last position was on its way already and is computed with the others; else it comes
    behind them, as a step of its own.
    """
    new = _cold(client, _new(before, route), standbys)
    after = route if before is not None and not in_step else [hop for hop in route if hop not in new]
    steps_s = sum(_pass_s(client, hop) for hop in after)
    dials_s = _neighbours_s(client, route, rows if before is None else 1)
    return client.links_s(route) + dials_s + _compute_s(client, route, new, rows, standbys) + steps_s


def ready_s(
    client: Client, before: Route | None, route: Route, rows: int, standbys: Mapping[Hop, PeerId]
) -> float:
    """Until new hops that are made ready, while the text goes on, say that they are."""
    world, new = client.world, _new(before, route)
    if not new:
        return 0.0
    farthest_s = max(world.rtt_s(client.place, world.by_id[hop.peer_id].place) for hop in new)
    return farthest_s + _compute_s(client, route, _cold(client, new, standbys), rows, standbys)


def _new(before: Route | None, route: Route) -> list[Hop]:
    held = set(before or ())
    return [hop for hop in route if hop not in held]


def _cold(client: Client, new: list[Hop], standbys: Mapping[Hop, PeerId]) -> list[Hop]:
    """Those that have something to compute: a warm standby has done so."""
    return [hop for hop in new if client.world.scenario.standby != "warm" or not _stood_by(hop, standbys)]


def _stood_by(hop: Hop, standbys: Mapping[Hop, PeerId]) -> bool:
    return any(hop == replace(each, peer_id=peer_id) for each, peer_id in standbys.items())


def _pass_s(client: Client, hop: Hop) -> float:
    return (hop.exit - hop.entry) * client.world.by_id[hop.peer_id].decode_s


def _compute_s(
    client: Client, route: Route, new: list[Hop], rows: int, standbys: Mapping[Hop, PeerId]
) -> float:
    """What new hops compute. Chunks go down the chain one behind the other: the slowest hop takes all of them, the
    others one each. A hop that stood by has the inputs. No pass takes less than a step does. Other prompts on a peer
    are in the same passes, and sessions that decode there come in between."""
    if not new:
        return 0.0
    scenario = client.world.scenario
    whole_s, chunk_s, transfer_s = [], [], 0.0
    alone_s = client.links_s(route) + sum(_pass_s(client, hop) for hop in route)
    for hop in new:
        if not _stood_by(hop, standbys):
            transfer_s = rows * scenario.row_bytes / scenario.bandwidth
        peer, pass_s = client.world.by_id[hop.peer_id], _pass_s(client, hop)
        share_s = beside_s(pass_s, peer.chunk_s(1 + peer.prompts, rows))
        pass_s *= (1 + peer.prompts) / prompt_rate(pass_s, peer.decoding, alone_s - pass_s, share_s)
        whole_s.append(pass_s * max(1.0, rows * scenario.prefill_share))
        chunk_s.append(pass_s * max(1.0, min(rows, CHUNK) * scenario.prefill_share))
    slowest = whole_s.index(max(whole_s))
    return transfer_s + whole_s[slowest] + sum(chunk_s) - chunk_s[slowest]


def _neighbours_s(client: Client, route: Route, rows: int) -> float:
    """What hops wait for connections between them. A hop dials the next one when its OPEN comes, and computes `rows`
    meanwhile, or the first chunk of them. Who stood by is connected already, and so is whoever was next to each other.
    """
    world = client.world
    places = [world.by_id[hop.peer_id].place for hop in route]
    now_s, waited_s, passes = 0.0, 0.0, max(1.0, min(rows, CHUNK) * world.scenario.prefill_share)
    ways = [client.place, *places]
    for index, (hop, after) in enumerate(pairwise(route)):
        now_s += world.rtt_s(ways[index], places[index]) / 2 + passes * _pass_s(client, hop)
        if not world.connected(hop.peer_id, after.peer_id):
            opened_s = world.rtt_s(client.place, places[index]) / 2
            there_s = opened_s + HANDSHAKE * world.rtt_s(places[index], places[index + 1])
            waited_s += max(0.0, there_s - now_s)
            now_s = max(now_s, there_s)
    return waited_s
