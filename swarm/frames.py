"""The frames of the session rule as typed values: what the sans-IO objects speak. `wire.py` turns them into bytes.

A tensor frame (STEP, FILL, RESULT) carries the names of its positions, a note and rows. A control frame carries a
body, which is one of the structs below. The whole protocol is in `docs/wire.md`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec

NAME_BYTES = 8
SESSION_BYTES = 16
SWARM_BYTES = 4  # of them: which swarm's it is
NO_SESSION = bytes(SESSION_BYTES)
ALWAYS = 2**32 - 1  # the end of a GAP that asks for all that will ever be there


def new_session(swarm_id: bytes) -> bytes:
    """The id of a new session. It begins as its swarm's does: a peer that serves several models knows from every frame
    whose it is."""
    return swarm_id[:SWARM_BYTES] + secrets.token_bytes(SESSION_BYTES - SWARM_BYTES)


class FrameType(IntEnum):
    OPEN = 1
    OPENED = 2
    STALE = 3
    BUSY = 4
    ERROR = 5
    STEP = 6
    GAP = 7
    FILL = 8
    ACK = 9
    RESULT = 10
    LOST = 11
    UNKNOWN = 12
    CLOSE = 13
    PING = 14
    PONG = 15
    PAGES = 16
    PULL = 17
    LEAVING = 18


TENSOR_FRAMES = frozenset({FrameType.STEP, FrameType.FILL, FrameType.RESULT})


class Codec(IntEnum):
    NONE = 0  # control frames
    FP32 = 1  # the greater the number, the more is lost
    BF16 = 2
    INT8 = 3


class HopTiming(msgspec.Struct, array_like=True, frozen=True):
    """One hop's share of a step, in microseconds."""

    queue_us: int = 0
    compute_us: int = 0
    rtt_next_us: int = 0  # measured round trip to the next hop; 0: not known
    next_bytes_s: int = 0  # bytes a second of late to the next hop; 0: not known


class StepNote(msgspec.Struct, array_like=True, frozen=True):
    """The preamble of a tensor frame."""

    want: int = 0  # first position whose output the client samples
    timings: tuple[HopTiming, ...] = ()


class OpenHop(msgspec.Struct, array_like=True, frozen=True):
    peer_id: str
    addresses: tuple[str, ...]
    entry: int
    exit: int
    keep_to: int  # content of this seat beyond this position is not to be trusted
    fresh: bool = False  # it begins with nothing, and the hop before sends what is wanted without being asked
    ready: tuple[tuple[str, tuple[str, ...]], ...] = ()  # be connected with: a neighbour's spares
    lazy: bool = False  # a standby that keeps what it is sent, and computes it only when it is called
    pulls: bool = False  # a standby that may take what its hop holds from that hop itself
    codec: int = Codec.FP32  # of all rows that it sends


class Open(msgspec.Struct, array_like=True, frozen=True):
    nonce: bytes  # of the driver: two drivers at one epoch are told apart
    route: tuple[OpenHop, ...]
    names: bytes  # D[0..n] of the whole sequence, 8 bytes each
    need_end: int  # positions wanted filled now
    codec: int = Codec.FP32  # of all rows that the client sends
    numeric_class: int = 0  # the greatest codec that anything of the session went through
    context: int = 0  # the most positions this session will hold; 0: not stated
    adopts: bool = True  # seats may begin with what other sessions of the client hold or left
    standby: tuple[OpenHop, ...] = ()  # numbered after the route's hops; each has the boundaries of one of those


class Opened(msgspec.Struct, array_like=True, frozen=True):
    positions: tuple[tuple[int, int], ...]  # (hop, position kept) for each seat of the sender


class Stale(msgspec.Struct, array_like=True, frozen=True):
    epoch: int
    nonce: bytes


class Busy(msgspec.Struct, array_like=True, frozen=True):
    retry_after_ms: int


class Problem(msgspec.Struct, array_like=True, frozen=True):
    """Body of ERROR. `kind` is a stable word; `edge` the (from, to) peer ids of a non-finite input."""

    kind: str
    message: str
    edge: tuple[str, ...] = ()


class Lost(msgspec.Struct, array_like=True, frozen=True):
    source: str
    target: str
    reason: str = ""


class Pages(msgspec.Struct, array_like=True, frozen=True):
    """Keys, values and outputs of positions: `data` as the holder keeps it, in `dtype`, and what it hashes to; no data:
    it has not got them. `name` is D[end]."""

    dtype: str = ""
    data: bytes = b""
    digest: bytes = b""
    name: bytes = b""


class Ping(msgspec.Struct, array_like=True, frozen=True):
    number: int


class Pong(msgspec.Struct, array_like=True, frozen=True):
    number: int  # of the PING
    sessions: int = 0  # of anybody, that are active where the answer comes from
    place: tuple[float, ...] = ()  # its network coordinate: three axes, height, error, seconds


BODIES: dict[FrameType, type | None] = {
    FrameType.OPEN: Open,
    FrameType.OPENED: Opened,
    FrameType.STALE: Stale,
    FrameType.BUSY: Busy,
    FrameType.ERROR: Problem,
    FrameType.GAP: None,
    FrameType.ACK: None,
    FrameType.LOST: Lost,
    FrameType.UNKNOWN: None,
    FrameType.CLOSE: None,
    FrameType.PING: Ping,
    FrameType.PONG: Pong,
    FrameType.PAGES: Pages,
    FrameType.PULL: None,
    FrameType.LEAVING: None,
}


@dataclass(slots=True, kw_only=True)
class Frame:
    """One frame. `hop` is the route index of the receiver (STEP, FILL), the asker (GAP), or the sender (RESULT, LOST).

    `rows` is bytes-like in `codec` when it comes off the wire, shape [end - start, hidden] (for RESULT
    [end - max(start, want), hidden]); a sender may put any object there that its transport knows how to encode.
    """

    type: FrameType
    session: bytes = NO_SESSION
    epoch: int = 0
    hop: int = 0
    start: int = 0
    end: int = 0
    codec: Codec = Codec.NONE
    names: bytes = b""
    note: StepNote = field(default_factory=StepNote)
    rows: Any = b""
    body: Any = None
