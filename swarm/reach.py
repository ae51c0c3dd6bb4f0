"""One small request of the control plane: "dial my addresses anew, and tell me what came of it."

Owns its bytes and both sides of it. The request is the stream itself and holds nothing: who asks is authenticated by
the stream, and what is dialled stands in the directory's record that the asker signed, so nobody can be made to dial
others. Does not know when to ask, nor what the answers mean (`routing/reach.py`).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Annotated

import msgspec

from routing.errors import DaemonFailed, JoinError, ProtocolError, SwarmError, TimedOut
from routing.reach import FAILED, NO_WAY, REACHED, REASONS, WRONG_IDENTITY, Answer, Quota, Way, may_dial
from routing.types import PeerId
from swarm.about import ABOUT, ABOUT_LIMIT
from swarm.discovery import Directory
from swarm.handshake import check_certificate, client_context
from swarm.hive import Hive
from swarm.knock import connected, plainly
from swarm.one_shot import asking, read_answer
from swarm.records import MOST_ADDRESSES

log = logging.getLogger(__name__)

PROTOCOL = "swarm.reach.1"
DIAL_S = 5.0
ANSWER_S = 20.0  # reading the directory, the dials side by side, the stream
ASK_S = ANSWER_S + 5.0
_LATER = 3  # instead of a way: asked too often, too many at once, or not in the directory
_LIMIT = 4096


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """`tried`: each address with the number of a reason. Fields behind the last one are skipped."""

    way: Annotated[int, msgspec.Meta(ge=0, le=255)]
    tried: Annotated[tuple[tuple[str, int], ...], msgspec.Meta(max_length=MOST_ADDRESSES)] = ()


async def knock(address: str, peer_id: PeerId, tls: ssl.SSLContext, timeout_s: float = DIAL_S) -> str:
    """REACHED if `peer_id` itself answers at `address`, else why not. A connection of its own, ended before a hello:
    the links that there are stay as they are."""
    try:
        async with asyncio.timeout(timeout_s):
            raw = await connected(address)
            _, writer = await asyncio.open_connection(sock=raw, ssl=tls, server_hostname="")
    except (OSError, ValueError, SwarmError) as error:
        reason = plainly(error)
        return reason if reason in REASONS else FAILED
    try:
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
        check_certificate(certificate, peer_id)
    except ProtocolError:
        return WRONG_IDENTITY
    finally:
        writer.transport.abort()
    return REACHED


class Doorbell:
    """Answers those who want to know whether they can be reached from here."""

    def __init__(self, hive: Hive, directory: Directory, addresses: Sequence[str], quota: Quota | None = None):
        """`addresses`: our own, as announced; they say which kinds of addresses are dialled for others."""
        self._hive, self._directory, self._addresses = hive, directory, tuple(addresses)
        self._quota = quota or Quota()
        self._tls = client_context()

    async def serve(self) -> None:
        """Raises TimedOut, DaemonFailed."""
        await self._hive.serve(PROTOCOL, self._answer)

    async def _answer(self, asker: PeerId, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(ANSWER_S):
            reply = _Reply(_LATER)
            if self._quota.take(asker, asyncio.get_running_loop().time()):
                try:
                    reply = await self._dial(asker)
                finally:
                    self._quota.done()
            data = msgspec.msgpack.encode(reply)
            writer.write(len(data).to_bytes(2, "little") + data)
            await writer.drain()

    async def _dial(self, asker: PeerId) -> _Reply:
        record = next((record for record in await self._directory.refresh() if record.peer_id == asker), None)
        if record is None:
            return _Reply(_LATER)
        reasons = await asyncio.gather(*(self._try(address, asker) for address in record.addresses))
        tried = tuple(zip(record.addresses, map(REASONS.index, reasons), strict=True))
        if REACHED in reasons:
            return _Reply(Way.DIRECT, tried)
        return _Reply(Way.STREAM if await self._by_stream(asker) else Way.NONE, tried)

    async def _try(self, address: str, asker: PeerId) -> str:
        if not may_dial(address, self._addresses):
            return NO_WAY
        return await knock(address, asker, self._tls)

    async def _by_stream(self, asker: PeerId) -> bool:
        """Every peer tells about itself: the smallest thing to fetch from one."""
        try:
            await self._hive.fetch_blob(asker, ABOUT, DIAL_S, ABOUT_LIMIT)
        except (JoinError, TimedOut, ProtocolError, DaemonFailed) as error:
            log.info("%s cannot be reached by stream: %s", asker, error)
            return False
        return True


async def ask(hive: Hive, peer_id: PeerId, timeout_s: float = ASK_S) -> Answer | None:
    """What `peer_id` finds when it dials us; None if it does not want to try now.

    Raises Unreachable, TimedOut, ProtocolError, DaemonFailed.
    """
    what = f"asking {peer_id} to dial"
    async with asking(hive, peer_id, PROTOCOL, timeout_s, what) as (reader, _):
        return decode(await read_answer(reader, 2, _LIMIT, what), peer_id)


def decode(data: bytes, by: PeerId) -> Answer | None:
    """Raises ProtocolError."""
    try:
        reply = msgspec.msgpack.decode(data, type=_Reply)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"an answer of {by} is not readable: {error}") from None
    if reply.way not in set(Way):
        return None
    tried = tuple((address, REASONS[n] if 0 <= n < len(REASONS) else FAILED) for address, n in reply.tried)
    return Answer(by, Way(reply.way), tried)
