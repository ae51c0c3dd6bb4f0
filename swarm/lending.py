"""A peer's weights for others of its swarm: ranges of the files of its checkpoint, on streams.

A request names a file of the checkpoint and a range of it; with no name the answer lists the files, and how many of
each one's first bytes are needed to open it. Nothing of it is believed by whoever asks (`borrowing.py`): a manifest
says what is right. Only what makes the model is given: no other file, and no tokenizer, which no manifest vouches for.

Request: u32 little-endian length, JSON `Wanted`. Answer: the bytes, as many as were asked for but at most PART_BYTES;
or the stream ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Protocol

import msgspec

from routing.errors import ProtocolError
from routing.types import PeerId
from swarm.checkpoint import Checkpoint
from swarm.p2pd import StreamHandler

PROTOCOL = "swarm.weights.1"
PART_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
LISTING_BYTES = 1 << 20
REQUEST_BYTES = 4096
STALL_S = 20.0  # without a piece going through
MOST_AT_ONCE = 4  # streams; the others wait


class Wanted(msgspec.Struct, frozen=True):
    file: str  # empty: the listing
    start: int
    nbytes: int


class Listed(msgspec.Struct, frozen=True):
    name: str
    nbytes: int
    head: int  # its first bytes: all that opening it takes


class Serves(Protocol):
    async def serve(self, protocol: str, handler: StreamHandler) -> None: ...


async def lend(streams: Serves, checkpoint: Checkpoint) -> None:
    """Answers whoever asks, for as long as `streams` lives."""
    at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def answer(_: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(STALL_S):
            wanted = await _read_request(reader)
        async with at_once:
            if not wanted.file:
                await _send(writer, msgspec.json.encode(listing(checkpoint)))
                return
            paths = {path.name: path for path in checkpoint.heads()}
            if wanted.file not in paths or wanted.start < 0 or wanted.nbytes < 1:
                raise ProtocolError(f"there is no {wanted}")
            end = wanted.start + min(wanted.nbytes, PART_BYTES)
            for start in range(wanted.start, end, PIECE_BYTES):
                size = min(PIECE_BYTES, end - start)
                await _send(writer, await asyncio.to_thread(_read, paths[wanted.file], start, size))

    await streams.serve(PROTOCOL, answer)


def listing(checkpoint: Checkpoint) -> list[Listed]:
    return [Listed(path.name, path.stat().st_size, head) for path, head in checkpoint.heads().items()]


async def _read_request(reader: asyncio.StreamReader) -> Wanted:
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > REQUEST_BYTES:
        raise ProtocolError(f"a request of {size} bytes")
    try:
        return msgspec.json.decode(await reader.readexactly(size), type=Wanted)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a request that is not readable: {error}") from None


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(STALL_S):
        await writer.drain()


def _read(path: Path, start: int, nbytes: int) -> bytes:
    """Fewer where the file ends."""
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        return stream.read(nbytes)
