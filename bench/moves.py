"""Owns the figures of moving: six unlike peers choose their blocks, a busy one leaves and a fast one comes, in the lab.

Whoever reads an answer is not to notice. As in `simulated.py`, peers compute a tiny model in truth, and sleep for what
is left of the time that their speed gives a pass, so that a machine of two cores holds seven that differ.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations

from bench.children import ChildFailed, Client, as_run
from bench.figures import Figure, Run, longest_gap_s
from bench.prompts import long_ids
from bench.setting import PacedSwarm, Setting
from routing.simulation import Scenario
from swarm.local import LocalPeer
from tests.lab.lab import Lab

SPEEDS, FAST = (1.0, 0.7, 1.2, 0.8, 0.6, 1.0), 5.0  # of the six, and of the one that comes: blocks a second, relative
SIX = Scenario(
    name="moves", n_blocks=6, peers=len(SPEEDS), speeds=(*SPEEDS, FAST), block_s=0.02, prefill_share=0.1, clients=3,
    prompt_tokens=40, answer_tokens=3000, seconds=90.0,
)  # fmt: skip
OPTIONS = ("--most-blocks", "3", "--rebalance", "3")
DELAYS_MS, DELAYS_SEED = (2.0, 60.0), 5
LEAVES_S, JOINS_S = 20.0, 22.0  # before that, who chose alike has moved
WINDOW_S = 10.0  # before the one leaves, and at the end


def moves(setting: Setting) -> list[Figure]:
    """One swarm, since it takes minutes: three answers, by three clients, run all the time."""
    with setting.tiny(SIX.n_blocks, max_position_embeddings=4096) as tiny:
        prompts = [long_ids([tiny.prompt(number)], SIX.prompt_tokens, number) for number in range(SIX.clients)]
        return _figures(tiny, prompts, _moves(tiny, prompts))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    began: float
    runs: dict[int, Run]  # of the answers that came to their end, by number
    dropped: list[str]  # what was said of the others
    watch: Watch

    def rate(self, start_s: float, end_s: float) -> float:
        """Tokens a second of all answers together."""
        times = [at - self.began for run in self.runs.values() for at in run.times]
        return sum(start_s <= at < end_s for at in times) / (end_s - start_s)


def _moves(setting: Setting, prompts: Sequence[list[int]]) -> Outcome:
    with Lab(hosts=2 + SIX.peers) as lab:
        rng = random.Random(DELAYS_SEED)
        for a, b in combinations(range(1, 3 + SIX.peers), 2):
            lab.link(a, b, delay_ms=rng.uniform(*DELAYS_MS))
        with PacedSwarm(lab, setting.model, SIX, OPTIONS) as swarm, ExitStack() as stack:
            watch = Watch(swarm.peers)
            newcomer = swarm.launch(None, held=True)  # what starting a process takes is not what is measured
            clients = [stack.enter_context(setting.client(swarm)) for _ in range(SIX.clients)]
            began = time.monotonic()
            for client, prompt in zip(clients, prompts, strict=True):
                client.send(client.request([prompt], SIX.answer_tokens, tell_at=1, most_s=SIX.seconds))
            used = Counter(peer_id for client in clients for peer_id in client.next()["route"])
            _until(began + LEAVES_S)
            leaver = swarm.by_id(used.most_common(1)[0][0])
            leaver.ask_to_leave()
            _until(began + JOINS_S)
            # The swarm's own code names its founder, who may be the one that left.
            newcomer.give_code(next(peer.facts["join_code"] for peer in swarm.peers if peer is not leaver))
            newcomer.wait_serving()
            watch.listen(newcomer)
            runs, dropped = _answers(clients)
    return Outcome(began=began, runs=runs, dropped=dropped, watch=watch)


def _figures(setting: Setting, prompts: Sequence[list[int]], seen: Outcome) -> list[Figure]:
    words = f"{SIX.peers} unlike peers, the busiest leaves, one of {FAST:g} times the speed comes"
    runs = seen.runs
    wrong = [setting.local.generate(prompts[number], len(run.ids)).ids != run.ids for number, run in runs.items()]
    gaps_s = [longest_gap_s(run) for run in runs.values()]
    note = (
        f"{SIX.clients} answers under way, {sum(len(run.ids) for run in runs.values())} tokens; {DELAYS_MS[0]:g} to "
        f"{DELAYS_MS[1]:g} ms one way; spans by speed: {seen.watch.told()}; broken off: "
        f"{'; '.join(seen.dropped) or 'none'}"
    )
    before, after = (seen.rate(end_s - WINDOW_S, end_s) for end_s in (LEAVES_S, SIX.seconds))
    return [
        Figure.of_sum(f"{words}: answers broken off", "", [len(seen.dropped)], note),
        Figure.of_sum(f"{words}: texts unlike the local one", f"of {len(runs)}", wrong, note),
        Figure(figure=f"{words}: longest time between two tokens", value=max(gaps_s), unit="s", runs=tuple(gaps_s)),
        Figure.of_sum(f"{words}: moves to other blocks", "", [len(seen.watch.moves)], note),
        Figure.of_median(f"{words}: tokens/s of the {WINDOW_S:g} s before", "", [before]),
        Figure.of_median(f"{words}: tokens/s of the last {WINDOW_S:g} s", "", [after]),
    ]


def _until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _answers(clients: Sequence[Client]) -> tuple[dict[int, Run], list[str]]:
    runs, dropped = {}, []
    for number, client in enumerate(clients):
        try:
            runs[number] = as_run(client.next()["runs"][0])
        except ChildFailed as error:
            dropped.append(str(error))
    return runs, dropped


class Watch:
    """What each peer says of its blocks."""

    def __init__(self, peers: Sequence[LocalPeer]):
        self.spans: list[list[str]] = []
        self.moves: list[float] = []
        for peer in peers:
            self.listen(peer)

    def listen(self, peer: LocalPeer) -> None:
        spans = [peer.facts["span"]]
        self.spans.append(spans)

        def read() -> None:
            assert peer.process.stdout is not None
            for line in peer.process.stdout:
                facts = json.loads(line)
                if facts["event"] == "moved":
                    spans.append(facts["span"])
                    self.moves.append(time.monotonic())

        threading.Thread(target=read, daemon=True).start()

    def told(self) -> str:
        speeds = (*SPEEDS, FAST)
        return ", ".join(f"{speed:g}: {' > '.join(each)}" for speed, each in zip(speeds, self.spans, strict=True))
