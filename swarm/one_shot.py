"""A stream for one question and one answer, whose length stands before it, with one deadline over all.

Owns the deadline and what a broken stream is called. Does not know what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from routing.errors import ProtocolError, TimedOut, Unreachable
from routing.types import PeerId
from swarm.channel import StreamCarrier


@asynccontextmanager
async def asking(
    carrier: StreamCarrier, peer_id: PeerId, protocol: str, timeout_s: float, what: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Both ends of the stream; `what` begins the text of errors. Raises Unreachable, TimedOut, DaemonFailed."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await carrier.open(peer_id, protocol, timeout_s)
            try:
                yield reader, writer
            finally:
                writer.close()
    except TimeoutError:
        raise TimedOut(f"{what}: no answer within {timeout_s:g} s") from None
    except (ConnectionError, EOFError) as error:
        raise Unreachable(f"{what}: the stream broke off") from error


async def read_answer(reader: asyncio.StreamReader, length_bytes: int, most: int, what: str) -> bytes:
    """The answer, of `most` bytes at most. Raises ProtocolError."""
    size = int.from_bytes(await reader.readexactly(length_bytes), "little")
    if size > most:
        raise ProtocolError(f"{what}: an answer of {size} bytes; at most {most} are taken")
    return await reader.readexactly(size)
