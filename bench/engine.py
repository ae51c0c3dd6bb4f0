"""Owns the figures of a peer's engine: few and many sessions, long contexts, prompts beside answers, full caches."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median, quantiles

from bench.children import Client
from bench.figures import Figure, Run, decode_rate, first_token_s, gaps_s, take_turns, together_rate
from bench.setting import WARM_TOKENS, Setting
from swarm.local import LocalPeer

NEW = 64
SHORT, LONG = 40, 1000
TWO_PEERS = ("0:15", "15:30")
HALVES = ("0:5", "5:10")  # of the mixture of experts
DTYPES = ("float32", "bfloat16")
BESIDE_NEW = 192  # tokens of the answer that another prompt comes to
BESIDE_PROMPT = 2000
BESIDE_AFTER_S = 2.0
IDLE_SESSIONS, IDLE_NEW, IDLE_CACHE_MIB = 64, 8, 60


def one(setting: Setting) -> list[Figure]:
    """One session, the first token left out on both sides; at 40 tokens of context and at 1,000."""
    figures = []
    for dtype in DTYPES:
        with setting.swarm(TWO_PEERS, dtype) as swarm, setting.client(swarm, dtype) as client:
            for context in (SHORT, LONG):
                prompts, outside = _prompts(setting, context), list[float]()

                def local(turn: int, prompts: list[list[int]] = prompts, dtype: str = dtype) -> Run:
                    return setting.local_in(dtype).generate(prompts[turn % len(prompts)], NEW)

                def remote(
                    turn: int,
                    prompts: list[list[int]] = prompts,
                    client: Client = client,
                    outside: list[float] = outside,
                ) -> Run:
                    run = client.generate(prompts[turn % len(prompts)], NEW)
                    outside.append((client.spent_ms["step"] - client.spent_ms["compute"]) / len(TWO_PEERS))
                    return run

                setting.warm(client, prompts[:1], dtype)
                rounds = take_turns(setting.rounds, local, remote)
                words = f"{dtype}, {context:,} tokens of context"
                figures += [
                    Figure.of_median(f"one session, {words}", "x local", rounds.ratios(decode_rate)),
                    Figure.of_median(
                        f"outside the blocks, a hop, {words}", "ms", outside, "of a step: queue, wire, client's driver"
                    ),
                ]
    return figures


def many(setting: Setting) -> list[Figure]:
    """Sessions side by side in bf16: tokens/s of all together after the first token of each, over one local session."""
    figures = []
    with setting.swarm(TWO_PEERS, "bfloat16") as swarm, setting.client(swarm, "bfloat16") as client:
        for count, context in ((8, SHORT), (8, LONG), (32, SHORT)):
            prompts = [_prompts(setting, context, turn)[turn % 8] for turn in range(count)]
            setting.warm(client, prompts[:1], "bfloat16")
            rounds = take_turns(
                min(3, setting.rounds),
                lambda turn, prompts=prompts: [  # type: ignore[misc]
                    setting.local_in("bfloat16").generate(prompts[turn], NEW)
                ],
                lambda turn, prompts=prompts: client.batch(prompts, NEW),  # type: ignore[misc]
            )
            figures.append(
                Figure.of_median(
                    f"{count} sessions, bfloat16, {context:,} tokens of context", "x local",
                    rounds.ratios(together_rate),
                    "from the first of all first tokens to the last token of all",
                )
            )  # fmt: skip
    return figures


def experts(setting: Setting) -> list[Figure]:
    """A random mixture of experts (8, of which each token takes 2): one session, and eight side by side; in bf16 also
    with packed weights, over the same peers without.
    """
    figures = []
    with setting.mixture_of_experts() as moe:
        prompts = [moe.prompt(index) for index in range(8)]
        with moe.swarm(HALVES) as swarm, moe.client(swarm) as client:
            moe.warm(client, prompts[:1])
            for count, words in ((1, "one session"), (8, "8 sessions")):
                rounds = take_turns(
                    min(3, moe.rounds),
                    lambda turn: [moe.local.generate(prompts[turn], NEW)],
                    lambda turn, count=count: client.batch(_some(prompts, turn, count), NEW),  # type: ignore[misc]
                )
                figure = f"mixture of experts, {words}, 2 peers of 5"
                figures.append(Figure.of_median(figure, "x local", rounds.ratios(together_rate)))
        moe.end_local()
        for quantization in ("int8", "int4"):
            figures += _packed_experts(moe, prompts, quantization)
    return figures


def _packed_experts(moe: Setting, prompts: list[list[int]], quantization: str) -> list[Figure]:
    figures = []
    options = ("--quantize", quantization)
    with (
        moe.swarm(HALVES, "bfloat16") as plain, moe.swarm(HALVES, "bfloat16", options) as packed,
        moe.client(plain, "bfloat16") as without, moe.client(packed, "bfloat16") as client,
    ):  # fmt: skip
        for each in (without, client):
            each.generate(prompts[0], WARM_TOKENS)
        for count, words in ((1, "one session"), (8, "8 sessions")):
            rounds = take_turns(
                min(3, moe.rounds),
                lambda turn, count=count: without.batch(_some(prompts, turn, count), NEW),  # type: ignore[misc]
                lambda turn, count=count: client.batch(_some(prompts, turn, count), NEW),  # type: ignore[misc]
            )
            figure = f"mixture of experts, bfloat16, {words}, {quantization} weights"
            figures.append(Figure.of_median(figure, "x not packed", rounds.ratios(together_rate)))
        held = [sum(peer.facts["weights_bytes"] for peer in swarm.peers) for swarm in (packed, plain)]
    figure = f"mixture of experts, weights in {quantization}"
    return [*figures, Figure.of_sum(figure, "of bfloat16", [held[0] / held[1]])]


def _some(prompts: list[list[int]], turn: int, count: int) -> list[list[int]]:
    return prompts[turn : turn + 1] if count == 1 else prompts


def beside(setting: Setting) -> list[Figure]:
    """A prompt of 2,000 tokens that comes while another session decodes: what each costs the other."""
    latency: list[float] = []
    first: list[float] = []
    with setting.swarm(TWO_PEERS) as swarm, setting.client(swarm) as client:
        client.generate(setting.prompt(0), NEW)
        for turn in range(setting.rounds):
            long = setting.long_prompt(BESIDE_PROMPT, turn)
            alone = first_token_s(client.generate(long, 1))
            calm = median(gaps_s(client.generate(setting.prompt(turn), NEW)))
            running, other = client.do(
                "beside", [setting.prompt(turn), [*long[1:], long[0]]], BESIDE_NEW, after_s=BESIDE_AFTER_S
            )
            during = [
                after - before
                for before, after in zip(running.times, running.times[1:], strict=False)
                if after > other.began and before < other.times[0]
            ]
            latency.append(quantiles(during, n=100)[98] / calm)
            first.append(first_token_s(other) / alone)
    return [
        Figure.of_median(
            "decode latency (p99) while a 2,000-token prompt prefills, times undisturbed", "x", latency,
            f"over the median undisturbed; {len(during)} tokens in the last run",
        ),
        Figure.of_median("that prompt's time to first token, times alone", "x", first),
    ]  # fmt: skip


def pinned(setting: Setting) -> list[Figure]:
    """1,000 tokens, two peers each on a core of its own, over one peer with all blocks on one core."""
    figures = []
    for dtype in DTYPES:
        seconds: dict[int, list[float]] = {}
        for spans in (("0:30",), TWO_PEERS):
            with setting.swarm(spans, dtype) as swarm, setting.client(swarm, dtype) as client:
                for core, peer in enumerate(swarm.peers):
                    _pin(peer, core)
                client.generate(setting.long_prompt(LONG, setting.rounds), 1)
                seconds[len(spans)] = [
                    first_token_s(client.generate(setting.long_prompt(LONG, turn), 1))
                    for turn in range(setting.rounds)
                ]
        ratios = [two / median(seconds[1]) for two in seconds[2]]
        note = f"one peer {median(seconds[1]):.2f} s, two {median(seconds[2]):.2f} s"
        figures.append(
            Figure.of_median(f"time to first token, 1,000 tokens, 2 pinned peers over 1, {dtype}", "x", ratios, note)
        )
    return figures


def chat(setting: Setting) -> list[Figure]:
    """The second turn of a chat with 1,000 tokens of history, over the same tokens cold."""
    ratios = []
    with setting.swarm(TWO_PEERS) as swarm, setting.client(swarm) as client:
        client.generate(setting.long_prompt(LONG, setting.rounds), 1)
        for turn in range(setting.rounds):
            history, question = setting.long_prompt(LONG, turn), setting.prompt(turn)[:16]
            first, second = client.do("turns", [history, question], NEW // 8)
            cold = client.generate([*history, *first.ids, *question], 1)
            ratios.append(first_token_s(second) / first_token_s(cold))
    note = "16 new tokens in a session that stayed open"
    return [Figure.of_median("second turn of a chat, 1,000 tokens of history, times cold", "x", ratios, note)]


def idle(setting: Setting) -> list[Figure]:
    """64 sessions that do not fit the peers' caches together; then all speak again at once."""
    prompts = [[*setting.prompt(index), *setting.prompt(index + 1)[: index // 8]] for index in range(IDLE_SESSIONS)]
    options = ("--cache", str(IDLE_CACHE_MIB))
    with setting.swarm(TWO_PEERS, options=options) as swarm, setting.client(swarm) as client:
        runs = client.do("twice", prompts, IDLE_NEW)
    wanted = [setting.local.generate(prompt, 2 * IDLE_NEW).ids for prompt in prompts]
    wrong = sum(run.ids != ids for run, ids in zip(runs, wanted, strict=True))
    seconds = runs[0].times[-1] - runs[0].began
    note = f"caches of {IDLE_CACHE_MIB} MiB; {seconds:.0f} s in all"
    return [Figure.of_sum("64 idle sessions past the cache, all again: lost or wrong", "sessions", [wrong], note)]


def _prompts(setting: Setting, context: int, turn: int = 0) -> list[list[int]]:
    if context == SHORT:
        return [setting.prompt(index) for index in range(8)]
    return [setting.long_prompt(context, turn + index) for index in range(8)]


def _pin(peer: LocalPeer, core: int) -> None:
    """All threads of a peer, those to come as well."""
    for thread in Path(f"/proc/{peer.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core % (os.cpu_count() or 1)})
