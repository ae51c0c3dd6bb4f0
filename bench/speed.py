"""Owns the figures of speed: decode, time to first token, eight sessions at once. Each beside the local model."""

from __future__ import annotations

from bench.children import ChildFailed, Client
from bench.figures import Figure, Run, decode_rate, first_token_s, take_turns, total_rate
from bench.setting import Setting

NEW = 64
LONG = 1000
EIGHT = 8
TWO_PEERS = ("0:15", "15:30")
THREE_PEERS = ("0:10", "10:20", "20:30")
HANG_RUNS = 20
HANG_S = 120.0
WARMED = "both warmed by 8 tokens"


def decode(setting: Setting) -> list[Figure]:
    """One session, prompt of about 40 tokens, 64 new ones, the first left out on both sides."""
    figures = []
    for spans, words in ((TWO_PEERS, "2 peers of 15"), (THREE_PEERS, "3 peers of 10")):
        with setting.swarm(spans) as swarm, setting.client(swarm) as client:
            setting.warm(client, [setting.prompt(0)])

            def local(turn: int) -> Run:
                return setting.local.generate(setting.prompt(turn), NEW)

            def remote(turn: int, client: Client = client) -> Run:
                return client.generate(setting.prompt(turn), NEW)

            rounds = take_turns(setting.rounds, local, remote)
        spent = client.spent_ms
        where = ", ".join(f"{name} {spent[name]:.1f}" for name in ("compute", "queue", "network", "step"))
        figures += [
            Figure.of_median(f"decode, {words}, share of local", "x local", rounds.ratios(decode_rate), WARMED),
            Figure.of_median(
                f"decode, {words}", "tokens/s", [decode_rate(run) for run in rounds.subject],
                f"ms of a step in the last run: {where}",
            ),
            Figure.of_median(
                f"decode, local beside {words}", "tokens/s", [decode_rate(run) for run in rounds.yardstick],
                f"tokens equal in {_equal(rounds.yardstick, rounds.subject)} of {setting.rounds} rounds",
            ),
        ]  # fmt: skip
    return figures


def ttft(setting: Setting) -> list[Figure]:
    """From the call to the first token of a 1,000-token prompt; opening the session is in it. Every round's tokens
    differ, so that nothing kept from before can help."""
    with setting.swarm(TWO_PEERS) as swarm, setting.client(swarm) as client:
        setting.warm(client, [setting.long_prompt(LONG, setting.rounds)])
        rounds = take_turns(
            setting.rounds,
            lambda turn: setting.local.generate(setting.long_prompt(LONG, turn), 1),
            lambda turn: client.generate(setting.long_prompt(LONG, turn), 1),
        )
    return [
        Figure.of_median(
            "time to first token, 1,000-token prompt, 2 peers, times local", "x local", rounds.ratios(first_token_s),
            f"{WARMED} on another long prompt",
        ),
        Figure.of_median(
            "time to first token, 2 peers", "s", [first_token_s(run) for run in rounds.subject],
            "opening the session included",
        ),
        Figure.of_median("time to first token, local", "s", [first_token_s(run) for run in rounds.yardstick]),
    ]  # fmt: skip


def eight(setting: Setting) -> list[Figure]:
    """Eight prompts side by side, prefill included, over one local session, prefill included."""
    prompts = [setting.prompt(index) for index in range(EIGHT)]
    reference: dict[int, tuple[int, ...]] = {}

    def local(turn: int) -> list[Run]:
        run = setting.local.generate(prompts[turn % EIGHT], NEW)
        reference[turn % EIGHT] = run.ids
        return [run]

    with setting.swarm(TWO_PEERS) as swarm, setting.client(swarm) as client:
        setting.warm(client, [prompts[0]])
        rounds = take_turns(setting.rounds, local, lambda turn: client.batch(prompts, NEW))
        for index in range(EIGHT):
            if index not in reference:
                local(index)
    equal = [sum(run.ids == reference[index] for index, run in enumerate(runs)) for runs in rounds.subject]
    return [
        Figure.of_median(
            "8 sessions at once, times one local session", "x local", rounds.ratios(total_rate),
            f"{NEW} tokens each, prefill in both; {WARMED} of one session",
        ),
        Figure.of_median("8 sessions at once", "tokens/s", [total_rate(runs) for runs in rounds.subject]),
        Figure.of_median("one local session, prefill included", "tokens/s", [total_rate(r) for r in rounds.yardstick]),
        Figure.of_median("8 sessions at once, equal to local", f"of {EIGHT} sessions", equal, "token for token"),
    ]  # fmt: skip


def eight20(setting: Setting) -> list[Figure]:
    """The same 20 times: how many did not end within the deadline, or ended otherwise than with their text."""
    prompts = [setting.prompt(index) for index in range(EIGHT)]
    hangs: list[float] = []
    seconds: list[float] = []
    equal: list[float] = []
    reference = [setting.local.generate(prompt, NEW).ids for prompt in prompts]
    with setting.swarm(TWO_PEERS) as swarm, setting.client(swarm) as client:
        for _ in range(HANG_RUNS):
            try:
                runs = client.batch(prompts, NEW, timeout_s=HANG_S)
            except ChildFailed:
                client.wait_for_peers(len(TWO_PEERS))  # raises if the client itself is stuck: that is no figure
                hangs.append(1)
                continue
            hangs.append(0)
            seconds.append(max(run.times[-1] for run in runs) - min(run.began for run in runs))
            equal.append(sum(run.ids == ids for run, ids in zip(runs, reference, strict=True)))
    figures = [
        Figure.of_sum(
            "8 sessions at once, failed or hung", f"of {HANG_RUNS} runs", hangs,
            f"not ended within {HANG_S:g} s, or an error",
        ),
    ]  # fmt: skip
    if seconds:
        figures += [
            Figure.of_median("8 sessions at once, a run", "s", seconds),
            Figure.of_sum("8 sessions at once, sessions equal to local", f"of {EIGHT * HANG_RUNS}", equal),
        ]
    return figures


def _equal(yardstick: tuple[Run, ...], subject: tuple[Run, ...]) -> int:
    return sum(local.ids == remote.ids for local, remote in zip(yardstick, subject, strict=True))
