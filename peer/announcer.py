"""Keeps a peer's record in the DHT true and alive: joining, serving, leaving; renewed before it expires."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from routing.errors import DaemonFailed, SwarmError, TimedOut, Unreachable
from routing.types import PeerRecord
from swarm.discovery import Directory

log = logging.getLogger(__name__)

RETRY_SHARE = 0.2  # of the time between renewals; a record lives for two of them, so a failed one is soon tried again


class Announcer:
    def __init__(self, directory: Directory, record: Callable[[], PeerRecord], renew_s: float):
        """`record` describes the peer as it is at the moment."""
        self._directory, self._record, self._renew_s = directory, record, renew_s
        self._soon = asyncio.Event()
        self.announced: PeerRecord | None = None  # the newest, as it is stored
        self.failures = 0  # renewals that came to nothing

    async def announce(self) -> PeerRecord:
        """Raises Unreachable, TimedOut, DaemonFailed."""
        self.announced = await self._directory.announce(self._record())
        return self.announced

    def renew_soon(self) -> None:
        """Something worth telling has changed."""
        self._soon.set()

    async def run(self) -> None:
        """Renews for ever, at times with jitter so that peers that started together do not renew together."""
        pause_s = self._renew_s
        while True:
            try:
                async with asyncio.timeout(pause_s * random.uniform(0.8, 1.2)):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                await self.announce()
                pause_s = self._renew_s
            except (Unreachable, TimedOut, DaemonFailed) as error:
                self.failures += 1
                pause_s = self._renew_s * RETRY_SHARE
                log.warning("the record could not be renewed: %s", error)

    async def leave(self, timeout_s: float = 3.0) -> None:
        """Says goodbye, if it can be done quickly."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._directory.leave()
        except (SwarmError, TimeoutError) as error:
            log.info("could not say goodbye in the DHT: %s", error)
