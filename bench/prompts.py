"""Owns the texts of the benchmark: eight of about 40 tokens, and long ones made from them."""

from __future__ import annotations

from collections.abc import Sequence

PROMPTS = (
    "The old lighthouse keeper had counted ships for forty years, and in all that time he had never once seen one "
    "turn around before the reef. That night, under a thin moon, he saw",
    "A distributed system is one in which the failure of a computer that nobody knew existed can make your own "
    "machine useless. To build one that survives, an engineer should first of all",
    "Water boils at a lower temperature on a high mountain than at the sea, because the air presses less on its "
    "surface. A cook who moves from the coast to a village in the Andes will notice",
    "In the spring of 1859 a farmer in the valley wrote in his diary that the swallows had returned two weeks early, "
    "that the river was brown with snow water, and that his neighbours",
    "Bread needs four things: flour, water, salt and time. The last of them is what most recipes forget to mention, "
    "although it does more for the taste than anything else, since the yeast",
    "The library of the small town had only three rooms, but the woman who kept it knew every book by the colour of "
    "its spine. When the stranger asked her for a map of the northern islands, she",
    "To find the shortest way through a maze one may walk along every corridor at once, marking each crossing with "
    "the number of steps it took to get there. The method works because",
    "Bees tell each other where the flowers are by dancing on the comb: the angle gives the direction against the sun, "
    "and the length of the run gives the distance. A scout that has found",
)


def long_ids(prompts: Sequence[Sequence[int]], length: int, turn: int) -> list[int]:
    """Exactly `length` token ids made of the short prompts', in another order each turn: no two rounds send the
    same tokens, so nothing that was kept from a round before can help."""
    ids: list[int] = []
    at = turn
    while len(ids) < length:
        ids += prompts[at % len(prompts)]
        at += 1 + turn % 3
    return ids[:length]
