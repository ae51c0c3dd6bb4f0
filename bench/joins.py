"""Owns how soon a joining peer is of use: from the start of its process to the first token computed through it."""

from __future__ import annotations

from bench.children import as_run
from bench.figures import Figure
from bench.setting import Setting

FIRST, SECOND = "0:15", "15:30"
WAIT_S = 120.0


def joins(setting: Setting) -> list[Figure]:
    """A client waits for the second half of the model; nobody serves it before the newcomer. The first round measures
    its speed and is not counted; in later ones that is known, as it is to a volunteer who comes back."""
    prompt = setting.prompt(0)
    setting.end_local()
    useful: list[float] = []
    serving: list[float] = []
    for turn in range(setting.rounds + 1):
        with setting.swarm([FIRST]) as swarm, setting.client(swarm, wait_s=WAIT_S) as client:
            peer = swarm.launch(SECOND)
            client.send(client.request([prompt], 1, timeout_s=WAIT_S))
            peer.wait_serving()
            run = as_run(client.next()["runs"][0])
            if turn:
                serving.append(peer.served_at - peer.launched_at)
                useful.append(run.times[0] - peer.launched_at)
    note = "model on disk and in the page cache, speed measured before; the client's wait and first prefill included"
    return [
        Figure.of_median("launch of a joiner to the first token through it, 15 blocks", "s", useful, note),
        Figure.of_median("of that: until it serves", "s", serving, note),
    ]
