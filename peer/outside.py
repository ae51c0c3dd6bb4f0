"""Learns from other peers whether they can connect to this one, and tells its owner when that is news.

Owns when to ask. Whom, and what the answers mean, is in `routing/reach.py`; the request in `swarm/reach.py`. Nothing
waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence

from routing.errors import SwarmError
from routing.reach import ASK_EVERY_S, Answer, Notice, Reachability, askable, choose
from routing.types import PeerId
from swarm.discovery import Directory
from swarm.hive import Hive
from swarm.reach import ask

log = logging.getLogger(__name__)

EVERY_S = 300.0
SOON_S = 1.5 * ASK_EVERY_S  # while nothing is known: those asked already answer again by then
JITTER = (0.8, 1.2)  # peers that started together do not ask together


class Outside:
    def __init__(
        self,
        hive: Hive,
        directory: Directory,
        addresses: Sequence[str],
        tell: Callable[[Notice], None],
        chance: random.Random | None = None,
    ):
        """`addresses`: those that this peer announces. Without any it is reached by streams alone, and asks nobody."""
        self._hive, self._directory, self._addresses, self._tell = hive, directory, tuple(addresses), tell
        self._chance = chance or random.Random()
        self._known = Reachability(self._addresses)

    async def run(self) -> None:
        """For ever; the first time at once."""
        while True:
            if self._addresses:
                try:
                    await self.look()
                except SwarmError as error:  # whatever it is: a peer must not end for this
                    log.info("nobody could be asked whether this peer can be reached: %s", error)
            pause_s = SOON_S if self._known.reachable is None else EVERY_S
            await asyncio.sleep(pause_s * self._chance.uniform(*JITTER))

    async def look(self) -> None:
        """Ask a few others now. Raises SwarmError if the directory cannot be read."""
        candidates = askable(await self._directory.refresh(), self._hive.peer_id, self._addresses)
        asked = await asyncio.gather(*map(self._ask, choose(candidates, self._chance)))
        notice = self._known.hear([answer for answer in asked if answer is not None], len(candidates))
        if notice is not None:
            self._tell(notice)

    async def _ask(self, peer_id: PeerId) -> Answer | None:
        try:
            return await ask(self._hive, peer_id)
        except SwarmError as error:
            log.info("%s does not tell whether this peer can be reached: %s", peer_id, error)
            return None
