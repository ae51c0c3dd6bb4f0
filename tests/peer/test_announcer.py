"""When a record is renewed, on virtual time."""

from __future__ import annotations

import asyncio
from statistics import stdev

import pytest

from peer import announcer as module
from peer.announcer import RETRY_SHARE, Announcer
from routing.errors import Unreachable
from routing.types import PeerRecord, Span
from swarm.discovery import LIFETIME_S

RENEW_S = 15.0


class Renewed:
    """A directory that notes when it was told, and ends the test after `most` times."""

    def __init__(self, now: list[float], most: int, fails: frozenset[int] = frozenset()):
        self.times: list[float] = []
        self._now, self._most, self._fails = now, most, fails

    async def announce(self, record: PeerRecord) -> PeerRecord:
        self.times.append(self._now[0])
        if len(self.times) == self._most:
            raise asyncio.CancelledError
        if len(self.times) in self._fails:
            raise Unreachable("no node took it")
        return record


async def pauses(patch: pytest.MonkeyPatch, most: int, fails: frozenset[int] = frozenset()) -> list[float]:
    """Between renewals."""
    now = [0.0]
    directory = Renewed(now, most, fails)

    class Passes:
        """`asyncio.timeout` whose time is over at once."""

        def __init__(self, seconds: float):
            now[0] += seconds

        async def __aenter__(self) -> None:
            raise TimeoutError

        async def __aexit__(self, *_: object) -> None: ...

    patch.setattr(module.asyncio, "timeout", Passes)
    record = PeerRecord(peer_id="a", span=Span(0, 1))
    with pytest.raises(asyncio.CancelledError):
        await Announcer(directory, lambda: record, RENEW_S).run()  # type: ignore[arg-type]
    patch.undo()
    return [after - before for before, after in zip([0.0, *directory.times], directory.times, strict=False)]


async def test_renewals_are_jittered_and_a_record_outlives_the_longest_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await pauses(monkeypatch, 200)
    assert min(found) >= 0.8 * RENEW_S and max(found) <= 1.2 * RENEW_S < LIFETIME_S - 10
    assert stdev(found) > 0.08 * RENEW_S


async def test_a_renewal_that_failed_is_tried_again_while_the_record_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    first, retried, after = await pauses(monkeypatch, 3, fails=frozenset({1}))
    assert retried <= 1.2 * RETRY_SHARE * RENEW_S
    assert first + retried < LIFETIME_S
    assert after >= 0.8 * RENEW_S
