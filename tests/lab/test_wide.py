"""A swarm over real distances: hosts fall silent, links break one way, packets are lost, and texts do not change."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.children import Client, as_run
from bench.figures import longest_gap_s
from swarm.local import LocalPeer
from tests.lab.chaos import Chaos, Texts, schedule
from tests.lab.lab import Lab, why_not
from tests.lab.swarm import LabSwarm
from tests.tiny import make_tiny
from tests.whole.reference import Reference

pytestmark = [pytest.mark.processes, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

DELAY_MS = 10
TWICE = ["0:3", "3:6", "0:3", "3:6"]
PROMPT = "Far apart and unreliable: "
NEW, AT = 24, 6


class Wide:
    """Host 1 is the client's, one peer on each other host."""

    def __init__(self, folder: Path, lab: Lab, swarm: LabSwarm, client: Client):
        self.lab, self.swarm, self.client = lab, swarm, client
        self.reference = Reference(folder)
        self.ids = self.reference.ids(PROMPT)

    def disturbed(self, harm: Callable[[list[LocalPeer]], object]) -> tuple[float, list[str]]:
        """One text, in the midst of which the peers of the route come to harm: its longest gap, in seconds, and the
        reasons of its routes."""
        self.client.send(self.client.request([self.ids], NEW, tell_at=AT))
        harm([self.swarm.by_id(peer_id) for peer_id in self.client.next()["route"]])
        facts = self.client.next()["runs"][0]
        self.reference.check(self.ids, facts["ids"], NEW)
        return longest_gap_s(as_run(facts)), facts["routes"]

    def host(self, peer: LocalPeer) -> int:
        return self.swarm.host_of(peer)

    def heal(self) -> None:
        self.lab.everywhere(delay_ms=DELAY_MS, jitter_ms=0, loss=0, cut=False)
        self.client.wait_for_peers(len(TWICE))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wide]:
    folder = make_tiny("llama", tmp_path_factory.mktemp("wide"), layers=6, tokenizer=True)
    with (
        tempfile.TemporaryDirectory() as logs,
        Lab(hosts=1 + len(TWICE), delay_ms=DELAY_MS) as lab,
        LabSwarm(lab, str(folder), TWICE) as swarm,
    ):
        client = Client(str(folder), swarm.join_code, Path(logs), before=lab.on(1), wait_s=60.0)
        try:
            client.wait_for_peers(len(TWICE))
            wide = Wide(folder, lab, swarm, client)
            wide.reference.greedy(wide.ids, NEW)
            yield wide
        finally:
            client.close()


@pytest.fixture(autouse=True)
def healed(wide: Wide) -> Iterator[None]:
    yield
    wide.heal()


@pytest.mark.parametrize(
    ("hop", "ways"),
    [(0, {}), (1, {"inward": False}), (0, {"outward": False}), (0, {"outward": False})],
    ids=["first hop, both ways", "last hop, outward", "first hop, inward", "the other first hop, inward"],
)
def test_a_host_that_falls_silent(hop: int, ways: dict[str, Any], wide: Wide) -> None:
    """Two seconds, whatever links had to bear in the tests before: a way that is dead is no way that loses packets,
    one that was dead no slow one, and of two that lost each other the one who is cut off is left at once."""
    stall_s, routes = wide.disturbed(lambda route: wide.lab.cut(wide.host(route[hop]), **ways))
    assert len(routes) >= 2 and stall_s < 4, f"{stall_s:.1f} s, {routes}"


def test_two_hops_that_lose_each_other(wide: Wide) -> None:
    """Both still reach the client."""
    stall_s, routes = wide.disturbed(lambda route: wide.lab.link(*map(wide.host, route), cut=True))
    assert len(routes) >= 2 and stall_s < 6, f"{stall_s:.1f} s, {routes}"


def test_lost_and_late_packets_accuse_nobody(wide: Wide) -> None:
    _, routes = wide.disturbed(lambda route: wide.lab.everywhere(loss=0.01, jitter_ms=30))
    assert len(routes) == 1, routes


def test_the_clients_own_network_is_gone_for_a_while(wide: Wide) -> None:
    timer = threading.Timer(5.0, wide.lab.everywhere, kwargs={"cut": False})

    def gone(route: list[LocalPeer]) -> None:
        wide.lab.cut(1)
        timer.start()

    stall_s, routes = wide.disturbed(gone)
    timer.join()
    assert 4 < stall_s < 20, f"{stall_s:.1f} s, {routes}"


def test_texts_survive_chaos(wide: Wide) -> None:
    """Some seconds of what `make chaos` does for as long as one likes, on this swarm."""
    chaos, said = Chaos(wide.swarm, wide.lab), list[str]()
    with Texts(wide.client, wide.reference) as texts:
        chaos.play(schedule(28, 6.0, len(TWICE)), said.append)
    assert texts.done and not texts.wrong and not texts.failed, "\n".join([*said, *texts.wrong, *texts.failed])
    assert len(chaos.happened) >= 3, said
