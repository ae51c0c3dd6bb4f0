"""Frames to bytes and back: the header, the bodies, and what is refused. `docs/wire.md` has the byte layout.

Owns the layout of one frame and its limits. Knows nothing of fragments' order, connections or sockets: bytes
in, a `Frame` or a `ProtocolError` out. Parsed data never holds on to the buffer that it was parsed from.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from routing.errors import BadInput, ProtocolError
from swarm.frames import (
    BODIES,
    NAME_BYTES,
    SESSION_BYTES,
    TENSOR_FRAMES,
    Busy,
    Codec,
    Frame,
    FrameType,
    Lost,
    Open,
    Opened,
    Pages,
    Ping,
    Pong,
    Problem,
    Stale,
    StepNote,
)

VERSION = 1
MORE = 1  # flag: further parts of this body follow under the same header
MOST_PLACE = 16  # numbers of a coordinate: a later version may have more
HEADER_BYTES = 36
MAX_FRAGMENT = 64 * 1024  # the most bytes of body behind one header; what every receiver accepts
ITEM_BYTES = {Codec.FP32: 4, Codec.BF16: 2, Codec.INT8: 1}  # a row is a multiple of it

_HEADER = struct.Struct("<4B16s4I")
_LENGTH = struct.Struct("<I")
_U32 = 2**32
_TYPES = {int(kind): kind for kind in BODIES} | {int(kind): kind for kind in TENSOR_FRAMES}
_CODECS = {int(codec): codec for codec in Codec}
_RANGES = TENSOR_FRAMES | {FrameType.GAP, FrameType.PULL, FrameType.PAGES}  # in an ACK, start is a number of positions
_PADDING = [bytes(-size % 8) for size in range(8)]
_encode = msgspec.msgpack.Encoder().encode
_decode_note = msgspec.msgpack.Decoder(StepNote).decode
_DECODERS: dict[FrameType, Callable[[Any], Any]] = {
    kind: msgspec.msgpack.Decoder(body).decode for kind, body in BODIES.items() if body is not None
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a connection sends at most, and refuses beyond. `fragment_bytes` may be lowered, not raised."""

    tensor_bytes: int = 64 * 1024 * 1024  # the body of a tensor frame
    control_bytes: int = 1024 * 1024  # the body of a control frame
    positions: int = 4096  # of a tensor frame
    hops: int = 256  # of a route
    fragment_bytes: int = MAX_FRAGMENT
    unfinished_frames: int = 64  # bodies under way in parts, at once
    unfinished_bytes: int = 128 * 1024 * 1024  # and the sum of their bytes

    def __post_init__(self) -> None:
        if not 0 < self.fragment_bytes <= MAX_FRAGMENT:
            raise BadInput(f"a fragment holds 1 to {MAX_FRAGMENT} bytes, not {self.fragment_bytes}")
        if not 0 < self.hops <= 256:
            raise BadInput(f"a route has 1 to 256 hops, not {self.hops}")
        if self.unfinished_frames < 1 or self.unfinished_bytes < max(self.tensor_bytes, self.control_bytes):
            raise BadInput("one frame of the largest size must fit among the unfinished ones")

    def body_bytes(self, kind: FrameType) -> int:
        return self.tensor_bytes if kind in TENSOR_FRAMES else self.control_bytes


class Header(NamedTuple):
    """All of a header but its flag and length: the same for every part of one body."""

    type: FrameType
    hop: int
    codec: Codec
    session: bytes
    epoch: int
    start: int
    end: int


def pack_header(frame: Frame, length: int, more: bool) -> bytes:
    """36 bytes. Raises BadInput if a field does not fit."""
    kind, hop, codec, session = frame.type, frame.hop, frame.codec, frame.session
    try:
        return _HEADER.pack(kind, more, hop, codec, session, frame.epoch, frame.start, frame.end, length)
    except struct.error as error:
        raise BadInput(f"a {frame.type.name} frame does not fit its header: {error}") from error


def parse_header(data: Any, offset: int, limits: Limits) -> tuple[Header, int, bool]:
    """(header, length of this part, more to come) of the 36 bytes at `offset`. Raises ProtocolError."""
    raw_type, flags, hop, raw_codec, session, epoch, start, end, length = _HEADER.unpack_from(data, offset)
    kind = _TYPES.get(raw_type)
    if kind is None:
        raise ProtocolError(f"frame type {raw_type} is not known in version {VERSION}")
    if flags & ~MORE:
        raise ProtocolError(f"a {kind.name} frame has unknown flags {flags:#04x}")
    if length > MAX_FRAGMENT:
        raise ProtocolError(f"a part of a {kind.name} frame has {length} bytes; at most {MAX_FRAGMENT} are allowed")
    if flags and not length:
        raise ProtocolError(f"a part of a {kind.name} frame is empty though more is to come")
    codec = _CODECS.get(raw_codec)
    if codec is None:
        raise ProtocolError(f"codec {raw_codec} is not known in version {VERSION}")
    if start > end and kind in _RANGES:
        raise ProtocolError(f"a {kind.name} frame names the positions {start} to {end}")
    if kind in TENSOR_FRAMES:
        if end - start > limits.positions:
            raise ProtocolError(
                f"a {kind.name} frame has {end - start} positions; at most {limits.positions} are allowed"
            )
        if start == end and kind is not FrameType.RESULT:
            raise ProtocolError(f"a {kind.name} frame has no position")
    elif raw_codec:
        raise ProtocolError(f"a {kind.name} frame has no rows, but names a codec")
    return Header(kind, hop, codec, session, epoch, start, end), length, bool(flags)


def encode_body(frame: Frame, limits: Limits) -> tuple[bytes, Any]:
    """The body as two buffers: what stands before the rows, and the rows (not copied; do not change them).

    Raises BadInput if the frame breaks the layout or a limit.
    """
    kind = frame.type
    if len(frame.session) != SESSION_BYTES:
        raise BadInput(f"a session has {SESSION_BYTES} bytes, not {len(frame.session)}")
    if kind in TENSOR_FRAMES:
        head, rows = _encode_tensor(frame, limits)
    else:
        head, rows = _encode_control(frame, limits), b""
    size, limit = len(head) + len(rows), limits.body_bytes(kind)
    if size > limit:
        raise BadInput(f"a {kind.name} frame would have {size} bytes; at most {limit} are allowed")
    return head, rows


def _encode_tensor(frame: Frame, limits: Limits) -> tuple[bytes, Any]:
    kind, positions = frame.type, frame.end - frame.start
    if not 0 <= positions <= limits.positions or (not positions and kind is not FrameType.RESULT):
        raise BadInput(f"a {kind.name} frame cannot have {positions} positions")
    if len(frame.names) != NAME_BYTES * (positions + 1):
        raise BadInput(f"a {kind.name} frame of {positions} positions needs {positions + 1} names")
    rows = b"" if frame.rows is None else frame.rows
    if not isinstance(rows, bytes):
        rows = memoryview(rows)
        if not rows.c_contiguous:
            raise BadInput(f"the rows of a {kind.name} frame are not contiguous")
        rows = rows.cast("B") if rows.nbytes else b""
    note = _encode(frame.note)
    trouble = _rows_trouble(frame.codec, frame.start, frame.end, kind, frame.note.want, len(rows))
    if trouble:
        raise BadInput(trouble)
    padding = _PADDING[(_LENGTH.size + len(note)) % 8] if rows else b""
    return b"".join((frame.names, _LENGTH.pack(len(note)), note, padding)), rows


def _encode_control(frame: Frame, limits: Limits) -> bytes:
    kind = frame.type
    wanted = BODIES[kind]
    if type(frame.body) is not (wanted or type(None)):
        raise BadInput(f"a {kind.name} frame cannot carry a body of type {type(frame.body).__name__}")
    if frame.names or frame.codec or (frame.rows is not None and len(frame.rows)):
        raise BadInput(f"a {kind.name} frame carries no names, rows or codec")
    if kind in _RANGES and frame.start > frame.end:
        raise BadInput(f"a {kind.name} frame cannot name the positions {frame.start} to {frame.end}")
    if wanted is None:
        return b""
    try:
        body = _encode(frame.body)
    except OverflowError as error:
        raise BadInput(f"the body of a {kind.name} frame holds a number that is too large") from error
    trouble = _CHECKS[kind](frame.body, limits)
    if trouble:
        raise BadInput(f"the body of a {kind.name} frame is wrong: {trouble}")
    return body


def decode_body(header: Header, body: Any, limits: Limits) -> Frame:
    """The whole frame. `body` is bytes-like; small rows are copied out of it, large ones stay a view.

    Raises ProtocolError.
    """
    if header.type in TENSOR_FRAMES:
        return _decode_tensor(header, body, limits)
    kind, hop, _, session, epoch, start, end = header
    content = None
    decode = _DECODERS.get(kind)
    if decode is None:
        if len(body):
            raise ProtocolError(f"a {kind.name} frame has a body of {len(body)} bytes; it must have none")
    else:
        content = _decoded(decode, body, kind)
        trouble = _CHECKS[kind](content, limits)
        if trouble:
            raise ProtocolError(f"the body of a {kind.name} frame is wrong: {trouble}")
    return Frame(type=kind, session=session, epoch=epoch, hop=hop, start=start, end=end, body=content)


def _decode_tensor(header: Header, body: Any, limits: Limits) -> Frame:
    kind, hop, codec, session, epoch, start, end = header
    size = len(body)
    names_end = NAME_BYTES * (end - start + 1)
    note_start = names_end + _LENGTH.size
    if size < note_start:
        raise ProtocolError(f"a {kind.name} frame of {end - start} positions has only {size} bytes")
    note_end = note_start + _LENGTH.unpack_from(body, names_end)[0]
    if note_end > size:
        raise ProtocolError(f"the note of a {kind.name} frame does not fit its body of {size} bytes")
    note = _decoded(_decode_note, body[note_start:note_end], kind)
    if not 0 <= note.want < _U32 or len(note.timings) > limits.hops:
        raise ProtocolError(f"the note of a {kind.name} frame is out of range")
    rows_start = note_end + (-note_end % 8)
    rows: Any = b""
    if size > note_end:
        if size <= rows_start:
            raise ProtocolError(f"a {kind.name} frame ends within the padding before its rows")
        rows = body[rows_start:] if size > MAX_FRAGMENT else bytes(body[rows_start:])
    trouble = _rows_trouble(codec, start, end, kind, note.want, len(rows))
    if trouble:
        raise ProtocolError(trouble)
    return Frame(
        type=kind, session=session, epoch=epoch, hop=hop, start=start, end=end, codec=codec,
        names=bytes(body[:names_end]), note=note, rows=rows,
    )  # fmt: skip


def _decoded(decode: Callable[[Any], Any], data: Any, kind: FrameType) -> Any:
    # RecursionError: fields that a later version added are skipped, and may be nested without end.
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the msgpack of a {kind.name} frame is damaged: {error}") from error


def _rows_trouble(codec: Codec, start: int, end: int, kind: FrameType, want: int, size: int) -> str:
    if not size:
        return ""
    item = ITEM_BYTES.get(codec)
    if item is None:
        return f"a {kind.name} frame has rows without a codec"
    count = end - max(start, want) if kind is FrameType.RESULT else end - start
    if count <= 0:
        return f"a {kind.name} frame has rows though none are wanted before {want}"
    if size % (count * item):
        return f"{size} bytes of a {kind.name} frame are not {count} rows in {codec.name}"
    return ""


# What a body may hold. Each returns what is wrong, or nothing; the types are msgspec's to check.


def _check_open(body: Open, limits: Limits) -> str:
    if not 0 < len(body.route) <= limits.hops:
        return f"a route of {len(body.route)} hops; 1 to {limits.hops} are allowed"
    if len(body.route) + len(body.standby) > limits.hops:
        return f"{len(body.route)} hops and {len(body.standby)} standbys; {limits.hops} together are allowed"
    if not body.names or len(body.names) % NAME_BYTES:
        return f"{len(body.names)} bytes of names; each has {NAME_BYTES}"
    if not 0 < len(body.nonce) <= 32:
        return f"a driver's nonce of {len(body.nonce)} bytes; 1 to 32 are allowed"
    for codec in (body.codec, *(hop.codec for hop in body.route + body.standby)):
        if _CODECS.get(codec) not in ITEM_BYTES:
            return f"codec {codec} is not known in version {VERSION}"
    if not 0 <= body.numeric_class < 256 or not 0 <= body.need_end < _U32 or not 0 <= body.context < _U32:
        return "a number is out of range"
    at = body.route[0].entry
    for hop in body.route:
        if hop.entry != at:
            return f"the route is not a chain at block {at}"
        at = hop.exit
    for hop in body.route + body.standby:
        if not 0 <= hop.entry < hop.exit < _U32 or not 0 <= hop.keep_to < _U32:
            return f"the route is not a chain at block {hop.entry}"
        if len(hop.addresses) > 16 or len(hop.peer_id) > 64 or any(len(text) > 256 for text in hop.addresses):
            return "a peer id or its addresses are too long"
        if len(hop.ready) > 8:
            return f"{len(hop.ready)} peers to be connected with; at most 8 are allowed"
        for peer_id, addresses in hop.ready:
            if len(addresses) > 16 or len(peer_id) > 64 or any(len(text) > 256 for text in addresses):
                return "a peer id or its addresses are too long"
    return ""


def _check_opened(body: Opened, limits: Limits) -> str:
    if len(body.positions) > limits.hops:
        return f"{len(body.positions)} seats; at most {limits.hops} are allowed"
    if any(not 0 <= hop < 256 or not 0 <= position < _U32 for hop, position in body.positions):
        return "a number is out of range"
    return ""


def _check_stale(body: Stale, limits: Limits) -> str:
    return "" if 0 <= body.epoch < _U32 and len(body.nonce) <= 32 else "a number is out of range"


def _check_busy(body: Busy, limits: Limits) -> str:
    return "" if 0 <= body.retry_after_ms < _U32 else "a number is out of range"


def _check_problem(body: Problem, limits: Limits) -> str:
    if len(body.kind) > 64 or len(body.message) > 4096:
        return "its text is too long"
    if len(body.edge) not in (0, 2) or any(len(end) > 64 for end in body.edge):
        return "an edge is two peer ids"
    return ""


def _check_lost(body: Lost, limits: Limits) -> str:
    return "its text is too long" if max(len(body.source), len(body.target)) > 64 or len(body.reason) > 4096 else ""


def _check_ping(body: Ping, limits: Limits) -> str:
    return "" if 0 <= body.number < 2**64 else "a number is out of range"


def _check_pong(body: Pong, limits: Limits) -> str:
    fits = 0 <= body.number < 2**64 and 0 <= body.sessions < 2**32 and len(body.place) <= MOST_PLACE
    return "" if fits else "a number is out of range"


def _check_pages(body: Pages, limits: Limits) -> str:
    return "a field is too long" if max(len(body.dtype), len(body.digest), len(body.name)) > 32 else ""


_CHECKS: dict[FrameType, Callable[[Any, Limits], str]] = {
    FrameType.OPEN: _check_open,
    FrameType.OPENED: _check_opened,
    FrameType.PAGES: _check_pages,
    FrameType.STALE: _check_stale,
    FrameType.BUSY: _check_busy,
    FrameType.ERROR: _check_problem,
    FrameType.LOST: _check_lost,
    FrameType.PING: _check_ping,
    FrameType.PONG: _check_pong,
}
