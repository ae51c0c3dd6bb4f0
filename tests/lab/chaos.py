"""Random faults on a swarm over an emulated wide-area network, and texts that must be the local model's.

`python -m tests.lab.chaos --seed 1 --minutes 5` (`make chaos SEED=1 MINUTES=5`). The seed decides which faults come
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.children import ChildFailed, Client
from bench.figures import longest_gap_s
from routing.errors import StartError, TimedOut
from swarm.local import LocalPeer
from tests.lab.lab import Lab, why_not
from tests.lab.swarm import LabSwarm
from tests.tiny import make_tiny
from tests.whole.reference import Reference

SPANS = ("0:3", "3:6", "0:3", "3:6", "0:2", "2:6")
DELAY_MS = 10.0
TEXTS_AT_ONCE = 3
NEW = 48
TEXT_S = 90.0  # within which a text must end, whatever happens
WAIT_S = 60.0  # that a session waits for blocks that nobody serves
QUIET_S = 90.0  # for memory to be given back at the end


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: str
    peer: int  # its number, from 0
    other: int
    lasts_s: float


def schedule(seed: int, seconds: float, peers: int) -> list[Fault]:
    """The same for the same seed."""
    rng = random.Random(seed)
    kinds = {
        "kill": 4, "freeze": 3, "cut": 3, "cut inward": 1, "cut outward": 1, "edge": 2, "slow": 2, "loss": 2,
        "leave": 2, "partition": 1, "client gone": 1,
    }  # fmt: skip
    faults, at_s = [], 2.0
    while at_s < seconds:
        peer, other = rng.sample(range(peers), 2)
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        faults.append(Fault(at_s, kind, peer, other, rng.uniform(0.5, 8.0)))
        at_s += rng.uniform(0.2, 6.0)
    return faults


class Chaos:
    def __init__(self, lab: Lab, swarm: LabSwarm):
        self.lab, self.swarm = lab, swarm
        self.names = [peer.log.stem for peer in swarm.peers]
        self.happened: Counter[str] = Counter()
        self._coming: list[threading.Thread] = []

    def newest(self, number: int) -> LocalPeer:
        return next(peer for peer in reversed(self.swarm.peers) if peer.log.stem == self.names[number])

    def begin(self, fault: Fault) -> Callable[[], object]:
        """Do it; what undoes it is returned."""
        lab, peer = self.lab, self.newest(fault.peer)
        host, other = fault.peer + 2, fault.other + 2
        match fault.kind:
            case "kill" | "leave" | "freeze" if not peer.alive or not peer.facts:
                return lambda: None  # it is down already, or not yet up again
            case "kill" | "leave" if sum(each.alive and bool(each.facts) for each in self.swarm.peers) < 3:
                return lambda: None  # somebody must be there for those who come back
            case "kill" | "leave":
                if fault.kind == "kill":
                    peer.kill()
                else:
                    peer.leave()
                assert not peer.alive
                undo: Callable[[], object] = partial(self.bring_back, fault.peer, peer)
            case "freeze":
                peer.freeze()
                undo = peer.thaw
            case "cut" | "cut inward" | "cut outward":
                lab.cut(host, inward=fault.kind != "cut outward", outward=fault.kind != "cut inward")
                undo = partial(lab.heal, host)
            case "edge":
                lab.link(host, other, cut=True)
                undo = partial(lab.link, host, other, cut=False)
            case "slow":
                lab.link(1, host, delay_ms=150, jitter_ms=30)
                undo = partial(lab.link, 1, host, delay_ms=DELAY_MS, jitter_ms=0)
            case "loss":
                lab.everywhere(loss=0.01, jitter_ms=30)
                undo = partial(lab.everywhere, loss=0, jitter_ms=0)
            case "partition":
                lab.split({1, *range(2, 5)})
                undo = partial(lab.everywhere, cut=False)
            case _:
                assert fault.kind == "client gone"
                lab.cut(1)
                undo = partial(lab.heal, 1)
        self.happened[fault.kind] += 1
        return undo

    def bring_back(self, number: int, before: LocalPeer) -> None:
        """Under the same identity, as soon as its host can reach the swarm. Nobody waits for it."""

        def come() -> None:
            while True:
                living = [peer for peer in self.swarm.peers if peer.alive and peer.facts]
                self.swarm.join_code = random.choice(living).facts["join_code"]
                try:
                    self.swarm.add(before.span, identity=self.names[number])
                    return
                except (StartError, TimedOut):
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
            time.sleep(0.02)
        self.lab.everywhere(cut=False, loss=0, jitter_ms=0, delay_ms=DELAY_MS)
        for thread in self._coming:
            thread.join()


class Texts:
    """Asks for one batch of texts after another, until it is told to stop."""

    def __init__(self, client: Client, reference: Reference):
        self.client, self.reference = client, reference
        self.done, self.wrong, self.failed = 0, [], []
        self.longest_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        turn = 0
        while not self._stop.is_set():
            prompts = [self.reference.ids(f"Text {turn + index} in chaos: ") for index in range(TEXTS_AT_ONCE)]
            turn += TEXTS_AT_ONCE
            try:
                runs = self.client.batch(prompts, NEW, timeout_s=TEXT_S)
            except ChildFailed as error:
                self.failed.append(str(error))
                continue
            for prompt, run in zip(prompts, runs, strict=True):
                self.done += 1
                self.longest_s = max(self.longest_s, longest_gap_s(run))
                try:
                    self.reference.check(prompt, run.ids, NEW)
                except AssertionError as error:
                    self.wrong.append(str(error))

    def __enter__(self) -> Texts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run(seed: int, seconds: float, say: Callable[[str], object]) -> list[str]:
    """What went wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        model = str(make_tiny("llama", folder / "model", layers=6, tokenizer=True))
        lab = stack.enter_context(Lab(hosts=1 + len(SPANS), delay_ms=DELAY_MS, seed=seed))
        swarm = stack.enter_context(LabSwarm(lab, model, SPANS))
        client = Client(model, swarm.join_code, folder, before=lab.on(1), wait_s=WAIT_S)
        stack.callback(client.close)
        client.wait_for_peers(len(SPANS))
        chaos, dropped = Chaos(lab, swarm), lab.dropped
        with Texts(client, Reference(Path(model))) as texts:
            chaos.play(schedule(seed, seconds, len(SPANS)), say)
        problems = [f"wrong text: {error}" for error in texts.wrong] + [f"failed: {error}" for error in texts.failed]
        if chaos.happened.keys() & {"cut", "loss", "client gone", "partition"} and lab.dropped == dropped:
            problems.append("no packet was dropped")
        problems += _left(client, len(SPANS))
        say(
            f"seed {seed}: {texts.done} texts of {NEW} tokens, {len(texts.wrong)} wrong, {len(texts.failed)} batches "
            f"failed, longest gap {texts.longest_s:.1f} s; " + ", ".join(f"{n} {k}" for k, n in chaos.happened.items())
        )
        return problems


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
    options = parser.parse_args()
    if reason := why_not():
        print(f"chaos needs a network lab, and {reason}", file=sys.stderr)
        return 2
    problems = run(options.seed, 60 * options.minutes, lambda line: print(line, flush=True))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
