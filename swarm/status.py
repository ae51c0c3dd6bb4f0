"""The swarm as someone sees it who knows only a join code: no model files, no session.

Joins with a node of its own, reads the directory, and asks each peer whether it answers. A peer that is in the
directory but does not answer serves nobody here, whatever its record says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import zip_longest

from routing.errors import DaemonFailed, JoinError, ProtocolError, TimedOut, Unreachable
from routing.types import PeerId, PeerRecord, PeerState
from routing.view import RecordsSeen, View, apply
from swarm.about import ABOUT, ABOUT_LIMIT, About
from swarm.client import listen_host
from swarm.discovery import Directory
from swarm.frames import Frame
from swarm.hive import Hive
from swarm.identity import Identity
from swarm.joincode import JoinCode
from swarm.link import Link
from swarm.progress import Progress, silent
from swarm.records import RecordPolicy
from swarm.transport import Endpoint

log = logging.getLogger(__name__)

ANSWER_S = 4.0
ASKED_AT_ONCE = 16
MOST_BOOTSTRAP = 4  # addresses in a join code: it has to stay short enough to be sent around

PRESENT = (PeerState.JOINING, PeerState.SERVING, PeerState.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """A peer's record, and whether it answered: `rtt_s` is None if it did not."""

    record: PeerRecord
    rtt_s: float | None

    @property
    def serves(self) -> bool:
        return self.record.state is PeerState.SERVING and self.rtt_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`peers`: those that have not left, by their blocks. `join_code` names peers that answered just now."""

    about: About
    peers: tuple[PeerSeen, ...]
    leaving: tuple[PeerRecord, ...]  # said goodbye lately
    coverage: tuple[int, ...]  # peers that serve each block and answered
    join_code: str

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Blocks that nobody serves."""
        return tuple(block for block, count in enumerate(self.coverage) if count == 0)


class _Asker:
    """A link's owner that only pings."""

    def link_opened(self, link: Link) -> None:
        pass

    def frame_received(self, link: Link, frame: Frame) -> None:
        pass

    def link_lost(self, link: Link, reason: str) -> None:
        pass


async def look(join: JoinCode, *, timeout_s: float = 30.0, progress: Progress = silent) -> Snapshot:
    """The swarm now. Raises JoinError and its kin, DaemonFailed, TimedOut, ProtocolError."""
    identity = Identity.generate()
    async with AsyncExitStack() as stack:
        hive = await Hive.start(
            identity=identity,
            bootstrap=join.bootstrap,
            host=listen_host(join.bootstrap),
            record_policy=RecordPolicy(join.fingerprint),
            client=True,
        )
        stack.push_async_callback(hive.close)
        about = await _about_from_any(hive, join, timeout_s)
        records = await Directory(hive, identity, join.fingerprint, about.n_blocks).refresh()
        present = [record for record in records if record.state in PRESENT]
        endpoint = Endpoint(identity=identity, role="client", handler=_Asker(), streams=hive)
        await stack.enter_async_context(endpoint)
        rtts = await _ask_all(endpoint, present, progress)
        answered = [record.peer_id for record in present if rtts[record.peer_id] is not None]
        bootstrap = await _bootstrap(hive, join, answered)
    seen = [PeerSeen(record=record, rtt_s=rtts[record.peer_id]) for record in present]
    view = apply(View({}, about.n_blocks), RecordsSeen([peer.record for peer in seen if peer.rtt_s is not None]))
    return Snapshot(
        about=about,
        peers=tuple(sorted(seen, key=lambda peer: (peer.record.span, peer.record.peer_id))),
        leaving=tuple(record for record in records if record.state is PeerState.LEAVING),
        coverage=tuple(view.coverage(0.0)),
        join_code=JoinCode(
            bootstrap=bootstrap, fingerprint=join.fingerprint, swarm_key=join.swarm_key, invite=join.invite
        ).encode(),
    )


async def _about_from_any(hive: Hive, join: JoinCode, timeout_s: float) -> About:
    """What the first peer of the join code that answers says."""
    problem: Exception = Unreachable("the join code names no peer")
    for address in join.bootstrap:
        try:
            return await _about(hive, address.rpartition("/p2p/")[2], timeout_s)
        except (JoinError, TimedOut, ProtocolError) as error:
            problem = error
    raise problem


async def _about(hive: Hive, peer_id: PeerId, timeout_s: float) -> About:
    return About.from_bytes(await hive.fetch_blob(peer_id, ABOUT, timeout_s, ABOUT_LIMIT))


async def _ask_all(
    endpoint: Endpoint, records: Sequence[PeerRecord], progress: Progress
) -> dict[PeerId, float | None]:
    """Round trips in seconds; None of peers that did not answer."""
    limit = asyncio.Semaphore(ASKED_AT_ONCE)
    done = 0

    async def ask(record: PeerRecord) -> float | None:
        nonlocal done
        async with limit:
            try:
                link = await endpoint.connect(record.peer_id, record.addresses, ANSWER_S)
                return await link.ping(ANSWER_S)
            except (Unreachable, TimedOut) as error:
                log.info("%s does not answer: %s", record.peer_id, error)
                return None
            finally:
                done += 1
                progress("asking peers", done, len(records))

    answers = await asyncio.gather(*map(ask, records))
    return {record.peer_id: answer for record, answer in zip(records, answers, strict=True)}


async def _bootstrap(hive: Hive, join: JoinCode, answered: Sequence[PeerId]) -> tuple[str, ...]:
    """Addresses for a join code that survives the loss of a peer: of several that are there now. Those that the
    code had and that answer come first."""
    named = {address.rpartition("/p2p/")[2] for address in join.bootstrap}
    ordered = sorted(answered, key=lambda peer_id: peer_id not in named)[:MOST_BOOTSTRAP]

    async def ask(peer_id: PeerId) -> list[str]:
        try:
            about = await _about(hive, peer_id, ANSWER_S)
        except (JoinError, TimedOut, ProtocolError, DaemonFailed) as error:
            log.info("%s does not tell its addresses: %s", peer_id, error)
            return []
        own = [address for address in about.bootstrap if address.endswith(f"/p2p/{peer_id}")]
        return sorted(own, key=_is_loopback)

    found = await asyncio.gather(*map(ask, ordered))
    # Of each peer its first address, then of each its second, as far as there is room.
    turns = [address for turn in zip_longest(*found) for address in turn if address is not None]
    return tuple(turns[:MOST_BOOTSTRAP]) or join.bootstrap


def _is_loopback(address: str) -> bool:
    return address.startswith(("/ip4/127.", "/ip6/::1/"))
