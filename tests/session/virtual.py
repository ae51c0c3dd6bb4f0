"""The real session objects on virtual time: no sockets, no torch.

Hidden states are digests that depend on every block and every position before, so a stale or wrong cache anywhere
changes the final text. On a way in 8 bits they lose a byte.

Schedules kill, restart and evict peers, break connections, move the session to other chains with other boundaries (a
peer may serve two spans of one route; but not where ways lose something: that would be another text), speculate, and
let peers lie; every run must end with the text of an undisturbed run. With `timers=False` there is neither the client's
deadline nor the repeated ask after a second, so that nothing but the rule itself can free a stuck step.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import replace

from peer.effects import Reach, Run, Sender, SessionLimits, ToLink, ToPeer
from peer.seats import SeatStore, Work
from peer.sessions import SessionTable
from routing.types import Hop, Route, Span
from swarm.driver import Driver, DriverConfig, NeedRoute, Output, Send, Stopped
from swarm.frames import Codec, Frame, FrameType, HopTiming, Problem
from swarm.link import REPLACED
from swarm.names import NameChain

BLOCKS = 6
CHUNK = 5  # positions a frame
UNIT = 0.01  # seconds; links take 0.5 to 3 units
ROW = 8
GO_BACK = 2  # positions
CLIENT = "client"
FOREVER = 1e9
BROKE = "the connection broke"

End = tuple[str, str, int, int, int]  # of a connection: a node, the other, their lives, and which connection it is


BOUNDS = [(0, 2), (0, 3), (0, 6), (1, 4), (2, 4), (2, 6), (3, 5), (3, 6), (4, 6), (5, 6), (0, 1), (1, 6)]
ALIKE = [(0, 2), (2, 4), (4, 6)] * 4  # every chain has the same boundaries


def digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=ROW).digest()


class DigestStore:
    """A seat's memory: per block the inputs seen so far, standing for K and V, and the journal of outputs. One with
    `windows` cannot go back far, as a real one of blocks that have them."""

    def __init__(self, entry: int, exit: int, windows: bool = False):
        self.entry = entry
        self.go_back = GO_BACK if windows else FOREVER
        self.inputs: list[list[bytes]] = [[] for _ in range(entry, exit)]
        self.journal: list[bytes] = []

    @property
    def position(self) -> int:
        return len(self.journal)

    def truncate(self, position: int) -> int:
        if self.position - position > self.go_back:
            position = 0
        for inputs in self.inputs:
            del inputs[position:]
        del self.journal[position:]
        return position

    def evict(self) -> None:
        self.truncate(0)

    def pages(self, start: int, end: int) -> tuple[str, bytes] | None:
        if self.go_back < FOREVER:
            return None
        return "digest", b"".join(b"".join(held[start:end]) for held in (*self.inputs, self.journal))

    def take_pages(self, start: int, end: int, dtype: str, data: bytes) -> bool:
        assert start == self.position and len(data) == (len(self.inputs) + 1) * (end - start) * ROW
        rows = [data[at : at + ROW] for at in range(0, len(data), ROW)]
        for index, held in enumerate((*self.inputs, self.journal)):
            held += rows[index * (end - start) : (index + 1) * (end - start)]
        return True

    def copy_prefix(self, other: DigestStore, positions: int) -> bool:
        if other.position - positions > self.go_back:
            return False
        self.inputs = [inputs[:positions] for inputs in other.inputs]
        self.journal = other.journal[:positions]
        return True

    def rows(self, start: int, end: int) -> bytes:
        return b"".join(self.journal[start:end])

    def compute(self, hidden: bytes) -> bytes:
        for offset, inputs in enumerate(self.inputs):
            inputs.append(hidden)
            hidden = digest(self.entry + offset, tuple(inputs))
        return hidden


class VirtualNet:
    """Links that keep order, with random delay. What is under way to or from a node that dies is lost, and its
    neighbours notice.

    A connection breaks as a real one does: at both ends, each of which learns it in its own time. What an end sends
    before is lost; what it sends after goes over a new connection, which tells the other end of the old one's end
    before anything comes of it.
    """

    def __init__(self, rng: random.Random, carry: Callable[[Frame], Frame] = replace):
        self.rng, self.now, self.seq, self.frames, self.carry = rng, 0.0, 0, 0, carry
        self.windows = self.alike = False
        self.events: list[tuple[float, int, Callable[[], object]]] = []
        self.nodes: dict[str, VirtualPeer | VirtualClient] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._renewed: dict[frozenset[str], int] = {}
        self._unaware: set[End] = set()

    def at(self, units: float, call: Callable[[], object]) -> None:
        self.at_time(self.now + units * UNIT, call)

    def at_time(self, when: float, call: Callable[[], object]) -> None:
        self.seq += 1
        heapq.heappush(self.events, (when, self.seq, call))

    def send(self, source: str, target: str, frame: Frame) -> None:
        self.frames += 1
        frame = self.carry(frame)
        if frame.codec is Codec.INT8 and frame.rows:
            rows = bytes(frame.rows)
            frame.rows = b"".join(rows[at : at + ROW - 1] + b"\0" for at in range(0, len(rows), ROW))
        node = self.nodes[target]
        if not node.alive:
            self.notice(source, target)
            return
        if source == target:
            self.at(0, lambda: node.receive(frame, source))
            return
        if self._end(source, target) in self._unaware:
            return  # into the connection that is no more
        when = max(self.now + self.rng.uniform(0.5, 3) * UNIT, self._last.get((source, target), 0))
        self._last[source, target] = when
        end = self._end(target, source)

        def arrive() -> None:
            if self._end(target, source) == end:
                self._learn(end, f"{REPLACED} by a new connection")
                node.receive(frame, source)

        self.at_time(when, arrive)

    def _end(self, node: str, other: str) -> End:
        """Of the connection there is now."""
        renewed = self._renewed.get(frozenset((node, other)), 0)
        return node, other, self.nodes[node].life, self.nodes[other].life, renewed

    def renew(self, a: str, b: str) -> None:
        """The connection breaks and comes back, both ends alive: what was under way is lost."""
        pair = frozenset((a, b))
        self._renewed[pair] = self._renewed.get(pair, 0) + 1
        for end in (self._end(a, b), self._end(b, a)):
            self._unaware.add(end)
            self.at(self.rng.uniform(0.5, 4), functools.partial(self._learn, end, BROKE))

    def _learn(self, end: End, reason: str) -> None:
        """That the connection before this one is no more, if the end does not know it yet."""
        if end in self._unaware:
            self._unaware.remove(end)
            node, other, *_ = end
            if self._end(node, other) == end:
                self.nodes[node].link_lost(other, reason)

    def notice(self, source: str, target: str) -> None:
        """The source learns that its connection to the target is down."""
        node = self.nodes[source]
        life = node.life
        self.at(self.rng.uniform(0.5, 4), lambda: node.life == life and node.link_lost(target, BROKE))

    def run(self, until: Callable[[], bool], most_events: int = 200_000) -> None:
        while self.events and not until() and most_events:
            self.now, _, call = heapq.heappop(self.events)
            call()
            most_events -= 1


class VirtualPeer:
    def __init__(self, net: VirtualNet, name: str, span: Span, *, lies: bool, limits: SessionLimits):
        self.net, self.name, self.span, self.lies, self.limits = net, name, span, lies, limits
        self.life, self.alive, self.computed = 0, True, 0
        self.forget()

    def forget(self) -> None:
        self.table = SessionTable(
            me=self.name,
            span=self.span,
            make_store=self.make_store,
            row_bytes=lambda codec: ROW,
            limits=self.limits,
        )

    def make_store(self, entry: int, exit: int) -> SeatStore:
        return DigestStore(entry, exit, self.net.windows and (entry + exit) % 2 == 1)

    def receive(self, frame: Frame, source: str) -> None:
        role = "client" if source == CLIENT else "peer"
        self.table.receive(frame, Sender(source, role, source), self.net.now)
        self.act()

    def link_lost(self, peer: str, reason: str) -> None:
        if peer == CLIENT:
            self.table.client_lost(CLIENT, self.net.now)
        else:
            self.table.link_lost(peer, reason, self.net.now)
        self.act()

    def tick(self) -> None:
        self.table.tick(self.net.now)
        self.act()

    def act(self) -> None:
        for effect in self.table.take_effects():
            match effect:
                case ToPeer(peer_id, frame):
                    self.net.send(self.name, peer_id, frame)
                case ToLink(link, frame):
                    self.net.send(self.name, str(link), frame)
                case Run(work):
                    delay = self.net.rng.uniform(0.1, 2)
                    self.net.at(delay, functools.partial(self.finish, work, self.life))
                case Reach():
                    pass

    def finish(self, work: Work, life: int) -> None:
        if self.life != life:
            return  # it died while it computed
        store = work.seat.store
        assert isinstance(store, DigestStore)
        assert store.position == work.start, "somebody changed a store while it computed"
        rows = bytes(work.frame.rows)[work.skip * ROW :] + b"".join(bytes(frame.rows) for frame in work.more)
        assert len(rows) == (work.end - work.start) * ROW
        for at in range(work.end - work.start):
            hidden = store.compute(rows[at * ROW : (at + 1) * ROW])
            if self.lies and self.net.rng.random() < 0.3:
                hidden = digest("lie", self.net.seq)
            store.journal.append(hidden)
            self.computed += len(store.inputs)
        self.table.computed(work, HopTiming(1, 2), self.net.now)
        self.act()

    def fail(self, work: Work) -> None:
        self.table.failed(work, Problem("failed", "told to"), self.net.now)
        self.act()

    def evict(self, position: int) -> None:
        for session in self.table.sessions.values():
            for seat in session.seats.values():
                if seat.working is None and seat.position > position:
                    seat.evict(position)
        self.act()


class VirtualClient:
    """Generates tokens; the head turns the last hidden state into the next token."""

    life, alive = 0, True

    def __init__(self, net: VirtualNet, prompt: list[int], count: int, truth: list[int] | None, *, speculate: bool,
                 timers: bool, liar: bool, session: bytes = b"s", habit: Route | None = None,
                 standby: bool = False, lossy: int | None = None):
        """`lossy`: a seed for the codec of each way."""
        self.net, self.rng, self.truth, self.speculate = net, net.rng, truth, speculate
        self.goal, self.prompt = len(prompt) + count, prompt
        codecs = random.Random(lossy)
        config = DriverConfig(
            choose=None if lossy is None else lambda a, b: codecs.choice([Codec.FP32, Codec.INT8, Codec.INT8]),
            chunk=CHUNK, deadline_s=3.0 if timers else None, row_bytes=lambda codec: ROW, shares=bool(habit)
        )
        self.driver = Driver(
            session_id=session * 16,
            nonce=b"n" * 8,
            names=NameChain(b"secret"),
            embed=lambda a, b, codec: b"".join(digest("embedding", t) for t in self.driver.tokens[a:b]),
            read=lambda frame: bytes(frame.rows),
            config=config,
        )
        self.standby = standby
        self.habit = habit  # of an earlier session: its peers may hold something, and how much is guessed
        self.tokens = list(prompt)  # what is decided; the driver may hold a draft beyond it
        self.draft: list[int] = []
        self.liars: set[str] = set()
        self.audits_left = liar
        self.finished, self.planning, self.reroutes, self.rolled_back = False, False, 0, 0
        self.stopped: Stopped | None = None

    # -- routes

    def choose(self) -> Route | None:
        peers = [
            node for node in self.net.nodes.values()
            if isinstance(node, VirtualPeer) and node.alive and node.name not in self.liars
        ]
        route: list[Hop] = []
        block = 0
        present = self.driver.route or self.habit or ()
        while block < BLOCKS:
            able = [p for p in peers if block in p.span]
            if not able:
                return None
            names = {p.name for p in able}
            stay = [hop for hop in (*present, *self.driver.standby) if hop.entry == block and hop.peer_id in names]
            if stay and self.rng.random() < 0.7:
                route.append(self.rng.choice(stay) if self.standby else stay[0])
            else:
                peer = self.rng.choice(able)
                whole = self.net.alike or self.rng.random() < 0.6
                exit = peer.span.end if whole else self.rng.randint(block + 1, peer.span.end)
                route.append(Hop(peer.name, block, exit))
            block = route[-1].exit
        return Route(tuple(route))

    def choose_standby(self, route: Route) -> list[Hop]:
        """Peers out of the route that serve the blocks of a hop of it."""
        chosen = []
        for hop in route:
            able = [
                peer.name for peer in self.net.nodes.values()
                if isinstance(peer, VirtualPeer) and peer.alive and peer.name not in self.liars | route.peers
                and peer.span.start <= hop.entry and hop.exit <= peer.span.end
            ]
            kept = [old for old in self.driver.standing_by if (old.entry, old.exit) == (hop.entry, hop.exit)]
            if kept and kept[0].peer_id in able:
                chosen.append(kept[0])
            elif able and self.rng.random() < 0.7:
                chosen.append(Hop(self.rng.choice(able), hop.entry, hop.exit))
        return chosen

    def plan(self) -> None:
        self.planning = False
        if self.finished:
            return
        route = self.choose()
        if route is None:
            self.plan_soon(5)  # nobody serves a block: wait, and look again
            return
        self.reroutes += 1
        warm = self.rng.randint(0, len(self.prompt)) if self.habit else 0
        standby = self.choose_standby(route) if self.standby else []
        lazy = frozenset(hop for hop in standby if (hop.entry + hop.exit) % 3 == 0)
        pulls = frozenset(hop for hop in standby if hop not in lazy and self.rng.random() < 0.5)
        self.driver.open(route, {}, self.net.now, warm, standby=standby, lazy=lazy, pulls=pulls)
        self.act()

    def plan_soon(self, units: float = 0) -> None:
        if not self.planning:
            self.planning = True
            self.net.at(units, self.plan)

    # -- events

    def receive(self, frame: Frame, source: str) -> None:
        self.driver.receive(frame, source, self.net.now)
        self.act()

    def link_lost(self, peer: str, reason: str) -> None:
        self.driver.link_lost(peer, reason)
        self.act()

    def tick(self) -> None:
        self.driver.tick(self.net.now)
        self.act()

    def act(self) -> None:
        for effect in self.driver.take_effects():
            match effect:
                case Send(peer_id, frame):
                    self.net.send(CLIENT, peer_id, frame)
                case NeedRoute():
                    self.plan_soon()
                case Output():
                    self.accept(effect)
                case Stopped():
                    self.stopped = effect
        if self.driver.effects:  # of the next step, which an output began
            self.act()

    # -- generation

    def start(self) -> None:
        self.driver.step(self.prompt, self.net.now)
        self.plan()

    def accept(self, output: Output) -> None:
        rows = b"".join(output.rows)
        for at in range(len(self.tokens) - 1, output.end):
            hidden = rows[(at - output.start) * ROW : (at - output.start + 1) * ROW]
            token = int.from_bytes(digest("head", hidden), "little") % 97
            self.tokens.append(token)
            if not self.draft or self.draft.pop(0) != token:
                break  # the rest of the draft was wrong: rolled back below
        self.tokens, self.draft = self.tokens[: self.goal], []
        if self.truth and self.tokens != self.truth[: len(self.tokens)]:
            assert self.audits_left, "wrong text, and nobody lies (any more)"
            if self.rng.random() < 0.5 or len(self.tokens) >= self.goal:
                self.audit()
                return
        if len(self.tokens) >= self.goal:
            self.finished = True
            self.driver.close()
            return
        self.next_step()

    def next_step(self) -> None:
        if len(self.driver.tokens) > len(self.tokens) - 1:
            self.driver.rollback(len(self.tokens) - 1)
        if self.speculate and self.rng.random() < 0.7:
            guess = (self.truth or [])[len(self.tokens) :]
            room = max(0, self.goal - len(self.tokens))
            self.draft = [
                guess[i] if i < len(guess) and self.rng.random() < 0.7 else self.rng.randrange(97) for i in range(3)
            ][:room]
        want = len(self.tokens) - 1
        known = len(self.driver.tokens)
        self.driver.step([*self.tokens[known:], *self.draft], self.net.now, want=want)

    def audit(self) -> None:
        """An oracle says who lied: distrust what stands downstream of it, and take back the wrong tokens."""
        self.audits_left = False
        for peer in self.net.nodes.values():
            if isinstance(peer, VirtualPeer) and peer.lies:
                self.liars.add(peer.name)
                self.driver.distrust(peer.name)
        assert self.truth is not None
        while self.tokens != self.truth[: len(self.tokens)]:
            self.tokens.pop()
            self.rolled_back += 1
        self.driver.rollback(min(len(self.driver.tokens), len(self.tokens) - 1))
        self.driver.step(self.tokens[len(self.driver.tokens) :], self.net.now)
        self.plan_soon()


def simulate(
    seed: int,
    *,
    disturb: bool = False,
    truth: list[int] | None = None,
    speculate: bool = False,
    timers: bool = True,
    liar: bool = False,
    earlier: bool = False,
    windows: bool = False,
    standby: bool = False,
    lossy: bool = False,
    lossy_before: bool = False,
    carry: Callable[[Frame], Frame] = replace,
    peer_class: type[VirtualPeer] = VirtualPeer,
) -> VirtualClient:
    rng = random.Random(seed)
    net = VirtualNet(rng, carry)
    net.windows, net.alike = windows, lossy or lossy_before
    limits = SessionLimits(ask_again_s=1.0 if timers else FOREVER, chunk=CHUNK)
    peers = [
        peer_class(net, f"p{i}", Span(*bound), lies=liar and i in (3, 6), limits=limits)
        for i, bound in enumerate(ALIKE if net.alike else BOUNDS)
    ]
    net.nodes.update({peer.name: peer for peer in peers})
    prompt = [random.Random(seed).randrange(97) for _ in range(12)]
    habit = None
    if earlier:
        # Another session of the client said the same, and was closed before its liars were found out.
        first = VirtualClient(net, prompt, 12, None, speculate=False, timers=False, liar=False, session=b"f",
                              lossy=seed if lossy_before else None)
        net.nodes[CLIENT] = first
        first.start()
        net.run(lambda: False)
        assert first.finished
        habit = first.driver.route
    client = VirtualClient(
        net, prompt, 24, truth, speculate=speculate, timers=timers, liar=liar, habit=habit, standby=standby,
        lossy=seed if lossy else None,
    )
    net.nodes[CLIENT] = client

    def fault() -> None:
        used = [net.nodes[hop.peer_id] for hop in client.driver.route or ()]
        peer, what = rng.choice(used if used and rng.random() < 0.7 else peers), rng.random()
        kill, evict = [(0.35, 0.8), (0.0, 1.0), (1.0, 1.0), (0.0, 0.3)][seed % 4]  # all, evictions, kills, moves
        if what < kill and peer.alive:
            peer.alive, peer.life = False, peer.life + 1
            net.at(rng.uniform(10, 80), lambda: revive(peer))
            for other in (*peers, client):
                if other is not peer and other.alive:
                    net.notice(other.name if isinstance(other, VirtualPeer) else CLIENT, peer.name)
        elif kill <= what < evict:
            peer.evict(rng.randrange(40))
        elif rng.random() < 0.5 and client.driver.route is not None and len(client.driver.route) > 1:
            hop = rng.randrange(len(client.driver.route) - 1)
            a, b = client.driver.route[hop].peer_id, client.driver.route[hop + 1].peer_id
            if a != b and net.nodes[a].alive and net.nodes[b].alive:
                net.renew(a, b)
        elif not client.finished:
            client.plan_soon()
        faults.pop()  # few enough that a later fault does not always free what an earlier one stuck
        if faults and not client.finished:
            net.at(rng.uniform(2, 25), fault)

    def revive(peer: VirtualPeer) -> None:
        peer.forget()
        peer.life, peer.alive = peer.life + 1, True

    def tick() -> None:
        for node in net.nodes.values():
            if node.alive:
                node.tick()
        if net.now < 600 and not client.finished:
            net.at(25, tick)

    faults = [None] * (rng.randint(1, 12) if disturb else 0)
    if faults:
        net.at(rng.uniform(2, 25), fault)
    net.at(25, tick)
    client.start()
    net.run(lambda: client.finished)
    # Let what is under way arrive: the CLOSE frames, and what they cross.
    if client.finished:
        net.run(lambda: False)
    client.left_over = [  # type: ignore[attr-defined]
        peer.name for peer in peers if peer.alive and not peer.lies and peer.table.sessions
    ]
    client.computed = sum(peer.computed for peer in peers)  # type: ignore[attr-defined]
    return client


__all__ = ["FrameType", "VirtualClient", "VirtualNet", "VirtualPeer", "simulate"]
