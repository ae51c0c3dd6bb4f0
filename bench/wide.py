"""Owns the figures over real distances: peers on hosts of an emulated wide-area network (`tests/lab/`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import combinations, count, product
from statistics import median

from bench.children import Client, as_run
from bench.faults import HOPS, TWICE, bring_back, disturbed
from bench.figures import Figure, decode_rate, first_token_s, gaps_s, longest_gap_s
from bench.setting import Setting
from swarm.local import LocalPeer
from tests.lab.swarm import LabSwarm

DELAY_MS = 25.0
THREE_PEERS = ("0:10", "10:20", "20:30")
NEW = 32
CONTEXT = 100
LONG = 1000
AT, AFTER = 10, 12  # the earliest token at which a hop comes to harm, and how many come after that
LEAVE_AFTER = 40  # in which the successor is sent what it needs
WARM_UP = 40  # tokens in which standbys are sent what is there already
AFTER_MOST = WARM_UP + 2 * AT + LEAVE_AFTER
NEAR_MS, PREFILL_TIMES, ANSWER = 2.5, 4.0, 512
SIX, SIX_DELAYS_MS, SIX_SEED = ("0:15",) * 3 + ("15:30",) * 3, (2.0, 60.0), 5
LEAST_PAIRS = 9
ALARMS_S, ALARM_NEW = 3600.0, 256
LOSS, JITTER_MS = 0.01, 30.0


def speed(setting: Setting) -> list[Figure]:
    """One session on four hosts: its rate over that of nothing but light and arithmetic."""
    shares: list[float] = []
    apart: list[float] = []
    with setting.wide_swarm(THREE_PEERS, DELAY_MS) as swarm, setting.client(swarm) as client:
        one_way_s = median(swarm.lab.round_trips_ms(1, 2)) / 2e3
        setting.warm(client, [setting.prompt(0)])
        for turn in range(setting.rounds):
            run = client.generate(setting.prompt(turn), NEW)
            token_s, spent = median(gaps_s(run)), {key: client.spent_ms[key] / 1e3 for key in ("step", "compute")}
            head_s = token_s - spent["step"]  # all that the client does between two steps
            shares.append((4 * one_way_s + spent["compute"] + head_s) / token_s)
            apart.append(1e3 * (token_s - 4 * one_way_s - spent["compute"] - head_s))
    words = f"4 hosts, {DELAY_MS:g} ms one way"
    note = f"one way measured as {1e3 * one_way_s:.1f} ms; compute: the hops' passes, and the client between two steps"
    return [
        Figure.of_median(f"{words}: rate over 1 / (one-way times + measured compute)", "", shares, note),
        Figure.of_median(f"{words}: a token beyond both", "ms", apart),
    ]


def lost(setting: Setting) -> list[Figure]:
    """SIGKILL of a hop of two, with a spare for each: the stall in round trips beyond what computing the context anew
    takes."""
    figures = []
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        harm = Harm(setting, swarm, client)
        for words, hop in HOPS.items():
            stalls = harm.stalls(setting.long_prompt(CONTEXT, 0), hop)
            figures.append(harm.figure(f"SIGKILL of the {words}, {CONTEXT} tokens: stall beyond the replay", stalls))
    return figures


def silent(setting: Setting) -> list[Figure]:
    """The host of the last hop of two cut off silently, with a spare: the whole stall."""
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        harm = Harm(setting, swarm, client)
        cuts = harm.stalls(setting.long_prompt(CONTEXT, 0), HOPS["last hop"], harm.cut)
        return [harm.figure("the last hop's host cut off silently: stall", cuts, "s")]


def warm(setting: Setting) -> list[Figure]:
    """SIGKILL of a hop of two in a long text, with warm standbys: the whole stall in round trips."""
    figures = []
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        harm = Harm(setting, swarm, client)
        for words, hop in HOPS.items():
            stalls = harm.stalls(setting.long_prompt(LONG, 0), hop, standby="warm")
            figures.append(harm.figure(f"SIGKILL of the {words}, {LONG:,} tokens, standbys: whole stall", stalls))
    return figures


def leave(setting: Setting) -> list[Figure]:
    """SIGTERM of a hop of two, in a long text: the longest gap between two tokens over the usual one."""
    figures = []
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        harm = Harm(setting, swarm, client)
        for words, hop in HOPS.items():
            gaps = harm.stalls(setting.long_prompt(LONG, 0), hop, LocalPeer.ask_to_leave, of_usual=True)
            figures.append(harm.figure(f"SIGTERM of the {words}, {LONG:,} tokens: longest gap", gaps, "of the usual"))
    return figures


class Harm:
    """A hop of a route comes to harm, again and again; who was killed or left comes back before the next time."""

    def __init__(self, setting: Setting, swarm: LabSwarm, client: Client):
        self.setting, self.swarm, self.client = setting, swarm, client
        self._equal: list[bool] = []
        self._moments = random.Random(len(TWICE))
        client.generate(setting.long_prompt(CONTEXT, 0), 2)

    def cut(self, peer: LocalPeer) -> None:
        self.swarm.lab.cut(self.swarm.host_of(peer))

    def stalls(
        self,
        prompt: list[int],
        hop: int,
        harm: Callable[[LocalPeer], object] = LocalPeer.kill,
        *,
        standby: str = "inputs",
        of_usual: bool = False,
    ) -> list[float]:
        """Seconds, or how many times as long as the usual gap; of a killed hop without a standby, less what computing
        the context anew took."""
        swarm, stalls = self.swarm, []
        expected = self.setting.local.generate(prompt, AFTER_MOST)
        self._equal = []
        for _ in range(self.setting.rounds):
            at = self._moments.randrange(AT, 2 * AT) + (WARM_UP if standby == "warm" else 0)
            new = at + (LEAVE_AFTER if harm == LocalPeer.ask_to_leave else AFTER)
            facts, victim = disturbed(swarm, self.client, prompt, new, at, hop, harm, standby)
            run = as_run(facts)
            replays = harm == LocalPeer.kill and standby != "warm"
            stall_s = longest_gap_s(run) - (facts["spent_ms"]["prefill"][hop] / 1e3 if replays else 0.0)
            stalls.append(stall_s / median(gaps_s(run)) if of_usual else stall_s)
            self._equal.append(run.ids == expected.ids[: len(run.ids)])
            if harm == self.cut:
                swarm.lab.heal(swarm.host_of(victim))
            else:
                victim.leave()
                bring_back(swarm, victim)
            self.client.wait_for_peers(len(TWICE))
        return stalls

    def figure(self, words: str, stalls: list[float], unit: str = "round trips") -> Figure:
        if unit == "round trips":
            stalls = [stall_s / (2 * DELAY_MS / 1e3) for stall_s in stalls]
        note = f"equal to local: {sum(self._equal)} of {len(self._equal)}"
        return Figure.of_median(f"{DELAY_MS:g} ms one way, {words}", unit, stalls, note)


def split(setting: Setting) -> list[Figure]:
    """Two peers that are quick with prompts and far, two that are near and slow with prompts: a long prompt and its
    answer, against the better of the two chains alone."""
    spans, options = ("0:15", "15:30"), (DELAY_MS, NEAR_MS, PREFILL_TIMES)
    firsts: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    equal, moved = [], []
    with setting.unlike_swarm([*spans, *spans], *options) as swarm, setting.client(swarm) as client:
        quick, near = ({peer.peer_id for peer in some} for some in (swarm.peers[:2], swarm.peers[2:]))
        client.generate(setting.prompt(0), 2)
        for turn in range(setting.rounds):
            prompt = setting.long_prompt(LONG, turn)
            expected = setting.local.generate(prompt, 64)
            for name, without in (("both", []), ("quick", sorted(near)), ("near", sorted(quick))):
                facts = client.ask(client.request([prompt], ANSWER, without=without))["runs"][0]
                run = as_run(facts)
                firsts.setdefault(name, []).append(first_token_s(run))
                rates.setdefault(name, []).append(decode_rate(run))
                equal.append(run.ids[:64] == expected.ids)
                if name == "both":
                    moved.append(set(facts["route"]) == near)
    words = f"prompt of {LONG:,} and answer of {ANSWER} tokens on unlike peers"
    note = (
        f"{DELAY_MS:g} ms against {NEAR_MS:g} ms one way, prompts {PREFILL_TIMES:g} times as quick (the others sleep); "
        f"moved: {sum(moved)} of {len(moved)}; equal to local: {sum(equal)} of {len(equal)}"
    )
    best_first = [min(pair) for pair in zip(firsts["quick"], firsts["near"], strict=True)]
    best_rate = [max(pair) for pair in zip(rates["quick"], rates["near"], strict=True)]
    return [
        Figure.of_median(f"{words}: time to first token over the better chain's", "",
                         [a / b for a, b in zip(firsts["both"], best_first, strict=True)], note),
        Figure.of_median(f"{words}: tokens/s over the better chain's", "",
                         [a / b for a, b in zip(rates["both"], best_rate, strict=True)], note),
    ]  # fmt: skip


def chosen(setting: Setting) -> list[Figure]:
    """Six hosts, all as far from one another as chance will have it: the route that is chosen, in turns with the two
    best of all nine routes as they were measured before."""
    rng, turns, equal = random.Random(SIX_SEED), count(), []
    with setting.wide_swarm(SIX, DELAY_MS) as swarm, setting.client(swarm) as client:
        for a, b in combinations(range(1, 2 + len(SIX)), 2):
            swarm.lab.link(a, b, delay_ms=rng.uniform(*SIX_DELAYS_MS))
        everybody = {peer.peer_id for peer in swarm.peers}
        halves = [[peer.peer_id for peer in some] for some in (swarm.peers[:3], swarm.peers[3:])]
        routes = [set(pair) for pair in product(*halves)]

        def rate(route: set[str] | None) -> float:
            prompt = setting.long_prompt(CONTEXT, next(turns))  # another one each time: nobody holds its beginning
            without = sorted(everybody - route) if route else []
            run = as_run(client.ask(client.request([prompt], NEW, without=without))["runs"][0])
            equal.append(run.ids == setting.local.generate(prompt, NEW).ids)
            return decode_rate(run)

        rate(None)
        client.wait_for_peers(len(SIX))
        found = sorted(((rate(route), index) for index, route in enumerate(routes)), reverse=True)
        best = [routes[index] for _, index in found[:2]]
        pairs = range(max(LEAST_PAIRS, setting.rounds))
        shares = [rate(None) / max(rate(route) for route in best) for _ in pairs]
    spread = f"the nine: {found[-1][0]:.1f} to {found[0][0]:.1f} tokens/s; equal to local: {sum(equal)} of {len(equal)}"
    words = f"6 hosts, {SIX_DELAYS_MS[0]:g} to {SIX_DELAYS_MS[1]:g} ms one way: tokens/s over the best route's"
    return [Figure.of_median(words, "", shares, spread)]


def alarms(setting: Setting) -> list[Figure]:
    """An hour of lost and late packets and of nothing else: whoever is taken for dead is a false alarm."""
    changed, equal, tokens = [], [], 0
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        expected = setting.local.generate(setting.prompt(0), ALARM_NEW)
        swarm.lab.everywhere(loss=LOSS, jitter_ms=JITTER_MS)
        dropped, until = swarm.lab.dropped, time.monotonic() + ALARMS_S
        while time.monotonic() < until:
            facts = client.ask(client.request([setting.prompt(0)], ALARM_NEW))["runs"][0]
            changed.append(float(len(facts["routes"]) - 1))
            equal.append(tuple(facts["ids"]) == expected.ids)
            tokens += len(facts["ids"])
        dropped = swarm.lab.dropped - dropped
    words = f"{100 * LOSS:g} % loss and {JITTER_MS:g} ms jitter, {ALARMS_S / 60:g} minutes"
    note = f"{tokens} tokens, {dropped} packets lost; equal to local: {sum(equal)} of {len(equal)}"
    return [Figure.of_sum(f"{words}: false alarms", f"in {len(changed)} texts", changed, note)]
