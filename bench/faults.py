"""Owns the figures of recovery: the hop in use is killed, or frozen, at token 64, while a spare is alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from bench.children import Client, as_run
from bench.figures import Figure, Run, gaps_s, longest_gap_s, total_rate
from bench.setting import Setting
from swarm.local import LocalPeer, LocalSwarm

TWICE = ("0:15", "15:30", "0:15", "15:30")
AT = 64
NEW = 80
STALL = 4  # times as long as usual
HOPS = {"first hop": 0, "last hop": -1}


def stall(setting: Setting) -> list[Figure]:
    """SIGKILL; between two runs the dead peer comes back under its identity, and the client sees it again."""
    figures = []
    with setting.swarm(TWICE) as swarm, setting.client(swarm) as client:
        expected = _expected(setting, client)
        for words, hop in HOPS.items():
            runs = []
            for _ in range(setting.rounds):
                run, victim = _disturbed(setting, swarm, client, hop, LocalPeer.kill)
                runs.append(run)
                bring_back(swarm, victim)
                client.wait_for_peers(len(TWICE))
            figures += _figures(f"SIGKILL of the {words}", runs, expected)
    return figures


def freeze(setting: Setting) -> list[Figure]:
    """SIGSTOP of the last hop; it is thawed after the run."""
    runs = []
    with setting.swarm(TWICE) as swarm, setting.client(swarm) as client:
        expected = _expected(setting, client)
        for _ in range(setting.rounds):
            run, victim = _disturbed(setting, swarm, client, HOPS["last hop"], LocalPeer.freeze)
            runs.append(run)
            victim.thaw()
            client.wait_for_peers(len(TWICE))
    return _figures("SIGSTOP of the last hop", runs, expected)


def _expected(setting: Setting, client: Client) -> Run:
    """Undisturbed, by the local model; the client has warmed up with a few tokens, as everywhere."""
    setting.warm(client, [setting.prompt(0)])
    return setting.local.generate(setting.prompt(0), NEW)


def _disturbed(
    setting: Setting, swarm: LocalSwarm, client: Client, hop: int, harm: Callable[[LocalPeer], None]
) -> tuple[Run, LocalPeer]:
    """One generation; as soon as token 64 is there, the peer that serves that hop of the route is harmed."""
    facts, victim = disturbed(swarm, client, setting.prompt(0), NEW, AT, hop, harm)
    return as_run(facts), victim


def disturbed(
    swarm: LocalSwarm,
    client: Client,
    prompt: Sequence[int],
    new: int,
    at: int,
    hop: int,
    harm: Callable[[LocalPeer], object],
    standby: str = "inputs",
) -> tuple[dict[str, Any], LocalPeer]:
    """What the client says of one generation of `new` tokens; as soon as `at` of them are there, the peer that serves
    that hop of the route is harmed.
    """
    client.send(client.request([prompt], new, tell_at=at, standby=standby))
    route = client.next()["route"]
    victim = next(peer for peer in swarm.peers if peer.alive and peer.peer_id == route[hop])
    harm(victim)
    try:
        return client.next()["runs"][0], victim
    except BaseException:
        victim.thaw()
        raise


def bring_back(swarm: LocalSwarm, victim: LocalPeer) -> None:
    """The founder may be the one that died: who comes back enters through a peer that lives."""
    swarm.join_code = next(peer.facts["join_code"] for peer in swarm.peers if peer.alive)
    swarm.add(victim.span, identity=victim.log.stem)


PROBABILITIES = (1e-4, 1e-3, 1e-2)
LENGTHS = (128, 1024)
START = 8  # tokens of the prompt
MODES = {"plain": "inputs", "with standby": "warm"}


def forget(setting: Setting) -> list[Figure]:
    """Each peer loses the session's state at each step with a probability (Borzunov et al. 2023, table 2): how much of
    the speed without losses is kept, and what a loss costs beyond computing the state anew."""
    prompt = setting.long_prompt(START, 0)
    expected = setting.local.generate(prompt, max(LENGTHS))
    with setting.swarm(TWICE) as swarm, setting.client(swarm) as client:
        whole = {new: [client.generate(prompt, new) for _ in range(setting.rounds)] for new in LENGTHS}
        replay_s = client.ask(client.request([setting.long_prompt(max(LENGTHS), 0)], 2))["runs"][0]["spent_ms"]
        position_s = median(replay_s["prefill"]) / 1e3 / max(LENGTHS)  # of one hop
    speed = {new: median(total_rate([run]) for run in whole[new]) for new in LENGTHS}
    usual_s = median(gap for run in whole[max(LENGTHS)] for gap in gaps_s(run))
    figures = []
    for probability in PROBABILITIES:
        with setting.forgetful_swarm(TWICE, probability) as swarm, setting.client(swarm) as client:
            client.generate(prompt, START)
            for words, mode in MODES.items():
                stalls: list[float] = []
                for new in LENGTHS:
                    kept, equal = [], []
                    for _ in range(setting.rounds):
                        request = client.request([prompt], new, standby=mode)
                        run = as_run(client.ask(request)["runs"][0])
                        kept.append(total_rate([run]) / speed[new])
                        equal.append(run.ids == expected.ids[:new])
                        stalls += [
                            gap - usual_s - position_s * (START + index + 1)
                            for index, gap in enumerate(gaps_s(run)) if gap > STALL * usual_s
                        ]  # fmt: skip
                    note = f"equal to local: {sum(equal)} of {len(equal)}"
                    figures.append(
                        Figure.of_median(f"state lost with p = {probability:g} a step, {words}, {new:,} tokens: share "
                                         "of the speed", "", kept, note)
                    )  # fmt: skip
                figures.append(
                    Figure.of_median(f"state lost with p = {probability:g} a step, {words}: mean stall beyond the "
                                     "replay", "s", [fmean(stalls) if stalls else 0.0],
                                     f"{len(stalls)} gaps of more than {STALL} times the usual one")
                )  # fmt: skip
    return figures


def _figures(words: str, runs: list[Run], expected: Run) -> list[Figure]:
    usual = 1e3 * (expected.times[-1] - expected.times[0]) / (len(expected.times) - 1)
    return [
        Figure.of_median(
            f"stall after {words} at token {AT}", "s", [longest_gap_s(run) for run in runs],
            f"longest time between two of {NEW} tokens; a local one takes {usual:.0f} ms",
        ),
        Figure.of_sum(
            f"equal to local after {words}", f"of {len(runs)} runs", [run.ids == expected.ids for run in runs],
            "token for token",
        ),
    ]  # fmt: skip
