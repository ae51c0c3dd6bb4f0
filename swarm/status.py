"""The swarm as someone sees it who knows only a join code: no model files, no session.

Joins with a node of its own, reads the directory, and asks each peer whether it answers. A peer that is in the
directory but does not answer serves nobody here, whatever its record says. Owns the links that it asks over: the next
look uses them again. Decides nothing: what makes a peer slow or full is in `routing/condition.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest

from routing.condition import Judgement, judge
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
EXPIRED_SHOWN_S = 60.0  # who vanished without a goodbye is told for so long after its record has ended

PRESENT = (PeerState.JOINING, PeerState.SERVING, PeerState.DRAINING)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen:
    """A peer's record, and whether it answered: `rtt_s` is None if it did not."""

    record: PeerRecord
    rtt_s: float | None
    judgement: Judgement
    sessions: int | None = None  # of anybody, that are active there, as it said itself just now

    @property
    def serves(self) -> bool:
        return self.record.state is PeerState.SERVING and self.rtt_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`peers`: those that have not said goodbye, by their blocks; also who vanished lately."""

    about: About
    peers: tuple[PeerSeen, ...]
    leaving: tuple[PeerRecord, ...]  # said goodbye lately
    coverage: tuple[int, ...]  # peers that serve each block and answered
    join_code: str = ""  # names peers that answered just now; empty if nobody asked for it

    @property
    def uncovered(self) -> tuple[int, ...]:
        """Blocks that nobody serves."""
        return tuple(block for block, count in enumerate(self.coverage) if count == 0)


@dataclass(frozen=True, slots=True)
class _Answer:
    rtt_s: float | None
    sessions: int | None = None
    why: str = ""  # there is none


class _Asker:
    """A link's owner that only pings."""

    def link_opened(self, link: Link) -> None:
        pass

    def frame_received(self, link: Link, frame: Frame) -> None:
        pass

    def link_lost(self, link: Link, reason: str) -> None:
        pass


async def look(join: JoinCode, *, timeout_s: float = 30.0, progress: Progress = silent) -> Snapshot:
    """The swarm now, with a join code of now. Raises JoinError and its kin, DaemonFailed, TimedOut, ProtocolError."""
    async with Lookout(join, timeout_s=timeout_s, progress=progress) as lookout:
        snapshot = await lookout.look()
        return replace(snapshot, join_code=await lookout.join_code(snapshot))


class Lookout:
    """A place from which the swarm can be looked at again and again: one node, and one link to each peer.

    `async with Lookout(join) as lookout: await lookout.look()`. Entering raises JoinError and its kin, DaemonFailed,
    TimedOut, ProtocolError.
    """

    def __init__(self, join: JoinCode, *, timeout_s: float = 30.0, progress: Progress = silent):
        self._join, self._timeout_s, self._progress = join, timeout_s, progress
        self._stack = AsyncExitStack()
        self._hive: Hive
        self._about: About
        self._directory: Directory
        self._endpoint: Endpoint
        self._known: dict[PeerId, PeerRecord] = {}  # of those that have not said goodbye

    async def __aenter__(self) -> Lookout:
        identity, join = Identity.generate(), self._join
        async with AsyncExitStack() as stack:
            self._hive = await Hive.start(
                identity=identity,
                bootstrap=join.bootstrap,
                host=listen_host(join.bootstrap),
                record_policy=RecordPolicy(join.fingerprint),
                client=True,
            )
            stack.push_async_callback(self._hive.close)
            self._about = await _about_from_any(self._hive, join, self._timeout_s)
            self._directory = Directory(self._hive, identity, join.fingerprint, self._about.n_blocks)
            self._endpoint = Endpoint(identity=identity, role="client", handler=_Asker(), streams=self._hive.daemon)
            await stack.enter_async_context(self._endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def look(self, answer_s: float = ANSWER_S) -> Snapshot:
        """The swarm now; each peer has `answer_s` to answer. Raises TimedOut, DaemonFailed if the directory cannot be
        read."""
        records = await self._directory.refresh()
        now = self._hive.dht_time()
        leaving = tuple(record for record in records if record.state is PeerState.LEAVING)
        present = self._present(records, now)
        able = [record for record in present if record.expires_at >= now and record.state is not PeerState.JOINING]
        answers = await _ask_all(self._endpoint, able, answer_s, self._progress)
        unanswered = {peer_id: answer.why for peer_id, answer in answers.items() if answer.rtt_s is None}
        judged = judge(present, unanswered, now)
        seen = [_seen(record, answers.get(record.peer_id), judged[record.peer_id]) for record in present]
        n_blocks = self._about.n_blocks
        view = apply(View({}, n_blocks), RecordsSeen([peer.record for peer in seen if peer.rtt_s is not None]))
        return Snapshot(
            about=self._about,
            peers=tuple(sorted(seen, key=lambda peer: (peer.record.span, peer.record.peer_id))),
            leaving=leaving,
            coverage=tuple(view.coverage(0.0)),
        )

    async def join_code(self, snapshot: Snapshot) -> str:
        """A code that names peers that answered in `snapshot`."""
        answered = [peer.record.peer_id for peer in snapshot.peers if peer.rtt_s is not None]
        bootstrap = await _bootstrap(self._hive, self._join, answered)
        return replace(self._join, bootstrap=bootstrap).encode()

    def _present(self, records: Sequence[PeerRecord], now: float) -> list[PeerRecord]:
        """Those of the directory, and those that it gave earlier and that have not said goodbye: a record that one
        read misses still counts until it ends."""
        for record in records:
            if record.state in PRESENT:
                self._known[record.peer_id] = record
            else:
                self._known.pop(record.peer_id, None)
        for peer_id in [peer_id for peer_id, known in self._known.items() if known.expires_at + EXPIRED_SHOWN_S < now]:
            del self._known[peer_id]
        return list(self._known.values())


def _seen(record: PeerRecord, answer: _Answer | None, judgement: Judgement) -> PeerSeen:
    answer = answer or _Answer(None)  # nobody asks a peer that still loads, or whose record has ended
    return PeerSeen(record=record, rtt_s=answer.rtt_s, sessions=answer.sessions, judgement=judgement)


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
    endpoint: Endpoint, records: Sequence[PeerRecord], answer_s: float, progress: Progress
) -> dict[PeerId, _Answer]:
    limit = asyncio.Semaphore(ASKED_AT_ONCE)
    done = 0

    async def ask(record: PeerRecord) -> _Answer:
        nonlocal done
        async with limit:
            try:
                return await _ask(endpoint, record, answer_s)
            finally:
                done += 1
                progress("asking peers", done, len(records))

    answers = await asyncio.gather(*map(ask, records))
    return {record.peer_id: answer for record, answer in zip(records, answers, strict=True)}


async def _ask(endpoint: Endpoint, record: PeerRecord, answer_s: float) -> _Answer:
    try:
        link = await endpoint.connect(record.peer_id, record.addresses, answer_s)
    except Unreachable as error:
        log.info("%s", error)
        return _Answer(None, why=error.why or str(error))
    try:
        rtt_s = await link.ping(answer_s)
    except TimedOut as error:
        log.info("%s does not answer: %s", record.peer_id, error)
        link.lose("it did not answer a ping")  # the next look dials anew
        return _Answer(None, why=f"timed out, connected but nothing came within {answer_s:g} s")
    return _Answer(rtt_s, sessions=link.sessions)


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
