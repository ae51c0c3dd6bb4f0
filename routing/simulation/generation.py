"""One answer of a simulated client, from its question to its last token, through losses, moves and peers that leave.

Owns what `swarm/healing.py` and `swarm/session.py` own of a session, on virtual time: the search for a route, standbys,
looks for a cheaper route, peers that leave or die. Which route, and whether to move, say the real `plan`, `Mover` and
`Health`. How long a dial or a replay takes is in `delays.py`.

Tokens are not events: between two things that concern the route (a load, a loss, a look) they come evenly, and only
their number is kept. What a client measures of them is noisy; how long they take on average is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from routing.errors import NoRoute
from routing.moving import LOOK_AGAIN_S, Mover, crowds, is_made_ready_first
from routing.planner import Plan, Split
from routing.request import Request
from routing.retry import NEWCOMER_S
from routing.simulation.client import Client
from routing.simulation.delays import dial, hold_up_s, ready_s
from routing.simulation.queueing import Stop, beside_s, longest_wait_s, through
from routing.types import Hop, PeerId, Route

if TYPE_CHECKING:
    from routing.simulation.peer import Peer

LONG_PROMPT = 64  # a prompt of so many tokens and its answer may take different chains
LOOK_EVERY_S = 0.2  # at the directory, while no route is found
MEASURED = 5  # steps at most of one look that are told to the measurements one by one
WATCHED = 6  # steps that are looked at one by one when their time has changed
CHANGED = 0.2  # by so much, relative
STANDBY_AGAIN_S = 2.0


class Generation:
    """Mutable. `version` counts what made earlier plans of events void."""

    def __init__(self, client: Client, prompt: int, answer: int, ended: Callable[[], None]):
        self.client, self.world, self.agenda = client, client.world, client.world.agenda
        self.scenario, self.tally = client.world.scenario, client.world.tally
        self.prompt, self.answer, self._ended = prompt, answer, ended
        self.begun = self.agenda.now
        self.first_at: float | None = None  # the first token
        self.done = 0.0  # tokens
        self.gap_s = 0.0  # the longest between two of them
        self._last_at = math.inf  # when the last whole one was there
        self.route: Route | None = None
        self.standbys: dict[Hop, PeerId] = {}
        self.running = self.over = False
        self.filling: frozenset[PeerId] = frozenset()  # who computes what a new route has not got
        self.step_s = self._longest_s = math.inf
        self._alike = 0  # steps since their time changed
        self._times: list[tuple[float, float]] = []  # of each hop: its pass, and what a step waits for it
        self._avoid: set[PeerId] = set()
        self._failed: frozenset[PeerId] = frozenset()
        self._looked_at = -math.inf
        self._trouble_since = self.begun
        self._seek_since = self.begun
        self._why = "first"
        self._since = self.begun  # tokens are counted up to here
        self._told = 0.0  # tokens that the measurements know of
        self._watch = 0
        self._watched_s = math.inf
        self._look_at = 0.0
        self._choose_at = math.inf
        self._version = self._route_version = 0
        self._target: Route | None = None  # a route that is being made ready
        self._mover = Mover(client.rng)

    @property
    def position(self) -> int:
        return self.prompt + int(self.done)

    # -- the search for a route ------------------------------------------------------------------------------

    def begin(self) -> None:
        self._version += 1
        self._attempt(self._version)

    def _seek(self, why: str, since: float) -> None:
        """`since`: the text has stood still from then on."""
        if not math.isfinite(self._trouble_since):
            self._trouble_since = since
        self.running, self._why = False, why
        self._failed, self._looked_at, self._seek_since = frozenset(), -math.inf, self.agenda.now
        self._version += 1
        self._attempt(self._version)

    def _attempt(self, version: int) -> None:
        now, scenario = self.agenda.now, self.scenario
        if version != self._version:
            return
        if now - self._trouble_since > max(scenario.recovery_s, scenario.wait_s):
            self._give_up()
            return
        self.client.refresh()
        try:
            route, targets = self._with_standbys(), None
            if route is None:
                route, targets = self._find()
        except NoRoute:
            if self._looked_at >= self._seek_since and now - self._seek_since >= max(scenario.wait_s, NEWCOMER_S):
                self._give_up()
                return
            pause_s = 0.0 if self._looked_at < self._seek_since else LOOK_EVERY_S
            self.agenda.after(pause_s, self._look_again, version)
            return
        dial_s, refused = dial(self.client, route)
        self.agenda.after(dial_s, self._dialled, version, route, refused, targets)

    def _look_again(self, version: int) -> None:
        if version == self._version:
            self.client.refresh(at_once=True)
            self._looked_at, self._failed = self.agenda.now, frozenset()
            self._attempt(version)

    def _find(self) -> tuple[Route, Route | None]:
        """Rather by peers that are connected than by some that were lost. Raises NoRoute."""
        gone = frozenset(peer_id for peer_id in self._avoid if peer_id not in self.client.links)
        try:
            return self._plan_for_prompt(self._failed | gone)
        except NoRoute:
            if gone <= self._failed:
                raise
            return self._plan_for_prompt(self._failed)

    def _plan_for_prompt(self, without: frozenset[PeerId]) -> tuple[Route, Route | None]:
        first = self._why == "first"
        if not first or self.prompt < LONG_PROMPT:
            return self.client.plan(self.request(), without, first=first).route, None
        found = self.client.plan_split(self.request(), self.prompt, without)
        if isinstance(found, Split):
            return found.prefill.route, found.decode.route
        return found.route, None

    def request(self, *, prefer: Route | None = None, hysteresis: float = 0.1) -> Request:
        client, now = self.client, self.agenda.now
        held = self.route.peers if self.route is not None else frozenset()
        if self.scenario.standby == "warm":
            held |= frozenset(self.standbys.values())
        return Request(
            n_blocks=self.scenario.n_blocks,
            avoid_peers=client.health.banned_peers(now).union(self._avoid, client.leaving, client.dials.late(now)),
            penalties=client.health.penalties(now),
            held=held,
            context=self.position if held else 0,
            prefer=prefer,
            hysteresis=hysteresis,
        )

    def _with_standbys(self) -> Route | None:
        """The route with standbys for what was lost, if they can make up for all of it."""
        if self.route is None:
            return None
        hops = []
        for hop in self.route:
            lost = hop.peer_id in self._avoid
            stand_in = self.standbys.get(hop) if lost else hop.peer_id
            if stand_in is None or stand_in not in self.client.links or stand_in in self._failed | self._avoid:
                return None
            hops.append(Hop(stand_in, hop.entry, hop.exit))
        return Route(tuple(hops))

    def _dialled(self, version: int, route: Route, refused: frozenset[PeerId], targets: Route | None) -> None:
        if version != self._version:
            return
        client, now = self.client, self.agenda.now
        gone = {hop.peer_id for hop in route if not self.world.by_id[hop.peer_id].alive}
        lost = sorted(refused | gone - client.dialled)
        for peer_id in lost:
            client.link_lost(self.world.by_id[peer_id])
            if not self.world.by_id[peer_id].silent:  # of those the dial's end told
                client.health.failed(peer_id, now)
        if lost or gone:
            self._failed |= frozenset(lost)
            self._avoid.update(lost)
            self._attempt(version)
            return
        for hop in route:
            if hop.peer_id not in client.links:
                client.connect(self.world.by_id[hop.peer_id])
        self._take(route, self._hold_up_s(route, in_step=True), targets)

    def _give_up(self) -> None:
        self.tally.gave_up(self.world.covered_since <= self._seek_since)
        self._end(failed=True)

    # -- routes ----------------------------------------------------------------------------------------------

    def _hold_up_s(self, route: Route, *, in_step: bool) -> float:
        return hold_up_s(self.client, self.route, route, self.position, self.standbys, in_step=in_step)

    def _take(self, route: Route, hold_s: float, targets: Route | None = None) -> None:
        """On from here after `hold_s`."""
        self._version += 1
        self._route_version += 1
        before, self.route, self._target = self.route, route, None
        stay = {hop: peer_id for hop, peer_id in self.standbys.items() if hop in route.hops}
        self.standbys = {hop: peer_id for hop, peer_id in stay.items() if peer_id not in route.peers}
        self.running, self._since = False, self.agenda.now
        self.filling = route.peers - (before.peers if before is not None else frozenset()) if hold_s else frozenset()
        self.world.seat(self, before, route)
        self.agenda.after(hold_s, self._resume, self._version, targets)

    def _resume(self, version: int, targets: Route | None) -> None:
        if version != self._version or self.route is None:
            return
        now = self.agenda.now
        if self._why == "first":
            self.first_at = self._last_at = now
            self.tally.first_token(now - self.begun)
            self._token_comes()
        elif math.isfinite(self._trouble_since):
            self.tally.stalled(now, now - self._trouble_since, self._why)
            self._token_comes()
        self._trouble_since, self._since = math.inf, now
        self.running, self._watched_s, self._told = True, math.inf, self.done
        self._mover.rerouted()
        self._choose_standbys()
        self.world.runs(self, self.route.peers)
        self.load_changed()
        if targets is not None:
            self._make_ready(targets, "split")
        for hop in self.route:
            if hop.peer_id in self.client.leaving:
                self._hand_over(self.world.by_id[hop.peer_id])

    def _token_comes(self) -> None:
        """With the output of what the route had not got. What was under way when a hop was lost came to nothing."""
        now, whole = self.agenda.now, math.floor(self.done + 1e-6) + 1.0
        self.tally.produced(now, now, whole - self.done)
        self.client.tokens += whole - self.done
        self.gap_s, self._last_at, self.done = max(self.gap_s, now - self._last_at), now, whole

    def _choose_standbys(self) -> None:
        if self.scenario.standby == "none" or self.route is None:
            return
        records, taken = list(self.client.short.records.values()), set(self.route.peers) | self._avoid
        for hop in self.route:
            if hop in self.standbys and self.standbys[hop] in self.client.links:
                continue
            self.standbys.pop(hop, None)
            linked = [record for record in records if record.peer_id in self.client.links]
            record = self.client.spare(hop, taken, linked) or self.client.spare(hop, taken, records)
            if record is not None and self.world.by_id[record.peer_id].alive:
                self.client.connect(self.world.by_id[record.peer_id])
                self.standbys[hop] = record.peer_id
        for hop, after in pairwise(self.route):
            self.world.connect(*({each.peer_id, self.standbys.get(each, each.peer_id)} for each in (hop, after)))
        self._choose_at = self.agenda.now + STANDBY_AGAIN_S if len(self.standbys) < len(self.route) else math.inf

    # -- tokens ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Count the tokens up to now."""
        now = self.agenda.now
        if self.running and self.route is not None and now > self._since:
            tokens = min((now - self._since) / self.step_s, max(0.0, self.answer - self.done))
            self._note_gaps(tokens)
            self.done += tokens
            self.client.tokens += tokens
            self.tally.produced(self._since, now, tokens)
            for hop in self.route:
                self.world.by_id[hop.peer_id].work += tokens * (hop.exit - hop.entry)
        self._since = max(self._since, now)

    def _note_gaps(self, tokens: float) -> None:
        """Of the whole tokens among so many, that came since the last time, evenly but for what waits vary."""
        whole = math.floor(self.done + tokens + 1e-6) - math.floor(self.done + 1e-6)
        if whole:
            first_at = self._since + (1 - (self.done + 1e-6) % 1) * self.step_s
            # Of k waits that are spread evenly the longest is (k - 1) / (k + 1) of the way from their mean to the most.
            self._alike += whole
            far = (self._alike - 1) / (self._alike + 1)
            self.gap_s = max(self.gap_s, first_at - self._last_at)
            if whole > 1:
                self.gap_s = max(self.gap_s, self.step_s + far * (self._longest_s - self.step_s))
            self._last_at = first_at + (whole - 1) * self.step_s

    def load_changed(self) -> None:
        """A step takes another time from now on: after `settle`."""
        if not self.running or self.route is None:
            return
        self._measure(self.route)  # the steps until now, while it is known what they took
        peers, ways_s = [self.world.by_id[hop.peer_id] for hop in self.route], self.client.links_s(self.route)
        stops = [
            Stop(
                alone_s := (hop.exit - hop.entry) * peer.decode_s, peer.decoding, peer.most,
                beside_s(alone_s, peer.chunk_s(peer.prompts, self.prompt)) if peer.prompts else 0.0,
            )
            for hop, peer in zip(self.route, peers, strict=True)
        ]  # fmt: skip
        self._times = through(ways_s, stops, self.scenario.slope)
        for peer, stop, (_, wait_s) in zip(peers, stops, self._times, strict=True):
            if not stop.beside_s:  # a prompt is soon over: records tell a running mean
                peer.queue_s = wait_s
        passes_s, self._alike = sum(pass_s for pass_s, _ in self._times), 0
        self.step_s = ways_s + passes_s + sum(wait_s for _, wait_s in self._times)
        self._longest_s = ways_s + passes_s + longest_wait_s(stops, self._times)
        if abs(self.step_s - self._watched_s) > CHANGED * self.step_s:
            self._watched_s, self._watch = self.step_s, WATCHED
        self._plan_next()

    def _plan_next(self) -> None:
        """The next event of this answer: its end, or a look at how it goes."""
        self._version += 1
        now = self.agenda.now
        end = now + max(0.0, self.answer - self.done) * self.step_s
        # While a step's time is new, each is looked at as it comes, as the session does: always between two tokens.
        begun = (self.done + 1e-6) % 1
        steps = 1.0 if self._watch else max(1.0, math.ceil((self._look_at - now) / self.step_s + begun))
        look = now + (steps - begun) * self.step_s
        self.agenda.at(min(end, look), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version != self._version or self.route is None:
            return
        self.settle()
        if self.done >= self.answer - 1e-6:
            self._end(failed=False)
            return
        self._measure(self.route)
        now = self.agenda.now
        if now >= self._choose_at:
            self._choose_standbys()
        if self._mover.is_due(now) and self._target is None and (self._watch or now >= self._look_at):
            self._look_at = now + LOOK_AGAIN_S
            if self._look_around(self.route):
                return
        elif now >= self._look_at:
            self._look_at = now + self.scenario.look_s
        self._watch = max(0, self._watch - 1)
        self._plan_next()

    def _measure(self, route: Route) -> None:
        """What the steps since the last time tell the pace and the costs."""
        for _ in range(min(MEASURED, int(self.done - self._told + 1e-6))):
            noise = self.client.noise()
            self.client.learn(route, self._times, noise)
            self._mover.step(self.step_s * noise, self.agenda.now)
        self._told = self.done

    # -- moves -----------------------------------------------------------------------------------------------

    def _look_around(self, route: Route) -> bool:
        """Whether another chain is so much cheaper that it is taken now."""
        self.client.refresh()
        found = self._mover.look(self.agenda.now, lambda margin: self._beside(route, margin))
        if found is None:
            return False
        gain = self._mover.pace.now_s / found.cost_s
        if not self._mover.our_turn(*crowds(route, found.route, self.client.sessions), gain):
            return False
        missing = [hop.peer_id for hop in found.route if hop.peer_id not in self.client.links]
        if missing:
            for peer_id in missing:
                peer = self.world.by_id[peer_id]
                if peer.alive:
                    self.client.connect(peer)
                else:
                    self.client.health.failed(peer_id, self.agenda.now)
            return False
        gain_s = self._mover.pace.now_s - found.cost_s
        self._mover.moves(self.agenda.now)
        self.tally.moved += 1
        stall_s = max(self.client.replay_s(hop, self.position) for hop in found.route if hop not in route.hops)
        if is_made_ready_first(route, found.route, stall_s, gain_s):
            self._make_ready(found.route, "move")
            return False
        self._why, self._trouble_since = "move", self.agenda.now
        self._take(found.route, self._hold_up_s(found.route, in_step=False))
        return True

    def _beside(self, route: Route, margin: float) -> Plan | None:
        try:
            found = self.client.plan(self.request(prefer=route, hysteresis=margin), crowds=True)
        except NoRoute:
            return None
        return None if found.route == route else found

    def _make_ready(self, route: Route, why: str) -> None:
        """What new hops need is computed while the text goes on; then they take over without holding it up."""
        self._target = route
        until_s = ready_s(self.client, self.route, route, self.position, self.standbys)
        self.agenda.after(until_s, self._switch, self._route_version, route, why)

    def _switch(self, route_version: int, route: Route, why: str) -> None:
        if route_version != self._route_version or not self.running or self.over:
            return
        self._target = None
        if not all(self.world.by_id[hop.peer_id].alive for hop in route):
            return
        self.settle()
        for hop in route:
            self.client.connect(self.world.by_id[hop.peer_id])
        self._why = why
        if why == "leave":
            self.tally.handed_over += 1
        self._take(route, 0.0)

    # -- peers that go ---------------------------------------------------------------------------------------

    def peer_leaves(self, peer: Peer) -> None:
        """In good order: somebody who can take exactly its place is made ready, if there is anybody."""
        if self.running and not self.over:
            self._hand_over(peer)

    def _hand_over(self, peer: Peer) -> None:
        if self.route is None or not peer.alive:
            return
        self.client.refresh()
        hops = []
        for hop in self.route:
            if hop.peer_id == peer.id:
                record = self.client.spare(hop, self.route.peers | self._avoid, self.client.view.records.values())
                if record is None:
                    return  # it stays until the peer is gone
                hop = Hop(record.peer_id, hop.entry, hop.exit)
            hops.append(hop)
        self._make_ready(Route(tuple(hops)), "leave")

    def peer_stops(self, peer: Peer) -> None:
        """It is gone, and no token comes any more; the client learns it a little later."""
        if self.over or self.route is None:
            return
        self.settle()
        self.running = False
        self._version += 1
        if not math.isfinite(self._trouble_since):
            self._trouble_since = self.agenda.now
        notice_s = self.scenario.silence_s if peer.silent else 0.0
        notice_s += self.world.rtt_s(self.client.place, peer.place) / 2
        self.agenda.after(notice_s, self._lost, self._version, peer)

    def _lost(self, version: int, peer: Peer) -> None:
        self._avoid.add(peer.id)
        self.client.link_lost(peer)
        if version == self._version and not self.over:
            self.tally.lost_hops += 1
            why = "first" if self.first_at is None else "loss"
            self._seek(why, self.agenda.now)

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(self, *, failed: bool) -> None:
        self.over, self.running = True, False
        self._version += 1
        now, client = self.agenda.now, self.client
        if self.route is not None:
            self.world.seat(self, self.route, None)
        client.busy_s += now - self.begun
        self.tally.had_gap(self.gap_s)
        if not failed and self.first_at is not None:
            self.tally.finished(self.answer, now - self.first_at)
        self._ended()
