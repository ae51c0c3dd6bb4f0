"""Owns the figures of what hidden states weigh on the wire: a prompt over narrow uplinks, and what 8 bits lose."""

from __future__ import annotations

from typing import Any

from bench.children import ROOT, Client, as_run
from bench.figures import Figure, first_token_s, take_turns
from bench.prompts import PROMPTS
from bench.setting import Setting

TWO_PEERS, BOUNDARY = ("0:15", "15:30"), 15
LONG = 1000
DELAY_MS, MBIT_S = 5.0, 10.0
LEAST_ROUNDS = 5
PIECE = 1000  # tokens of a text


def narrow(setting: Setting) -> list[Figure]:
    """A prompt of 1,000 tokens where every uplink takes 10 Mbit/s, bf16 compute: what a client chooses that has
    measured its ways, over fp32."""
    dtype, rounds = "bfloat16", max(LEAST_ROUNDS, setting.rounds)
    with (
        setting.wide_swarm(TWO_PEERS, DELAY_MS, dtype) as swarm,
        setting.client(swarm, dtype, "float32") as whole,
        setting.client(swarm, dtype, "auto") as chosen,
    ):
        for host in range(1, 2 + len(TWO_PEERS)):
            swarm.lab.rate(host, MBIT_S)

        def ask(client: Client, turn: int) -> dict[str, Any]:
            request = client.request([setting.long_prompt(LONG, turn)], 1, standby="none")
            return dict(client.ask(request)["runs"][0])

        for client in (whole, chosen):  # with these the ways are measured
            ask(client, rounds)
            ask(client, rounds + 1)
        found = take_turns(rounds, lambda turn: ask(whole, turn), lambda turn: ask(chosen, turn))
    words = f"prompt of {LONG:,} tokens, {MBIT_S:g} Mbit/s uplinks, bf16"
    codecs = sorted({" and ".join(run["codecs"]) for run in found.subject})
    seconds = [first_token_s(as_run(run)) for run in found.yardstick]
    return [
        Figure.of_median(f"{words}: bytes that the client sends, over fp32's", "",
                         found.ratios(lambda run: run["sent"]), f"chosen: {', '.join(codecs)}"),
        Figure.of_median(f"{words}: their time at that rate", "s", [wire_s(run) for run in found.subject],
                         f"fp32's: {wire_s(found.yardstick[0]):.2f} s"),
        Figure.of_median(f"{words}: time to first token over fp32's", "",
                         found.ratios(lambda run: first_token_s(as_run(run))), f"{DELAY_MS:g} ms one way"),
        Figure.of_median(f"{words}: time to first token, fp32 on the wire", "s", seconds),
    ]  # fmt: skip


def wire_s(run: dict[str, Any]) -> float:
    return float(run["sent"] * 8 / (MBIT_S * 1e6))


def codec(setting: Setting) -> list[Figure]:
    """What is lost by 8 bits on the ways into block 0 and block 15, on real text."""
    page, *prompts = setting.local.encode([(ROOT / "docs" / "wire.md").read_text(), *PROMPTS])
    texts = [*prompts, page[PIECE : 2 * PIECE], page[3 * PIECE : 4 * PIECE]]
    facts = setting.local.loss(texts, "INT8", [0, BOUNDARY])
    words = f"8 bits into blocks 0 and {BOUNDARY}, {facts['positions']} tokens of real text"
    return [
        Figure.of_sum(f"{words}: mean KL of the next token against fp32", "nats", [facts["kl"]]),
        Figure.of_sum(f"{words}: likeliest tokens that differ", "in all", [facts["differ"]]),
    ]
