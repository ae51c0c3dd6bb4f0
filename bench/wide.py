"""Owns the figures over real distances: peers on hosts of an emulated wide-area network (`tests/lab/`)."""

from __future__ import annotations

from statistics import median

from bench.children import as_run
from bench.faults import HOPS, TWICE, bring_back, disturbed
from bench.figures import Figure, gaps_s, longest_gap_s
from bench.setting import Setting
from swarm.local import LocalPeer

DELAY_MS = 25.0
THREE_PEERS = ("0:10", "10:20", "20:30")
NEW = 32
CONTEXT = 100
AT, AFTER = 12, 24  # the kill, and the end


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
    """SIGKILL, or a silent cut, of a hop of two, with a spare for each: the stall in round trips beyond what computing
    the context anew takes, and what a cut costs whole."""
    figures = []
    with setting.wide_swarm(TWICE, DELAY_MS) as swarm, setting.client(swarm) as client:
        prompt = setting.long_prompt(CONTEXT, 0)
        expected = setting.local.generate(prompt, AFTER)
        client.generate(prompt, 2)
        for words, hop in HOPS.items():
            stalls, equal = [], []
            for _ in range(setting.rounds):
                facts, victim = disturbed(swarm, client, prompt, AFTER, AT, hop, LocalPeer.kill)
                run, replay_s = as_run(facts), facts["spent_ms"]["prefill"][hop] / 1e3
                stalls.append((longest_gap_s(run) - replay_s) / (2 * DELAY_MS / 1e3))
                equal.append(run.ids == expected.ids)
                bring_back(swarm, victim)
                client.wait_for_peers(len(TWICE))
            figures.append(
                Figure.of_median(f"{DELAY_MS:g} ms one way, SIGKILL of the {words}, {CONTEXT} tokens: stall beyond "
                                 "the replay", "round trips", stalls, f"equal to local: {sum(equal)} of {len(equal)}")
            )  # fmt: skip
        stalls, equal = [], []
        for _ in range(setting.rounds):
            facts, victim = disturbed(
                swarm, client, prompt, AFTER, AT, HOPS["last hop"], lambda peer: swarm.lab.cut(swarm.host_of(peer))
            )
            run = as_run(facts)
            stalls.append(longest_gap_s(run))
            equal.append(run.ids == expected.ids)
            swarm.lab.heal(swarm.host_of(victim))
            client.wait_for_peers(len(TWICE))
        figures.append(
            Figure.of_median(f"{DELAY_MS:g} ms one way, the last hop's host cut off silently: stall", "s", stalls,
                             f"equal to local: {sum(equal)} of {len(equal)}")
        )  # fmt: skip
    return figures
