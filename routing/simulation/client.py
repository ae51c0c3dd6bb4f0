"""One client of a simulated swarm: what it knows, late and with noise, and the plans that the real code makes of it.

Owns its view, its measurements, its memory of failures and its connections, each the real class (`Costs`, `Candidates`,
`Health`), and does with them what `swarm/client.py` does, without sockets. One answer's life is in `generation.py`.

Where clients would have read the same directory they share one view. Peers that a client is connected with are measured
again at most every `PROBE_AGAIN_S`, when it plans, and not at each refresh: nothing looks at the figures in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from routing.candidates import Candidates
from routing.cost import CLIENT, Costs, CostSettings
from routing.crowding import crowd_penalties
from routing.health import Health
from routing.lateness import Dials
from routing.planner import Plan, Split, plan, split_plan
from routing.probing import Probes
from routing.request import CHUNK, Request
from routing.simulation.chance import Chance
from routing.simulation.peer import Peer
from routing.simulation.world import World
from routing.types import Hop, PeerId, PeerRecord, PeerState, Route
from routing.view import View, forgotten

PROBE_AGAIN_S = 300.0
EXPECTED_TOKENS = 256  # of an answer to a long prompt, as `swarm/healing.py` has it


class Client:
    """Asks, reads, thinks, asks again; one answer at a time."""

    def __init__(self, number: int, world: World, rng: Chance, clock: Callable[[], float] | None):
        self.number, self.world, self.rng, self._clock = number, world, rng, clock
        self.place, told = world.place(rng)
        scenario = world.scenario
        self.costs = Costs(CostSettings(hop_s=scenario.hop_s))
        if scenario.coordinates:
            self.costs.place(CLIENT, told)
        self._candidates = Candidates(scenario.n_blocks, self.costs, row_bytes=scenario.row_bytes)
        self._probes = Probes(self._candidates, self.costs, rng)
        self.health = Health()
        self.dials = Dials()
        self._dialled: dict[PeerId, float] = {}  # hosts that do not answer: when the dial is given up
        self.leaving: set[PeerId] = set()
        self.links: dict[PeerId, None] = {}
        self.view = View({}, scenario.n_blocks)
        self.short = self.view  # of the last plan
        self.read_at = -math.inf  # when its view was read, and its links pinged
        self._probed_at = -math.inf
        self._placed = 0  # of the world's peers
        self.asked = 0
        self.tokens = 0.0
        self.busy_s = 0.0  # from each question to its answer's end

    # -- what it knows ---------------------------------------------------------------------------------------

    def refresh(self, at_once: bool = False) -> None:
        """As a client does in the background, or at once because it found no route."""
        now, every_s = self.world.agenda.now, self.world.scenario.refresh_s
        # A phase of its own for each: `read_at` is the last time that it read.
        read_at = now
        if not at_once and self.read_at >= 0:
            read_at = self.read_at + every_s * math.floor((now - self.read_at) / every_s)
        if read_at == self.read_at:
            return
        before, self.read_at, self.view = self.view, read_at, self.world.view_at(read_at)
        self.costs.advance(now)
        for peer_id in forgotten(before, self.view):
            self.costs.forget(peer_id)
        if self.world.scenario.coordinates:
            for peer in self.world.peers[self._placed :]:
                self.costs.place(peer.id, peer.told)
            self._placed = len(self.world.peers)
        if now - self._probed_at >= PROBE_AGAIN_S:
            self._probed_at = now
            for peer_id in self._probes.choose(self.view, now, self.world.scenario.probes):
                if self.world.by_id[peer_id].alive:
                    self.connect(self.world.by_id[peer_id])
                elif peer_id not in self.links:
                    self.health.failed(peer_id, now)

    def connect(self, peer: Peer) -> None:
        """To a peer that lives. The round trip is measured."""
        self.links[peer.id] = None
        peer.linked[self] = None
        if peer.state is PeerState.DRAINING:
            self.leaving.add(peer.id)
        rtt_s = self.world.rtt_s(self.place, peer.place) * self.noise()
        self.costs.observe_rtt(CLIENT, peer.id, rtt_s)

    def dial_silent(self, peer: Peer) -> float:
        """A host that does not answer. Returns when the dial ends, this one or the one under way."""
        if peer.id not in self._dialled:
            agenda, connect_s = self.world.agenda, self.world.scenario.connect_s
            self._dialled[peer.id] = agenda.now + connect_s
            self.dials.begins(peer.id, 2 * self.costs.link_s(CLIENT, peer.id), agenda.now)
            agenda.after(connect_s, self._given_up, peer)
        return self._dialled[peer.id]

    @property
    def dialled(self) -> frozenset[PeerId]:
        """Hosts that do not answer, while the dial goes on."""
        return frozenset(self._dialled)

    def _given_up(self, peer: Peer) -> None:
        del self._dialled[peer.id]
        self.dials.ends(peer.id, self.world.agenda.now, reached=False)
        self.health.failed(peer.id, self.world.agenda.now)

    def link_lost(self, peer: Peer) -> None:
        if peer.id in self.links:
            del self.links[peer.id]
            peer.linked.pop(self, None)
            self.leaving.discard(peer.id)
            self.health.failed(peer.id, self.world.agenda.now)

    def sessions(self, peer_id: PeerId) -> int:
        """As the last ping told."""
        return self.world.by_id[peer_id].sessions_at(self.read_at) if peer_id in self.links else 0

    def learn(self, route: Route, times: Sequence[tuple[float, float]], noise: float) -> None:
        """A decode step's own timing, as `swarm/client.py` takes it. `times`: of each hop, its pass and the wait."""
        costs, by_id, now = self.costs, self.world.by_id, self.world.agenda.now
        costs.advance(now)
        for index, hop in enumerate(route):
            peer, record = by_id[hop.peer_id], self.view.records.get(hop.peer_id)
            pass_s, queue_s = times[index]
            block_s = pass_s / (hop.exit - hop.entry)
            costs.observe_decode(peer.id, block_s * noise, record.decode_s if record is not None else 0.0)
            costs.observe_queue(peer.id, queue_s * noise)
            self.health.worked(peer.id, now)
            if index > 0:
                before = by_id[route[index - 1].peer_id]
                costs.observe_rtt(before.id, peer.id, self.world.rtt_s(before.place, peer.place) * noise)

    def noise(self) -> float:
        return max(0.1, self.rng.gauss(1.0, self.world.scenario.noise)) if self.world.scenario.noise else 1.0

    # -- plans -----------------------------------------------------------------------------------------------

    def plan(
        self, request: Request, without: frozenset[PeerId] = frozenset(), *, first: bool = False, crowds: bool = False
    ) -> Plan:
        """The cheapest route now; with `crowds`, rather where few sessions are, and `first`, of a new session, too.
        Raises NoRoute."""
        begun = self._clock() if self._clock else 0.0
        now = self.world.agenda.now
        self.costs.advance(now)
        self.short = self._candidates.short_view(self.view, now, request, without=without)
        if first or crowds:
            request = self._with_crowds(request, first)
        found = plan(self.short, self.costs, request, now)
        self.world.tally.planned(
            len(self.short.records), found.relaxations, self._clock() - begun if self._clock else None
        )
        return found

    def _with_crowds(self, request: Request, first: bool) -> Request:
        penalties = crowd_penalties(self.short, self.costs, request, self.sessions, self.rng if first else None)
        return replace(request, penalties=penalties)

    def plan_split(self, request: Request, prompt: int, without: frozenset[PeerId]) -> Plan | Split:
        """For a long prompt: one chain, or one for it and another for the answer. Raises NoRoute."""
        begun = self._clock() if self._clock else 0.0
        now = self.world.agenda.now
        self.costs.advance(now)
        prefill = replace(request, tokens=prompt)
        self.short = self._candidates.short_view(self.view, now, request, prefill, without=without)

        def move_s(before: Route, after: Route) -> float:
            new = [hop for old, hop in zip(before, after, strict=True) if old.peer_id != hop.peer_id]
            return max((self.replay_s(hop, prompt) for hop in new), default=0.0)

        request, prefill = (self._with_crowds(each, first=True) for each in (request, prefill))
        found = split_plan(self.short, self.costs, request, prefill, now, tokens=EXPECTED_TOKENS, move_s=move_s)
        relaxations = found.relaxations if isinstance(found, Plan) else found.prefill.relaxations
        self.world.tally.planned(len(self.short.records), relaxations, self._clock() - begun if self._clock else None)
        return found

    def replay_s(self, hop: Hop, positions: int) -> float:
        """What it believes that computing so many positions anew takes a hop."""
        record = self.view.records.get(hop.peer_id)
        if record is None:
            return 0.0
        return positions * (hop.exit - hop.entry) * self.costs.block_s(record, CHUNK) / CHUNK

    def spare(self, hop: Hop, without: Iterable[PeerId], records: Iterable[PeerRecord]) -> PeerRecord | None:
        """Who could take that hop's place: the fastest for us, by the rule of `SwarmClient.spares`."""
        without, now = frozenset(without) | self.leaving, self.world.agenda.now
        best: tuple[float, PeerId] | None = None
        found = None
        for record in records:
            fits = record.span.start <= hop.entry and hop.exit <= record.span.end and record.expires_at >= now
            if fits and record.state is PeerState.SERVING and record.peer_id not in without:
                compute_s = self.costs.block_s(record, 1) * (hop.exit - hop.entry)
                score = compute_s + self.costs.link_s(CLIENT, record.peer_id), record.peer_id
                if best is None or score < best:
                    best, found = score, record
        return found

    # -- what is true ----------------------------------------------------------------------------------------

    def links_s(self, route: Route) -> float:
        """All ways of one step, from here through the hops and back, with what any hop takes."""
        ends = [self.place, *(self.world.by_id[hop.peer_id].place for hop in route), self.place]
        ways_s = sum(self.world.rtt_s(a, b) / 2 for a, b in pairwise(ends))
        return ways_s + len(route) * self.world.scenario.hop_s
