"""The network lab itself: delays are true, losses and cuts happen in the direction asked for, nothing stays."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.lab.lab import Lab, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, delay_ms=10) as lab:
        yield lab


def test_round_trips_are_true(lab: Lab) -> None:
    """None is early, and the fastest, which a busy machine did not hold up, is on time."""
    assert 20 <= min(lab.round_trips_ms(1, 2)) < 22
    lab.link(1, 2, both=False, delay_ms=40)
    assert 50 <= min(lab.round_trips_ms(1, 2)) < 52
    assert 20 <= min(lab.round_trips_ms(1, 3)) < 22
    lab.link(1, 2, both=False, delay_ms=0, jitter_ms=30)
    times = lab.round_trips_ms(1, 2)
    assert min(times) >= 10 and max(times) - min(times) > 10


def test_cuts_are_silent_and_have_a_direction(lab: Lab) -> None:
    lab.cut(2)
    assert lab.round_trips_ms(1, 2, 1, 0.2) == lab.round_trips_ms(3, 2, 1, 0.2) == [-1]
    assert lab.round_trips_ms(1, 3, 1)[0] > 0
    lab.heal(2)
    assert lab.round_trips_ms(1, 2, 1)[0] > 0
    before = lab.dropped
    lab.cut(2, inward=False)
    assert lab.round_trips_ms(1, 2, 1, 0.2) == [-1] and lab.dropped == before + 1
    lab.heal(2)
    lab.split({1, 3})
    assert lab.round_trips_ms(1, 2, 1, 0.2) == [-1] and lab.round_trips_ms(1, 3, 1)[0] > 0
    lab.everywhere(cut=False)
    assert lab.round_trips_ms(1, 2, 1)[0] > 0


def test_losses_and_rates(lab: Lab) -> None:
    lab.everywhere(delay_ms=0)
    lab.link(1, 2, loss=0.3)
    lost = sum(time < 0 for time in lab.round_trips_ms(1, 2, 60, 0.03))
    assert 18 <= lost <= 45  # of 60, 51 % expected; the seed is the same every time
    lab.link(1, 2, loss=0.0)
    lab.rate(1, mbit_s=0.01)  # a packet of 30 bytes takes 24 ms
    assert 20 <= min(lab.round_trips_ms(1, 2, 5)) <= 30


def test_nothing_stays() -> None:
    with Lab(hosts=1) as lab:
        assert lab.prefix in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert lab.prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
