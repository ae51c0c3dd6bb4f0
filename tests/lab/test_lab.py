"""The network lab itself: delays are true, losses and cuts happen in the direction asked for, nothing stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from statistics import median

import pytest

from tests.lab.lab import Lab, why_not

pytestmark = [pytest.mark.processes, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

ECHO = """
import socket
s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('0.0.0.0', 9)); print('ready', flush=True)
while True:
    data, sender = s.recvfrom(100); s.sendto(data, sender)
"""
ASK = """
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(float(sys.argv[3])); times = []
for i in range(int(sys.argv[2])):
    began = time.perf_counter(); s.sendto(b'%d' % i, (sys.argv[1], 9))
    try:
        while s.recv(100) != b'%d' % i: pass
        times.append(1e3 * (time.perf_counter() - began))
    except TimeoutError:
        times.append(-1.0)
print(*times)
"""


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, delay_ms=10) as lab:
        echoes = [
            subprocess.Popen([*lab.on(host), sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
            for host in (2, 3)
        ]
        try:
            for echo in echoes:
                assert echo.stdout is not None and echo.stdout.readline() == "ready\n"
            yield lab
        finally:
            for echo in echoes:
                echo.kill()
                echo.communicate()


def round_trips(lab: Lab, source: int, target: int, count: int = 20, timeout_s: float = 0.5) -> list[float]:
    """In milliseconds; -1 for one that got no answer."""
    command = [*lab.on(source), sys.executable, "-c", ASK, lab.address(target), str(count), str(timeout_s)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [float(word) for word in out.split()]


def test_round_trips_are_true(lab: Lab) -> None:
    assert 20 <= median(round_trips(lab, 1, 2)) < 22
    lab.link(1, 2, both=False, delay_ms=40)
    assert 50 <= median(round_trips(lab, 1, 2)) < 52
    assert 20 <= median(round_trips(lab, 1, 3)) < 22
    lab.link(1, 2, both=False, delay_ms=0, jitter_ms=30)
    times = round_trips(lab, 1, 2)
    assert min(times) >= 10 and max(times) < 45 and max(times) - min(times) > 10


def test_cuts_are_silent_and_have_a_direction(lab: Lab) -> None:
    lab.cut(2)
    assert round_trips(lab, 1, 2, 1, 0.2) == round_trips(lab, 3, 2, 1, 0.2) == [-1]
    assert round_trips(lab, 1, 3, 1)[0] > 0
    lab.heal(2)
    assert round_trips(lab, 1, 2, 1)[0] > 0
    before = lab.dropped
    lab.cut(2, inward=False)
    assert round_trips(lab, 1, 2, 1, 0.2) == [-1] and lab.dropped == before + 1
    lab.heal(2)
    lab.split({1, 3})
    assert round_trips(lab, 1, 2, 1, 0.2) == [-1] and round_trips(lab, 1, 3, 1)[0] > 0
    lab.everywhere(cut=False)
    assert round_trips(lab, 1, 2, 1)[0] > 0


def test_losses_and_rates(lab: Lab) -> None:
    lab.everywhere(delay_ms=0)
    lab.link(1, 2, loss=0.3)
    lost = sum(time < 0 for time in round_trips(lab, 1, 2, 60, 0.03))
    assert 18 <= lost <= 45  # of 60, 51 % expected; the seed is the same every time
    lab.link(1, 2, loss=0.0)
    lab.rate(1, mbit_s=0.01)  # a packet of 30 bytes takes 24 ms
    assert 20 <= median(round_trips(lab, 1, 2, 5)) <= 30


def test_nothing_stays() -> None:
    with Lab(hosts=1) as lab:
        assert lab.prefix in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert lab.prefix not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
