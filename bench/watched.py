"""Owns the figure of what being watched costs: decoding on peers with a page of metrics that is read, and on others."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from bench.figures import Figure, decode_rate
from bench.setting import Setting
from swarm.local import LocalSwarm

SPANS = ("0:15", "15:30")
LEAST_PAIRS = 15
NEW = 64
EVERY_S = 1.0  # a page; Prometheus asks every fifteen or so


def watched(setting: Setting) -> list[Figure]:
    """Two swarms that take turns, so that what the machine does meanwhile is the same for both. A session always keeps
    its traces, in either."""
    ratios = []
    with (
        setting.swarm(SPANS) as plain,
        setting.swarm(SPANS, options=["--metrics-port", "0"]) as read,
        setting.client(plain) as one,
        setting.client(read) as other,
        _reading(read) as pages,
    ):
        for client in (one, other):
            setting.warm(client, [setting.prompt(0)])
        for turn in range(max(LEAST_PAIRS, setting.rounds)):
            order = (one, other) if turn % 2 else (other, one)
            rates = {client: decode_rate(client.generate(setting.prompt(turn), NEW)) for client in order}
            ratios.append(rates[other] / rates[one])
    note = f"{len(ratios)} pairs in turns; a page of each peer every {EVERY_S:g} s, {len(pages)} in all"
    return [Figure.of_median("metrics that are read: tokens/s over those without", "", ratios, note)]


@contextmanager
def _reading(swarm: LocalSwarm) -> Iterator[list[int]]:
    """The pages' sizes so far."""
    stop, sizes = threading.Event(), list[int]()

    def read() -> None:
        while not stop.wait(EVERY_S):
            for peer in swarm.peers:
                with urllib.request.urlopen(peer.facts["metrics"], timeout=5) as page:
                    sizes.append(len(page.read()))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield sizes
    finally:
        stop.set()
        reader.join()
