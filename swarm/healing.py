"""Which route a session takes, from its first one on: what it avoids, who stands by, the search for another route when
something is lost, and moves between two steps.

How long a search may take is the caller's to say (`SessionConfig`). The rule by which a route is opened is in
`driver.py`, links and view belong to `client.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from routing.cost import CLIENT
from routing.errors import NoRoute, Overloaded, SessionError, SwarmError, TimedOut
from routing.explain import Explanation
from routing.moving import Mover, crowds, is_made_ready_first
from routing.planner import Plan
from routing.request import Request
from routing.retry import NEWCOMER_S, RetryPolicy
from routing.types import Hop, Objective, PeerId, Route
from swarm.driver import LEAST_CHUNK, NeedRoute, StandbyLost
from swarm.standbys import Standbys

if TYPE_CHECKING:
    from swarm.session import Session

log = logging.getLogger(__name__)

FULL_REST_S = 30.0  # before a peer that had no room for it may stand by again
PROBE_S = 0.3  # an accused end of a broken edge has this long to answer us
LOOK_EVERY_S = 0.2  # at the directory, while no route is found
LEAST_DEADLINE_S, DEADLINE_TIMES = 15.0, 20.0  # of a step: longer by so many times what it should take
PRICE_AGAIN_S = 5.0
SUSPECT_S = 10.0  # a route without those who may be stuck may cost so much more
SPARES = 2  # of each hop, to be connected with
EXPECTED_TOKENS = 256  # of an answer to a long prompt: what another chain for it must repay itself over


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One change of route."""

    at_s: float
    position: int  # tokens held when it happened
    reason: str
    seconds: float  # until the new route was opened
    before: Route | None
    after: Route


class Healing:
    """Of one session."""

    def __init__(self, session: Session):
        self.session, self.client, self.driver, self.config = session, session.client, session.driver, session.config
        self.recoveries: list[Recovery] = []
        self.warm_peers: frozenset[PeerId] = frozenset()  # that may hold what another process computed
        self._avoid_peers: set[PeerId] = set()  # lost by this session; used again only where nobody else is left
        self._avoid_edges: set[tuple[PeerId, PeerId]] = set()
        self._settled_edges: set[tuple[PeerId, PeerId]] = set()  # of them: both ends were asked
        self._excluded: frozenset[PeerId] = frozenset()
        self._lost: set[PeerId] = set()  # of the present route
        self._forgot: set[PeerId] = set()  # the same, and alive: they have only lost what they held
        self._standbys = Standbys(session.client, session.config.standby, session.config.constraints)
        self._suspects: frozenset[PeerId] = frozenset()  # one of them may be stuck
        self._moved_from: set[PeerId] = set()  # to be let go when the new route has worked
        self._task: asyncio.Task[None] | None = None
        self._lost_again = False
        self._trouble_since: float | None = None  # the first loss since the last output
        self._pauses: Iterator[float] = iter(())
        self._patience: asyncio.Timeout | None = None  # of the search for a route under way
        self._full = False  # a peer that could help was full
        self._random = random.Random(session.id)
        self._mover = Mover(self._random)
        self._why_targets = ""
        self._priced = (0, 0.0, 0.0)  # tokens of a step, when it was priced, and what it should take

    def explain(self) -> Explanation:
        """Why this route. Raises NoRoute."""
        return self.client.explain(self._request(), self.driver.route, self._excluded)

    # -- what the session tells ------------------------------------------------------------------------------

    def step_begins(self, tokens: int, now: float) -> None:
        # If a route is being sought already, it is from now on for this step.
        self._trouble_since, self._full = None if self._task is None else now, False
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + self._limit_s)
        self.renew(now)
        self.driver.deadline_s = self._deadline_s(tokens, now)

    def _deadline_s(self, tokens: int, now: float) -> float | None:
        """Without a sign of progress for so long, somebody is stuck: learned from what such a step should take."""
        limit, route = self.config.deadline_s, self.driver.route
        if limit is None or route is None:
            return limit
        if tokens != self._priced[0] or now - self._priced[1] > PRICE_AGAIN_S:
            plan = self.client.price(route, replace(self._request(), tokens=tokens))
            self._priced = (tokens, now, plan.cost_s if plan is not None else limit)
        return min(limit, LEAST_DEADLINE_S + DEADLINE_TIMES * self._priced[2])

    def step_sent(self) -> None:
        """Without a route it went nowhere yet."""
        if self._task is None and (self.driver.route is None or self.driver.healing):
            self.seek("first route" if self.driver.route is None else "the route was lost while idle")

    def step_ended(self) -> None:
        self._trouble_since, self._full, self._suspects = None, False, frozenset()
        for peer_id in self._moved_from - self.driver.route.peers if self.driver.route is not None else ():
            self.driver.release(peer_id)
        self._moved_from.clear()

    def link_lost(self, peer_id: PeerId) -> None:
        if self.driver.route is not None and peer_id in self.driver.route.peers:
            self._avoid_peers.add(peer_id)

    def exclude(self, peers: frozenset[PeerId]) -> None:
        """Never to be used again."""
        self._excluded |= peers

    async def finished(self) -> None:
        """Waits for a search that is under way."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, SwarmError):
                await self._task

    # -- what the driver tells -------------------------------------------------------------------------------

    def need_route(self, need: NeedRoute) -> None:
        now = time.monotonic()
        self._avoid_peers |= need.peers
        self._lost |= need.peers
        self._forgot |= need.forgot
        self._avoid_edges |= need.edges
        if need.stalled and self.driver.route is not None:
            self._suspects |= self.driver.route.peers
        for peer_id in need.peers:
            self.client.health.failed(peer_id, now)
        for peer_id, wait_s in need.busy.items():
            self.client.busy_until[peer_id] = now + wait_s
            self._full = True
        self.seek(need.reason)

    def standby_lost(self, lost: StandbyLost) -> None:
        now = time.monotonic()
        log.info("%s does not stand by any more: %s", lost.peer_id, lost.reason)
        if lost.busy_s is None:
            self._standbys.failed(lost.peer_id, now)
        else:
            self._standbys.failed(lost.peer_id, now, max(FULL_REST_S, lost.busy_s))

    def renew(self, now: float) -> None:
        """Between two steps, so that it holds up none: not before the first one, whose prompt comes first."""
        driver = self.driver
        if driver.route is None or driver.healing or not self.session.position or self.session.closed:
            return
        self._move_off(driver.route, now)
        self._look_around(driver.route, now)
        if not self._standbys.is_due(driver.route, now):
            return
        chosen = self._standbys.choose(
            driver.route, driver.standing_by, self._avoid_peers, self._excluded, self._avoid_edges, now
        )
        if set(chosen) != set(driver.standby) or driver.lazy != self._standbys.lazy(driver.route, chosen):
            self.reopen(driver.route, chosen, now)
            self.session.act()

    # -- peers that leave ------------------------------------------------------------------------------------

    def peer_leaves(self, peer_id: PeerId) -> None:
        """In good order: it serves on until somebody else has what it holds."""
        route = self.driver.route
        self.client.leaving.add(peer_id)
        self._standbys.leaves(peer_id)
        if route is None or peer_id not in route.peers:
            self.driver.release(peer_id)
            return
        self._standbys.look_soon()
        if not self.driver.awaiting:
            self.renew(time.monotonic())

    def _move_off(self, route: Route, now: float) -> None:
        """From hops that are to move to those who stand by for them, when these are warm."""
        warm = [hop for hop in self.driver.standing_by if self.driver.is_warm(hop)]
        spans = {(hop.entry, hop.exit) for hop in warm}
        left = {hop.peer_id for hop in route if (hop.entry, hop.exit) in spans and self._standbys.moves(hop)}
        found = self._standbys.replaced(route, warm, left, self._avoid_edges) if left else None
        plan = self.client.price(found, self._request()) if found is not None else None
        if plan is not None:
            leaving = sorted(left & self.client.leaving)
            self._take(plan, f"{', '.join(leaving)} leaves" if leaving else self._why_targets, now)
            self._moved_from |= left - plan.route.peers

    # -- cheaper routes --------------------------------------------------------------------------------------

    def step_took(self, seconds: float) -> None:
        """A decode step on the present route."""
        self._mover.step(seconds, time.monotonic())

    def _look_around(self, route: Route, now: float) -> None:
        """Whether another chain is so much cheaper that moving there pays."""
        if not self._mover.is_due(now) or self._standbys.moving(route):
            return
        plan = self._mover.look(now, lambda margin: self._plan_beside(route, margin))
        if plan is None:
            if seems := self._plan_beside(route, 0.0):
                self.client.trying.try_out(route, seems.route)
            return
        pace_s = self._mover.pace.now_s
        if not self._mover.our_turn(*crowds(route, plan.route, self.client.sessions_at), pace_s / plan.cost_s, now):
            return
        if missing := [peer_id for peer_id in plan.route.peers if self.client.link(peer_id) is None]:
            self.client.spawn(self.client.reaching.connect(missing, self.config.connect_s))
            return
        self._mover.moves(now)
        reason = f"a cheaper route: {1e3 * plan.cost_s:.0f} ms a token instead of {1e3 * pace_s:.0f}"
        stall_s = max(self.client.move_s(hop, self.session.position) for hop in set(plan.route) - set(route))
        if is_made_ready_first(route, plan.route, stall_s, pace_s - plan.cost_s):
            self._standbys.targets = {(hop.entry, hop.exit): hop.peer_id for hop in plan.route}
            self._why_targets = reason
            self._standbys.look_soon()
        else:
            self._take(plan, reason, now)
            self._moved_from |= route.peers - plan.route.peers

    def _plan_beside(self, route: Route, margin: float) -> Plan | None:
        request = replace(self._request(), prefer=route, hysteresis=margin)
        try:
            plan = self.client.plan(request, without=self._excluded, crowds=True)
        except NoRoute:
            return None
        return None if plan.route == route else plan

    # -- the search for a route ------------------------------------------------------------------------------

    def seek(self, reason: str) -> None:
        if self.session.closed:
            return
        if self._task is not None and not self._task.done():
            self._lost_again = True
            return
        now = time.monotonic()
        if self._trouble_since is None:
            policy = RetryPolicy(deadline_s=self._limit_s, attempts=100, base_s=0.02, cap_s=2.0)
            self._trouble_since, self._pauses = now, policy.delays(random.Random(self.session.id))
        self._task = self.client.spawn(self._find_route(reason, now))

    async def _find_route(self, reason: str, since: float) -> None:
        assert self._trouble_since is not None
        try:
            async with asyncio.timeout(self._trouble_since + self._limit_s - since) as self._patience:
                await asyncio.sleep(next(self._pauses, self._limit_s))
                await self._settle_edges()
                plan = self._plan_with_standbys() or await self._connected_plan(since)
            self._task = self._patience = None
            self._take(plan, reason, since)
        except TimeoutError:
            self.session.fail(self._gave_up(reason))
        except SwarmError as error:
            self.session.fail(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = self._patience = None

    def _take(self, plan: Plan, reason: str, since: float) -> None:
        before, now = self.driver.route, time.monotonic()
        shares = self.config.share_prefixes and before is None
        warm = self.client.warm_positions(self.session, plan.route) if shares else 0
        # Who forgot changes places with who stood by.
        ours = [*self.driver.standing_by, *(hop for hop in before or () if hop.peer_id in self._forgot - self._lost)]
        wanting = {(hop.entry, hop.exit) for hop in plan.route if self._standbys.wants(hop)}
        standby = [hop for hop in ours if hop.peer_id not in plan.route.peers and (hop.entry, hop.exit) in wanting]
        self._lost, self._forgot = set(), set()
        self.client.joined(plan.route.peers - (before.peers if before is not None else frozenset()))
        self.reopen(plan.route, standby, now, warm)
        self._standbys.look_soon()
        self._mover.rerouted()
        self.recoveries.append(
            Recovery(at_s=since, position=self.session.position, reason=reason, seconds=now - since, before=before,
                     after=plan.route)
        )  # fmt: skip
        self.session.act()

    def reopen(self, route: Route, standby: Sequence[Hop], now: float, warm: int = 0) -> None:
        ready = self._ready(route, standby)
        peers = route.peers | {hop.peer_id for hop in standby}
        addresses = {peer_id: self.client.addresses(peer_id) for peer_id in peers.union(*ready)}
        lazy = self._standbys.lazy(route, standby)
        pulls = {hop for hop in standby if hop not in lazy and self._pulling_pays(route, hop)}
        self.driver.open(route, addresses, now, warm, ready, standby, lazy, pulls)
        self.client.watch(peers)

    def _pulling_pays(self, route: Route, standby: Hop) -> bool:
        """Whether a standby that has nothing yet gets what its hop holds sooner from that hop than by computing it."""
        if (standby.peer_id, standby.entry, standby.exit) in self.driver.seats_ever:
            return False
        source = next(hop.peer_id for hop in route if hop.entry == standby.entry)
        return self.client.transfer_pays(source, standby, self.session.position)

    def _ready(self, route: Route, standby: Sequence[Hop]) -> list[list[PeerId]]:
        """For each place, who may be its neighbour after a loss: connections that are there already spare a failover
        their handshakes."""
        avoided = self._avoid_peers | self._excluded | route.peers
        able: dict[int, list[PeerId]] = {}  # for each hop: who could take its place, by its first block
        for hop in route:
            stand_by = [other.peer_id for other in standby if other.entry == hop.entry]
            spares = self.client.spares(hop, avoided | set(stand_by), self.config.constraints)
            able[hop.entry] = [*stand_by, *spares][:SPARES]
        last = {hop.exit: hop for hop in route}  # by the block after its last
        here = {hop.entry: hop.peer_id for hop in route}
        ready = []
        for hop in (*route, *standby):
            before = last[hop.entry].entry if hop.entry in last else None
            # A standby is connected with nobody yet; who is in the route is, with its neighbours.
            found = [here[hop.exit]] if hop in standby and hop.exit in here else []
            ready.append(found + able.get(hop.exit, []) + (able[before] if before is not None else []))
        return ready

    def _plan_with_standbys(self) -> Plan | None:
        """The route with standbys in the place of what was lost, if they can make up for all of it."""
        route = self.driver.route
        if route is None or not self.driver.standing_by or self._suspects:
            return None
        lost = self._lost | self._forgot | self._excluded
        found = self._standbys.replaced(route, self.driver.standing_by, lost, self._avoid_edges)
        return None if found is None else self.client.price(found, self._request())

    @property
    def _limit_s(self) -> float:
        return max(self.config.recovery_s, self.config.wait_s)

    @property
    def _patience_s(self) -> float:
        """For blocks that nobody serves. That our own network is gone says nothing about them."""
        return self._limit_s if self.client.reaching.offline else max(self.config.wait_s, NEWCOMER_S)

    def _gave_up(self, reason: str) -> SessionError:
        if self._full:
            return Overloaded(f"the peers that could help have been full for {self._limit_s:g} s")
        return TimedOut(f"no working route within {self._limit_s:g} s ({reason})")

    async def _connected_plan(self, since: float) -> Plan:
        """The cheapest route all of whose peers answer and are not full. One that does not is left out, one that takes
        long to answer is avoided until it does, and so on, until every choice is used up; then, for as long as the
        caller waits, the swarm is looked at again."""
        looked_at, failed = -math.inf, frozenset[PeerId]()
        while True:
            self._lost_again = False
            now = time.monotonic()
            busy = {peer: until - now for peer, until in self.client.busy_until.items() if until > now}
            try:
                plan = self._plan(self._excluded | failed | busy.keys())
            except NoRoute as error:
                if busy:
                    self._full = True
                    await asyncio.sleep(min(busy.values()))  # full, but alive: worth waiting for
                elif looked_at >= (asked := max(since, self.session.sent_at)) and now - asked >= self._patience_s:
                    raise _nobody_left(error, failed) from error
                else:
                    await self.client.look_again(pause_s=0.0 if looked_at < asked else LOOK_EVERY_S)
                    looked_at, failed = now, frozenset()
                continue
            lost, dialled = await self.client.reaching.connect(plan.route.peers, self.config.connect_s)
            failed |= lost
            self._avoid_peers |= lost
            if not lost and not dialled and not self._lost_again:
                return plan

    def _plan(self, without: frozenset[PeerId]) -> Plan:
        """Rather by a peer that failed once and is connected again than by one that is gone: dialling that one costs
        time, and most often brings nothing else. Raises NoRoute."""
        gone = frozenset(peer_id for peer_id in self._avoid_peers if self.client.link(peer_id) is None)
        try:
            return self._plan_for_prompt(without | gone)
        except NoRoute:
            if gone <= without:
                raise
            return self._plan_for_prompt(without)

    def _plan_for_prompt(self, without: frozenset[PeerId]) -> Plan:
        """At the start, with a prompt that is long: rather a chain that is quick with it, and then, if that pays,
        another one for the answer. Raises NoRoute."""
        self._standbys.targets = {}
        request, first = self._request(), self.driver.route is None
        prompt = len(self.driver.tokens) - self.driver.done_to
        if first and self.config.share_prefixes and not self.warm_peers:
            shared, route = self.client.warm_route(self.session)
            if route is not None:
                prompt -= shared
                request = replace(request, held=route.peers, context=shared, prefer=route, hysteresis=0.0)
        wants_latency = self.config.objective is Objective.LATENCY  # others choose one chain for all
        if not first or self.warm_peers or prompt < LEAST_CHUNK or not wants_latency:
            return self.client.plan(request, without=without, spread=self._random if first else None)
        found = self.client.plan_split(request, prompt, EXPECTED_TOKENS, without=without, spread=self._random)
        if isinstance(found, Plan):
            return found
        self._standbys.targets = {(hop.entry, hop.exit): hop.peer_id for hop in found.decode.route}
        self._why_targets = "prompt and answer on different peers"
        return found.prefill

    def _request(self) -> Request:
        now = time.monotonic()
        client = self.client
        penalties = client.health.penalties(now)
        held = self.driver.route.peers if self.driver.route is not None else self.warm_peers
        held |= {hop.peer_id for hop in self.driver.standing_by if self.driver.is_warm(hop)}
        for peer_id in self._suspects:
            penalties[peer_id] = penalties.get(peer_id, 0.0) + SUSPECT_S
        return Request(
            n_blocks=client.n_blocks,
            tokens=1,
            avoid_peers=client.health.banned_peers(now).union(
                self._avoid_peers, client.leaving, client.reaching.late()
            ),
            avoid_edges=frozenset(self._avoid_edges),
            penalties=penalties,
            held=held,
            context=self.session.position if held else 0,
            constraints=self.config.constraints,
            objective=self.config.objective,
            row_bytes=self.driver.config.row_bytes(self.driver.config.codec),
            wire=self.session.wire,
        )

    async def _settle_edges(self) -> None:
        """A peer's word that an edge broke bans nobody: ask both ends ourselves, and avoid the one that is silent. Else
        a standby may take the place of the wrong one."""
        asked = self._avoid_edges - self._settled_edges
        ends = {end for edge in asked for end in edge} - self._avoid_peers - {CLIENT}
        silent = await self.client.reaching.silent_of(ends, PROBE_S)
        self._settled_edges |= asked
        self._avoid_peers |= silent
        if self.driver.route is not None:
            self._lost |= silent & self.driver.route.peers


def _nobody_left(error: NoRoute, failed: frozenset[PeerId]) -> NoRoute:
    """Records of peers that do not answer are no help: say so."""
    if not failed:
        return error
    return NoRoute(f"{error}: the peers that did cannot be reached", blocks=error.blocks)
