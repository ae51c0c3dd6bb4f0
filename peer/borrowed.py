"""The model of a peer whose disk lacks it, from the peers of its swarm; what came stays on disk for the next start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import AsyncExitStack

from routing.errors import JoinError, ModelNotFound, ProtocolError, TimedOut
from routing.types import PeerId, PeerRecord, PeerState, Span
from swarm.borrowing import Borrower, in_use, make_room, models_dir
from swarm.checkpoint import Checkpoint, default_cache_dir
from swarm.families import Family
from swarm.hive import Hive
from swarm.joincode import JoinCode
from swarm.manifest import Manifest
from swarm.progress import Progress

UNHELPFUL = (JoinError, ProtocolError, TimedOut)


class Borrowed:
    def __init__(self, hive: Hive, join: JoinCode, manifest: Manifest, why: ModelNotFound, most_bytes: int):
        """`why` the model is not here: told with what becomes of this, if that is nothing. `most_bytes`: that models
        which came so take on the disk, but for those in use."""
        self._me, self._join, self._why, self._most_bytes = hive.peer_id, join, why, most_bytes
        self._cache = default_cache_dir()
        self._folder = models_dir(self._cache) / join.fingerprint.hex()
        self._borrower = Borrower(hive, manifest, self._folder)

    async def open_model(self, stack: AsyncExitStack) -> Checkpoint:
        """What the model is, from a peer that the join code names. It is in use until `stack` ends."""
        stack.enter_context(in_use(self._folder))
        await asyncio.to_thread(make_room, models_dir(self._cache), self._most_bytes)
        peers = [address.rsplit("/p2p/", 1)[1] for address in self._join.bootstrap]
        random.shuffle(peers)  # one that lies is not always the first
        try:
            return await self._borrower.open_model(peers, self._cache)
        except UNHELPFUL as error:
            raise self._nothing(error) from error

    async def fetch(
        self, checkpoint: Checkpoint, family: Family, span: Span, records: Iterable[PeerRecord], progress: Progress
    ) -> None:
        """The weights of `span`, each block's from peers that serve it. Raises ModelNotFound, DamagedWeights (all of
        them gave others than the swarm's), StartError (no room on the disk)."""
        serving = [record for record in records if record.state is PeerState.SERVING and record.peer_id != self._me]
        names = checkpoint.tensor_names()
        lenders: dict[str, list[PeerId]] = {}
        for block in range(span.start, span.end):
            peers = [record.peer_id for record in serving if record.span.start <= block < record.span.end]
            turn = block % len(peers) if peers else 0  # all of them lend
            lenders |= dict.fromkeys(family.block_tensors(checkpoint.config, block, names), peers[turn:] + peers[:turn])
        try:
            await self._borrower.fetch(checkpoint, lenders, progress)
        except UNHELPFUL as error:
            raise self._nothing(error) from error

    def _nothing(self, error: Exception) -> ModelNotFound:
        return ModelNotFound(
            f"{self._why}; nor is it to be had from the swarm: {error}",
            advice="Give the model's directory, or try again when a peer serves the blocks that are to be served here.",
        )
