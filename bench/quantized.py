"""Owns the figures of quantized weights: how much faster, how much smaller, how far off."""

from __future__ import annotations

from bench.engine import NEW, TWO_PEERS
from bench.figures import Figure, decode_rate, take_turns
from bench.setting import Setting

BITS = {"int8": 9.0, "int4": 5.0, "nf4": 4.5}  # a weight, scales and offsets with it
PROMPTS = 8


def quantized(setting: Setting) -> list[Figure]:
    """One session over two peers in bf16, whose weights are packed; the yardstick is bf16 and unpacked."""
    figures = []
    held: dict[str, int] = {}
    prompts = [setting.prompt(index) for index in range(PROMPTS)]
    for name in BITS:
        options = ("--quantize", name)
        with setting.swarm(TWO_PEERS, "bfloat16", options) as swarm, setting.client(swarm, "bfloat16") as client:
            setting.warm(client, prompts[:1], "bfloat16")
            rounds = take_turns(
                setting.rounds,
                lambda turn: setting.local_in("bfloat16").generate(prompts[turn % PROMPTS], NEW),
                lambda turn, client=client: client.generate(prompts[turn % PROMPTS], NEW),  # type: ignore[misc]
            )
            held[name] = sum(peer.facts["weights_bytes"] for peer in swarm.peers)
        figures.append(
            Figure.of_median(
                f"one session, {name} weights, bfloat16, 40 tokens of context", "x local", rounds.ratios(decode_rate)
            )
        )
    setting.end_local()
    return figures + _losses(setting, held)


def _losses(setting: Setting, held: dict[str, int]) -> list[Figure]:
    facts = setting.losses()
    figures = []
    for name, bits in BITS.items():
        formula = facts["linear_weights"] * bits / 8
        note = f"norms and all, {held[name] / 2**20:.0f} MiB"
        figures += [
            Figure.of_sum(f"weights of all blocks, {name}, over {bits:g} bits each", "x", [held[name] / formula], note),
            Figure.of_sum(f"next token, {name}", "nats", [facts["kl"][name]], "mean KL on eight texts"),
            Figure.of_sum(
                f"the same, {name}, weights moved off a grid of 4 bits", "nats", [facts["kl_moved"][name]],
                "by up to half a step at random: the file of the model is in 4 bits already",
            ),
            Figure.of_sum(f"products with normal weights, {name}", "of their size", [facts["products"][name]]),
        ]  # fmt: skip
    return figures
