"""The machines of a simulated swarm (`peer.py`), how they come and go, and the directory that tells of them, late.

Owns what is true: speeds, places, who is alive, who serves what, how many sessions each peer has. Clients know of it
what `view_at` and their own measurements tell. Peers choose their blocks with the real `best_span`, from the
directory as it is when they join, and move with the real `Rebalancer`. A peer that has moved is a new one here, on the
same machine; what it takes to finish the old sessions beside the new ones is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

from routing.coordinates import LEAST_HEIGHT_S, LONGEST_S, Coordinate
from routing.placement import best_span
from routing.rebalancing import Lease, may_leave
from routing.simulation.agenda import Agenda
from routing.simulation.chance import Chance, Streams
from routing.simulation.peer import Peer
from routing.simulation.report import Tally
from routing.simulation.scenario import BUSIEST, Fault, Scenario
from routing.types import PeerId, PeerRecord, PeerState, Route, Span
from routing.view import Expired, RecordsSeen, View, apply

if TYPE_CHECKING:
    from routing.simulation.generation import Generation

FOR_EVER = 1e12  # records of the living are renewed in time: only those of the dead expire
DRAIN_S = 60.0  # a peer that leaves waits so long for its sessions to move
RETIRE_S = 120.0  # one that moves is in no hurry; as in `peer/succession.py`
WORTH_TELLING = 0.2  # a change of what a record claims, relative
TOLD_ERROR = 0.1  # of network coordinates


class World:
    """All peers, and the directory. Mutable; driven by its agenda."""

    def __init__(self, scenario: Scenario, agenda: Agenda, streams: Streams, tally: Tally):
        self.scenario, self.agenda, self.tally = scenario, agenda, tally
        self.peers: list[Peer] = []  # all there ever were
        self.by_id: dict[PeerId, Peer] = {}
        self.serving = [0] * scenario.n_blocks  # how many SERVING peers hold each block, in truth
        self.covered_since = math.inf  # every block has one since then; inf: not now
        self._machines, self._life = streams("machines"), streams("life")
        self._renewals, self._looks = streams("renewals"), streams("looks")
        self._leases: dict[PeerId, Lease] = {}  # of peers that load what they move to; seen at once by all
        places = streams("regions")
        self._edges: set[frozenset[PeerId]] = set()  # connections between peers
        self._centres = [_on_sphere(places, scenario.region_rtt_s) for _ in range(scenario.regions)]
        self._view = View({}, scenario.n_blocks)
        self._history: deque[tuple[float, View]] = deque()

    def start(self) -> None:
        """The first peers serve at once, and join in small groups: who starts together sees the same directory."""
        scenario, together = self.scenario, 1 + self.scenario.peers // 2000
        for first in range(0, scenario.peers, together):
            group = [self._new_peer() for _ in range(first, min(first + together, scenario.peers))]
            for peer in group:
                peer.span = self._choose(peer)
            for peer in group:
                self._serve(peer, delay_s=0.0)
            self._read([self._record(peer) for peer in group])
        for fault in scenario.faults:
            self.agenda.at(fault.at_s, self._break, fault)
        if scenario.lifetime_s:
            self.agenda.after(self._until_next(), self._join)

    # -- places ----------------------------------------------------------------------------------------------

    def place(self, rng: Chance, peer: int | None = None) -> tuple[Coordinate, Coordinate]:
        """Of a new end, a client or the peer of that number: where it is, and where it says it is."""
        scenario = self.scenario
        near, given = scenario.access_s, scenario.places
        number = 0 if peer is None else 1 + peer % max(1, len(given) - 1)
        centre: tuple[float, ...] = given[number] if given else rng.choice(self._centres)
        place = tuple(_within(axis + rng.gauss(0, near / 2)) for axis in centre)
        height = min(LONGEST_S, max(LEAST_HEIGHT_S, _drawn(rng, near / 2, scenario.access_spread)))
        told = tuple(_within(axis + rng.gauss(0, TOLD_ERROR * near)) for axis in place)
        known = Coordinate(place=told, height=height, error=TOLD_ERROR)
        return Coordinate(place=place, height=height, error=0.0), known

    def rtt_s(self, a: Coordinate, b: Coordinate) -> float:
        return 0.0 if a is b else a.rtt_s(b)

    # -- life ------------------------------------------------------------------------------------------------

    def _new_peer(self) -> Peer:
        scenario, rng, number = self.scenario, self._machines, len(self.peers)
        place, told = self.place(rng, number)
        # Ids are like base58 ones: their order says nothing.
        peer_id = f"{rng.randrange(16**8):08x}-{number}"
        block_s = _drawn(rng, scenario.block_s, scenario.speed_spread)
        if scenario.speeds and number < scenario.peers:
            block_s = scenario.block_s / scenario.speeds[number % len(scenario.speeds)]
        peer = Peer(number, peer_id, place, told, block_s, scenario.prefill_share)
        self.peers.append(peer)
        self.by_id[peer.id] = peer
        return peer

    def _choose(self, peer: Peer) -> Span:
        spans, scenario = self.scenario.spans, self.scenario
        peer.capacity = self._machines.choice(scenario.capacity)
        if spans and peer.number < scenario.peers:
            span = Span.parse(spans[peer.number % len(spans)])
            peer.capacity = len(span)
            return span
        return best_span(self._view, scenario.n_blocks, peer.capacity, self.agenda.now, decode_s=peer.block_s)

    def _join(self) -> None:
        peer = self._new_peer()
        peer.span = self._choose(peer)
        self.tally.joined += 1
        if self.scenario.announce_joining:
            self._announce(peer)
        self.agenda.after(self.scenario.load_s, self._serve, peer)
        self.agenda.after(self._until_next(), self._join)

    def _until_next(self) -> float:
        scenario = self.scenario
        mean_s = scenario.lifetime_s / math.log(2)
        if scenario.lifetime == "lognormal":
            mean_s = scenario.lifetime_s * math.exp(scenario.lifetime_spread**2 / 2)
        return self._life.expovariate(scenario.peers / (mean_s + scenario.load_s))

    def _lifetime_s(self) -> float:
        scenario = self.scenario
        if scenario.lifetime == "lognormal":
            return _drawn(self._life, scenario.lifetime_s, scenario.lifetime_spread)
        return self._life.expovariate(math.log(2) / scenario.lifetime_s)

    def _serve(self, peer: Peer, delay_s: float | None = None) -> None:
        peer.state, peer.served_since = PeerState.SERVING, self.agenda.now
        self._count(peer, 1)
        if delay_s is None:
            self._announce(peer)
        if self.scenario.lifetime_s:
            self.agenda.after(self._lifetime_s(), self._end, peer)
        if self.scenario.rebalance_s:
            self._look_later(peer)

    def _look_later(self, peer: Peer) -> None:
        self.agenda.after(self.scenario.rebalance_s * self._looks.uniform(0.5, 1.5), self._look, peer)

    def _look(self, peer: Peer) -> None:
        """Whether it should serve other blocks. It serves on while it loads them."""
        if not peer.alive or peer.state is not PeerState.SERVING:
            return
        now, load_s = self.agenda.now, self.scenario.load_s
        move = peer.rebalancer.look(self._view, self._leases.values(), peer.capacity, now)
        if move is None:
            self._look_later(peer)
            return
        until = now + load_s + self.scenario.record_delay_s  # it is gone when what it was for can be seen
        self._leases[peer.id] = lease = Lease(peer_id=peer.id, span=move.span, since=now, expires_at=until)
        self.agenda.after(load_s, self._move, peer, lease)

    def _move(self, peer: Peer, lease: Lease) -> None:
        if not peer.alive or peer.state is not PeerState.SERVING:
            return
        if not may_leave(self._view, lease, self._leases.values(), self.agenda.now):
            self._look_later(peer)
            return
        self.tally.rebalanced += 1
        moved = Peer(len(self.peers), f"{peer.id}+", peer.place, peer.told, peer.block_s, peer.prefill_share)
        moved.factor, moved.span, moved.capacity = peer.factor, lease.span, peer.capacity
        self.peers.append(moved)
        self.by_id[moved.id] = moved
        self._serve(moved)
        self._drain(peer, RETIRE_S)

    def _end(self, peer: Peer) -> None:
        if self._life.random() < self.scenario.graceful:
            self._leave(peer)
        else:
            self._die(peer, silent=self._life.random() < self.scenario.silent)

    def _leave(self, peer: Peer) -> None:
        """In good order: it serves on until its sessions have moved."""
        if peer.state is not PeerState.SERVING:
            return
        self.tally.left += 1
        self._drain(peer, DRAIN_S)

    def _drain(self, peer: Peer, patience_s: float) -> None:
        self._count(peer, -1)
        peer.state = PeerState.DRAINING
        self._announce(peer)
        for client in list(peer.linked):
            client.leaving.add(peer.id)
        for generation in list(peer.sessions):
            generation.peer_leaves(peer)
        self.agenda.after(patience_s if peer.sessions else 0.0, self.depart, peer)

    def depart(self, peer: Peer) -> None:
        """At the end of leaving: when the last session has moved, or nobody waits any more."""
        if peer.alive:
            peer.state = PeerState.LEAVING
            self._announce(peer)
            self._gone(peer)

    def _die(self, peer: Peer, silent: bool) -> None:
        if not peer.alive:
            return
        self.tally.died += 1
        if peer.state is PeerState.SERVING:
            self._count(peer, -1)
        peer.silent = silent
        # Its last record stays until it expires, since it was renewed last.
        age_s = self._renewals.uniform(0.0, self.scenario.renew_s)
        expires_at = max(self.agenda.now, self.agenda.now + self.scenario.record_s - age_s)
        self._announce(peer, expires_at)
        self.agenda.at(expires_at + 1e-3, self._expire)
        self._gone(peer)

    def _gone(self, peer: Peer) -> None:
        peer.alive = False
        notice_s = self.scenario.silence_s if peer.silent else 0.0
        for client in list(peer.linked):
            self.agenda.after(notice_s + self.rtt_s(client.place, peer.place) / 2, client.link_lost, peer)
        for generation in list(peer.sessions):
            generation.peer_stops(peer)

    def _break(self, fault: Fault) -> None:
        peer = self._named(fault)
        if peer is None:
            return
        self.tally.faults += 1
        if fault.kind == "kill":
            self._die(peer, silent=False)
        elif fault.kind == "leave":
            self._leave(peer)
        else:
            sessions = list(peer.sessions)
            for generation in sessions:
                generation.settle()
            peer.factor *= fault.factor
            for generation in sessions:
                generation.load_changed()
            self._load_changed(peer)

    def _named(self, fault: Fault) -> Peer | None:
        able = [peer for peer in self.peers if peer.state is PeerState.SERVING and peer.alive]
        if fault.peer == BUSIEST:
            return max(able, key=lambda peer: (len(peer.sessions), -peer.number), default=None)
        return next((peer for peer in able if peer.number == fault.peer), None)

    def connected(self, a: PeerId, b: PeerId) -> bool:
        """Two peers, with each other."""
        return a == b or frozenset((a, b)) in self._edges

    def connect(self, some: Iterable[PeerId], others: Iterable[PeerId]) -> None:
        """Each of these peers with each of those."""
        self._edges.update(frozenset(pair) for pair in product(some, others))

    # -- sessions --------------------------------------------------------------------------------------------

    def seat(self, generation: Generation, before: Route | None, after: Route | None) -> None:
        """A session leaves one route and takes another: all who share a peer with it become slower or quicker."""
        blocks: dict[PeerId, int] = {}
        for hop in after or ():
            blocks[hop.peer_id] = blocks.get(hop.peer_id, 0) + hop.exit - hop.entry
        peers = dict.fromkeys(hop.peer_id for hop in (*(before or ()), *(after or ())))
        touched = [self.by_id[peer_id] for peer_id in peers]
        changed = [peer for peer in touched if (generation in peer.sessions) != (peer.id in blocks)]
        others = self._beside(generation, changed)
        for peer in touched:
            if peer.id in blocks:
                peer.sessions[generation] = blocks[peer.id]
            else:
                peer.sessions.pop(generation, None)
        for peer in changed:
            peer.counted(self.agenda.now, self.scenario.refresh_s + 1.0)
            if not peer.sessions:
                peer.queue_s = 0.0
            self._load_changed(peer)
            if peer.state is PeerState.DRAINING and not peer.sessions:
                self.agenda.after(0.0, self.depart, peer)
        for other in others:
            other.load_changed()

    def runs(self, generation: Generation, peers: Iterable[PeerId]) -> None:
        """What these peers computed for a session is done, and it decodes from now on."""
        others = self._beside(generation, [self.by_id[peer_id] for peer_id in sorted(peers)])
        generation.filling = frozenset()
        for other in others:
            other.load_changed()

    def _beside(self, generation: Generation, peers: Iterable[Peer]) -> dict[Generation, None]:
        """Whom it concerns if that session does something else on these peers; their tokens up to now are counted."""
        others = dict.fromkeys(other for peer in peers for other in peer.sessions if other is not generation)
        for other in others:
            other.settle()
        return others

    # -- the directory ---------------------------------------------------------------------------------------

    def view_at(self, when: float) -> View:
        """What the directory told then. Who reads at the same moment shares one view."""
        found = self._history[0][1]
        for at, view in self._history:
            if at > when:
                break
            found = view
        return found

    def _announce(self, peer: Peer, expires_at: float = FOR_EVER) -> None:
        record = self._record(peer, expires_at)
        self.agenda.after(self.scenario.record_delay_s, self._read, [record])

    def _record(self, peer: Peer, expires_at: float = FOR_EVER) -> PeerRecord:
        peer.sequence += 1
        peer.claimed_s = peer.held_up_s
        return PeerRecord(
            peer_id=peer.id, span=peer.span, state=peer.state, sequence=peer.sequence, expires_at=expires_at,
            decode_s=peer.decode_s, prefill_s=peer.decode_s * self.scenario.prefill_share, queue_s=peer.queue_s,
        )  # fmt: skip

    def _read(self, records: list[PeerRecord]) -> None:
        self._take(apply(self._view, RecordsSeen(records)))

    def _expire(self) -> None:
        self._take(apply(self._view, Expired(self.agenda.now)))

    def _take(self, view: View) -> None:
        now, history = self.agenda.now, self._history
        self._view = view
        if history and history[-1][0] == now:
            history.pop()
        history.append((now, view))
        while len(history) > 1 and history[1][0] < now - self.scenario.refresh_s - 1.0:
            history.popleft()

    def _load_changed(self, peer: Peer) -> None:
        """Its next renewal tells, if it is worth telling."""
        if not peer.renewing:
            peer.renewing = True
            self.agenda.after(self._renewals.uniform(0.0, self.scenario.renew_s), self._renew, peer)

    def _renew(self, peer: Peer) -> None:
        peer.renewing = False
        changed = abs(peer.held_up_s - peer.claimed_s) > WORTH_TELLING * peer.claimed_s
        if peer.alive and peer.state is PeerState.SERVING and changed:
            self._announce(peer)

    def _count(self, peer: Peer, by: int) -> None:
        for block in range(peer.span.start, peer.span.end):
            self.serving[block] += by
        self.covered_since = min(self.covered_since, self.agenda.now) if min(self.serving) else math.inf
        self.tally.coverage(self.agenda.now, min(self.serving))


def _on_sphere(rng: Chance, rtt_s: float) -> tuple[float, ...]:
    axes = [rng.gauss(0, 1) for _ in range(3)]
    length = math.hypot(*axes) or 1.0
    return tuple(_within(rtt_s / math.sqrt(2) * axis / length) for axis in axes)  # two of them are `rtt_s` apart, about


def _within(axis: float) -> float:
    return max(-LONGEST_S, min(LONGEST_S, axis))


def _drawn(rng: Chance, median: float, spread: float) -> float:
    return rng.lognormvariate(math.log(median), spread) if median > 0 and spread > 0 else median
