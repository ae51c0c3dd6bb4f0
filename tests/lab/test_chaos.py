"""The schedule of `make chaos`; some seconds of it run in test_wide.py."""

from __future__ import annotations

from tests.lab.chaos import OF_NETWORK, OF_PEERS, schedule


def test_a_seed_gives_the_same_faults_every_time() -> None:
    assert schedule(3, 60, 6) == schedule(3, 60, 6) != schedule(4, 60, 6)
    faults = schedule(3, 600, 6)
    assert {fault.kind for fault in faults} == OF_PEERS.keys() | OF_NETWORK.keys()
    assert {fault.kind for fault in schedule(3, 600, 6, network=False)} == OF_PEERS.keys()
    assert all(0 <= fault.peer < 6 and fault.peer != fault.other and fault.at_s < 600 for fault in faults)
