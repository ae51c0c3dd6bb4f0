"""Some seconds of `make chaos`, and its schedule."""

from __future__ import annotations

import pytest

from tests.lab.chaos import run, schedule
from tests.lab.lab import why_not


def test_a_seed_gives_the_same_faults_every_time() -> None:
    assert schedule(3, 60, 6) == schedule(3, 60, 6) != schedule(4, 60, 6)
    faults = schedule(3, 600, 6)
    assert {fault.kind for fault in faults} >= {"kill", "freeze", "cut", "edge", "client gone", "partition"}
    assert all(0 <= fault.peer < 6 and fault.peer != fault.other and fault.at_s < 600 for fault in faults)


@pytest.mark.processes
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_texts_survive_chaos() -> None:
    said: list[str] = []
    assert not run(5, 12.0, said.append), "\n".join(said)
