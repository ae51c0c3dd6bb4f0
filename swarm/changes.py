"""One small request of the control plane: "which records of these blocks came to you since I asked last?"

Owns its bytes and both sides of it. Each node of the DHT answers from the records that it has verified, those that it
stores for others among them. They are signed, so whoever answers can withhold but not forge. Does not know whom to
ask (`swarm/sources.py` does), nor what the records are good for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Annotated

import msgspec

from routing.errors import ProtocolError
from routing.types import PeerId
from swarm.hive import Hive
from swarm.one_shot import asking, read_answer
from swarm.records import MOST_BLOCKS, block_key

PROTOCOL = "swarm.changes.1"
SERVE_S = 60.0  # whoever reads slowly must not hold an answer for ever
_QUESTION_BYTES = 8192
_ANSWER_BYTES = 16 * 1024 * 1024

_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Question(msgspec.Struct, array_like=True, frozen=True):
    """`since`: (block, the version of that answer from which the asker has all). Fields behind are skipped."""

    run: Annotated[bytes, msgspec.Meta(max_length=16)]
    since: Annotated[tuple[tuple[int, _Version], ...], msgspec.Meta(max_length=MOST_BLOCKS)]


class Changes(msgspec.Struct, array_like=True, frozen=True):
    """`records`: (block, peer id, signed bytes), as they were stored under that block. Fields behind are skipped."""

    run: Annotated[bytes, msgspec.Meta(max_length=16)]  # versions of another run of the node mean nothing
    version: _Version
    records: tuple[tuple[int, PeerId, bytes], ...]


async def serve_changes(hive: Hive) -> None:
    """Answer whoever asks `hive`. Raises TimedOut, DaemonFailed."""
    run = secrets.token_bytes(8)

    async def answer(_: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(SERVE_S):
            size = int.from_bytes(await reader.readexactly(2), "little")
            if size > _QUESTION_BYTES:
                raise ProtocolError(f"a question of {size} bytes; at most {_QUESTION_BYTES} are taken")
            data = msgspec.msgpack.encode(_changes(hive, run, await reader.readexactly(size)))
            writer.write(len(data).to_bytes(4, "little") + data)
            await writer.drain()

    await hive.serve(PROTOCOL, answer)


def _changes(hive: Hive, run: bytes, question: bytes) -> Changes:
    try:
        asked = msgspec.msgpack.decode(question, type=_Question)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a question for changes is not readable: {error}") from None
    policy, now = hive.record_policy, hive.dht_time()
    since = {block: version if asked.run == run else 0 for block, version in asked.since}
    return Changes(
        run=run,
        version=policy.version,
        records=tuple(
            (block, peer_id, data)
            for block, version in since.items()
            if (key := block_key(policy.swarm_id, block)) in policy
            for peer_id, data in policy.changes(key, version, now)
        ),
    )


async def ask_changes(
    hive: Hive, peer_id: PeerId, run: bytes, since: Mapping[int, int], timeout_s: float
) -> Changes:
    """What came to `peer_id` for the blocks of `since` after those versions of its `run`; unchecked.

    Raises Unreachable, TimedOut, ProtocolError, DaemonFailed.
    """
    what = f"asking {peer_id} for changes"
    question = msgspec.msgpack.encode(_Question(run, tuple(since.items())))
    async with asking(hive, peer_id, PROTOCOL, timeout_s, what) as (reader, writer):
        writer.write(len(question).to_bytes(2, "little") + question)
        answer = await read_answer(reader, 4, _ANSWER_BYTES, what)
    try:
        return msgspec.msgpack.decode(answer, type=Changes)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"{what}: the answer is not readable: {error}") from None
