"""What a link learns of its bandwidth from bulk, and does not learn from less."""

from __future__ import annotations

import pytest

from swarm.throughput import BELIEVED_S, Throughput

BUFFER = 48 * 1024


def send(link: Throughput, nbytes: int, rate: float, begin: float, room: int = 64 * 1024) -> float:
    """As a link does: fills the channel, waits until a quarter is left, fills it again; returns when it was empty."""
    now, inside = begin, 0
    while nbytes or inside > room // 4:
        taken = min(nbytes, room - inside)
        link.wrote(taken)
        nbytes, inside = nbytes - taken, inside + taken
        if inside < room:
            break
        link.paused(now)
        now, inside = now + (inside - room // 4) / rate, room // 4
        link.resumed(now)
    link.emptied()
    return now


@pytest.mark.parametrize("rate", [1.25e6, 1e8])
def test_bulk_tells_the_rate(rate: float) -> None:
    link = Throughput(BUFFER)
    end = send(link, 2_000_000, rate, 5.0)
    assert link.bytes_per_s(end) == pytest.approx(rate, rel=0.02)
    assert link.bytes_per_s(end + BELIEVED_S + 1) == 0, "that was too long ago"


def test_little_tells_nothing() -> None:
    link = Throughput(BUFFER)
    now = 0.0
    for _ in range(1000):
        now = send(link, 2304, 1e6, now + 0.02)
    end = send(link, 80_000, 1e6, now)
    assert end > now and link.bytes_per_s(end) == 0


def test_a_link_that_became_slow_is_believed_soon_and_idle_time_counts_for_nothing() -> None:
    link = Throughput(BUFFER)
    now = send(link, 1_000_000, 1e7, 0.0)
    for _ in range(4):
        now = send(link, 1_000_000, 1e6, now + 3.0)
    assert link.bytes_per_s(now) == pytest.approx(1e6 + 9e6 / 16, rel=0.02)
