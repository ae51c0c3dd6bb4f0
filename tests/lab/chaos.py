"""Random faults on a swarm over an emulated wide-area network or on loopback, and texts that must be the local one.

`python -m tests.lab.chaos --seed 1 --minutes 5` (`make chaos SEED=1 MINUTES=5`; with NETWORK=loopback it needs no root
and has no faults of the network). The seed decides which faults come
when; what a text is doing at that moment is for the machine to decide. Fails if a text is wrong or hangs, if a fault
that was ordered did not happen, or if a peer still holds memory when all is over.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from bench.children import ChildFailed, Client
from bench.figures import longest_gap_s
from routing.errors import StartError, TimedOut
from routing.types import Span
from swarm.local import LocalPeer
from swarm.standbys import MODES
from tests.lab.lab import Lab, why_not
from tests.lab.swarm import LabSwarm, SkewedSwarm
from tests.tiny import make_tiny
from tests.whole.family import Family, daemon_of
from tests.whole.reference import Reference

BLOCKS = 6
SPANS = ("0:3", "3:6", "0:3", "3:6", "0:2", "2:6")
DELAY_MS = 10.0
TEXTS_AT_ONCE = 3
NEW = 48
LONG_TEXT = "Many words that take room in the caches of all. " * 8  # with the rest about 400 tokens
CACHE_MIB = 1  # of a peer: for a few long texts
TEXT_S = 90.0  # within which a text must end, whatever happens
WAIT_S = 60.0  # that a session waits for blocks that nobody serves
END_S = 30.0  # for a peer that leaves, or the last processes, to end
QUIET_S = 90.0  # for memory to be given back at the end


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: str
    peer: int  # its number, from 0
    other: int
    lasts_s: float


OF_PEERS = {"kill": 4, "freeze": 3, "leave": 4, "p2pd": 2, "wrong clock": 1, "block": 1, "pressure": 2}
OF_NETWORK = {
    "cut": 3, "cut inward": 1, "cut outward": 1, "edge": 2, "slow": 2, "loss": 2, "partition": 1, "client gone": 1,
}  # fmt: skip


def schedule(seed: int, seconds: float, peers: int, *, network: bool = True) -> list[Fault]:
    """The same for the same seed. `network`: with faults of the network, too."""
    rng = random.Random(seed)
    kinds = OF_PEERS | OF_NETWORK if network else OF_PEERS
    faults, at_s = [], 2.0
    while at_s < seconds:
        peer, other = rng.sample(range(peers), 2)
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        faults.append(Fault(at_s, kind, peer, other, rng.uniform(0.5, 8.0)))
        at_s += rng.uniform(0.2, 6.0)
    return faults


class Chaos:
    def __init__(self, swarm: SkewedSwarm, lab: Lab | None, crowd: Callable[[], object] = lambda: None):
        """`lab`: the network, where it can be disturbed. `crowd` makes the caches of all peers full for a while."""
        self.lab, self.swarm, self._crowd = lab, swarm, crowd
        self.family = Family()
        self.names = [peer.log.stem for peer in swarm.peers]
        self.happened: Counter[str] = Counter()
        self.problems: list[str] = []
        self._coming: list[threading.Thread] = []

    def newest(self, number: int) -> LocalPeer:
        return next(peer for peer in reversed(self.swarm.peers) if peer.log.stem == self.names[number])

    def begin(self, fault: Fault) -> Callable[[], object]:
        """Do it; what undoes it is returned."""
        peer = self.newest(fault.peer)
        match fault.kind:
            case "kill" | "leave" | "freeze" | "p2pd" | "wrong clock" if peer not in self.living():
                return lambda: None  # it is down already or on its way, or not yet up again
            case "kill" | "leave" | "wrong clock" if len(self.living()) < 3:
                return lambda: None  # somebody must be there for those who come back
            case "kill" | "leave" | "wrong clock":
                if fault.kind == "leave":
                    peer.ask_to_leave()  # it hands over what it holds
                else:
                    peer.kill()
                skewed = fault.kind == "wrong clock"
                undo: Callable[[], object] = partial(self.bring_back, fault.peer, peer, skewed)
            case "block":
                gone = [number for number in range(len(self.names)) if self._holds(number, fault.other % BLOCKS)]
                before = [(number, self.newest(number)) for number in gone if self.newest(number) in self.living()]
                if len(self.living()) == len(before):
                    return lambda: None
                for _, each in before:
                    each.kill()
                undo = partial(self._bring_all_back, before)
            case "pressure":
                crowd = threading.Thread(target=self._crowd)
                crowd.start()
                self._coming.append(crowd)
                undo = crowd.is_alive
            case "freeze":
                peer.freeze()
                undo = peer.thaw
            case "p2pd":
                daemon = daemon_of(peer.pid)
                if daemon is None:  # the last one's successor is not up yet
                    return lambda: None
                daemon.kill()
                undo = peer.process.poll
            case _:
                assert self.lab is not None
                undo = self._disturb(self.lab, fault)
        self.happened[fault.kind] += 1
        return undo

    @staticmethod
    def _disturb(lab: Lab, fault: Fault) -> Callable[[], object]:
        host, other = fault.peer + 2, fault.other + 2
        match fault.kind:
            case "cut" | "cut inward" | "cut outward":
                lab.cut(host, inward=fault.kind != "cut outward", outward=fault.kind != "cut inward")
                return partial(lab.heal, host)
            case "edge":
                lab.link(host, other, cut=True)
                return partial(lab.link, host, other, cut=False)
            case "slow":
                lab.link(1, host, delay_ms=150, jitter_ms=30)
                return partial(lab.link, 1, host, delay_ms=DELAY_MS, jitter_ms=0)
            case "loss":
                lab.everywhere(loss=0.01, jitter_ms=30)
                return partial(lab.everywhere, loss=0, jitter_ms=0)
            case "partition":
                lab.split({1, *range(2, 5)})
                return partial(lab.everywhere, cut=False)
            case _:
                assert fault.kind == "client gone"
                lab.cut(1)
                return partial(lab.heal, 1)

    def living(self) -> list[LocalPeer]:
        return [peer for peer in self.swarm.peers if peer.alive and peer.facts and not peer.leaving]

    def _holds(self, number: int, block: int) -> bool:
        return block in Span.parse(self.newest(number).span or "")

    def _bring_all_back(self, before: Sequence[tuple[int, LocalPeer]]) -> None:
        for number, peer in before:
            self.bring_back(number, peer)

    def bring_back(self, number: int, before: LocalPeer, skewed: bool = False) -> None:
        """Under the same identity, as soon as its host can reach the swarm. Nobody waits for it. `skewed`: first with a
        clock that is an hour ahead, which it must be told."""
        name = self.names[number]

        def come() -> None:
            before.ended(END_S)
            told = not skewed
            while True:
                self.swarm.join_code = random.choice(self.living()).facts["join_code"]
                try:
                    if not told:
                        self.swarm.skewed.add(name)
                    self.swarm.add(before.span, identity=name)
                    if not told:
                        self.problems.append(f"{name} came back with a clock that is an hour ahead")
                    return
                except (StartError, TimedOut) as error:
                    if "ClockSkew" in str(error):
                        told = True
                    self.swarm.skewed.discard(name)
                    time.sleep(1.0)

        self._coming.append(threading.Thread(target=come))
        self._coming[-1].start()

    def play(self, faults: Sequence[Fault], say: Callable[[str], object]) -> None:
        began, due = time.monotonic(), [(fault.at_s, fault) for fault in faults]
        undo: list[tuple[float, str, Callable[[], object]]] = []
        while due or undo:
            now = time.monotonic() - began
            for entry in [entry for entry in undo if entry[0] <= now]:
                undo.remove(entry)
                say(f"{now:6.1f} s  over: {entry[1]}")
                entry[2]()
            while due and due[0][0] <= now:
                _, fault = due.pop(0)
                what = f"{fault.kind} (peer {fault.peer}{f' and {fault.other}' if fault.kind == 'edge' else ''})"
                say(f"{now:6.1f} s  {what} for {fault.lasts_s:.1f} s")
                undo.append((now + fault.lasts_s, what, self.begin(fault)))
            self.family.look()
            time.sleep(0.02)
        if self.lab is not None:
            self.lab.everywhere(cut=False, loss=0, jitter_ms=0, delay_ms=DELAY_MS)
        for thread in self._coming:
            thread.join()


class Texts:
    """Asks for one batch of texts after another, until it is told to stop."""

    def __init__(self, client: Client, reference: Reference, long: bool = False):
        """`long`: one of them has a long prompt, always."""
        self.client, self.reference, self._long = client, reference, long
        self.done, self.wrong, self.failed = 0, [], []
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            self.batch(turn)
            turn += 1

    def batch(self, turn: int) -> None:
        prompts = [f"Text {turn}.{index} in chaos: " for index in range(TEXTS_AT_ONCE)]
        if self._long:
            prompts[0] = LONG_TEXT + prompts[0]
        asked = [self.reference.ids(prompt) for prompt in prompts]
        try:
            runs = self.client.batch(asked, NEW, timeout_s=TEXT_S, standby=MODES[turn % len(MODES)])
        except ChildFailed as error:
            self.failed.append(str(error))
            return
        for prompt, run in zip(asked, runs, strict=True):
            self.done += 1
            self.longest_s = max(self.longest_s, longest_gap_s(run))
            try:
                self.reference.check(prompt, run.ids, NEW)
            except AssertionError as error:
                self.wrong.append(str(error))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Texts, those that are wrong, and batches that failed."""
        return self.done, len(self.wrong), len(self.failed)

    def __enter__(self) -> Texts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run(seed: int, seconds: float, network: bool, say: Callable[[str], object]) -> list[str]:
    """What went wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        model = str(make_tiny("llama", folder / "model", layers=BLOCKS, tokenizer=True))
        problems: list[str] = []
        families: list[Family] = []
        stack.callback(lambda: problems.extend(_processes(families)))
        options = ["--cache", str(CACHE_MIB)]
        if network:
            lab = stack.enter_context(Lab(hosts=1 + len(SPANS), delay_ms=DELAY_MS, seed=seed))
            swarm: SkewedSwarm = LabSwarm(lab, model, SPANS, options=options)
        else:
            lab, swarm = None, SkewedSwarm(model, SPANS, options=options)
        families.append(Family())
        stack.enter_context(swarm)
        before = lab.on(1) if lab is not None else ()
        client, other = [
            stack.enter_context(closing(Client(model, swarm.join_code, folder, before=before, wait_s=WAIT_S)))
            for _ in range(2)
        ]
        client.wait_for_peers(len(SPANS))
        texts = Texts(client, Reference(Path(model)), long=True)
        crowd, turns = Texts(other, Reference(Path(model)), long=True), count()
        chaos = Chaos(swarm, lab, lambda: crowd.batch(next(turns)))
        chaos.family, dropped = families[0], lab.dropped if lab is not None else 0
        with texts:
            chaos.play(schedule(seed, seconds, len(SPANS), network=network), say)
        problems += chaos.problems
        problems += [f"wrong text: {error}" for error in texts.wrong + crowd.wrong]
        problems += [f"failed: {error}" for error in texts.failed + crowd.failed]
        if chaos.happened.keys() & {"cut", "loss", "client gone", "partition"} and lab and lab.dropped == dropped:
            problems.append("no packet was dropped")
        problems += _left(client, len(SPANS))
        done, wrong, failed = (a + b for a, b in zip(texts.counts, crowd.counts, strict=True))
        say(f"seed {seed}: {done} texts of {NEW} tokens, {wrong} wrong, {failed} batches failed")
        say(f"longest gap {max(texts.longest_s, crowd.longest_s):.1f} s")
        say("happened: " + ", ".join(f"{times} {kind}" for kind, times in chaos.happened.items()))
    return problems


def _processes(families: Sequence[Family]) -> list[str]:
    """Those that are left when the swarm has ended."""
    deadline = time.monotonic() + END_S
    while left := [process for family in families for process in family.left()]:
        if time.monotonic() > deadline:
            return [f"processes are left: {', '.join(left)}"]
        time.sleep(0.2)
    return []


def _left(client: Client, peers: int) -> list[str]:
    """Memory that peers still hold when nobody speaks."""
    deadline = time.monotonic() + QUIET_S
    while True:
        try:
            client.wait_for_peers(peers)
            held = [entry for entry in client.ask({"do": "caches"})["held"] if entry[1] > 0]
        except ChildFailed as error:
            return [f"the peers are not back: {error}"]
        if not held or time.monotonic() > deadline:
            return [f"memory is left: {held}"] if held else []
        time.sleep(1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--network", choices=["lab", "loopback"], default="lab")
    options = parser.parse_args()
    reason = why_not() if options.network == "lab" else None
    if reason is not None:
        print(f"chaos needs a network lab, and {reason}; there is --network loopback", file=sys.stderr)
        return 2
    problems = run(options.seed, 60 * options.minutes, options.network == "lab", lambda line: print(line, flush=True))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
