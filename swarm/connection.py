"""One connection as a sans-IO object: frames in and bytes out, bytes in and frames out. No socket, no clock.

Owns the parts of bodies and the order in which sessions take turns. Within a session order is kept; between
sessions, frames of one part (decode steps and control) go before bulk, and bulk frames take turns, part by
part. The handshake comes before (`handshake.py`); what a frame means is decided elsewhere.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from routing.errors import ProtocolError
from swarm.frames import Frame
from swarm.wire import HEADER_BYTES, Header, Limits, decode_body, encode_body, pack_header, parse_header


class _Outgoing:
    """A frame on its way out. A small one is one buffer; a bulk one is cut into parts as it is sent."""

    __slots__ = ("_frame", "_pieces", "size", "whole")

    def __init__(self, frame: Frame, limits: Limits):
        head, rows = encode_body(frame, limits)
        self.size = len(head) + len(rows)  # bytes of body not yet taken
        self.whole = b""
        header = pack_header(frame, min(self.size, limits.fragment_bytes), False)
        if self.size <= limits.fragment_bytes:
            self.whole = b"".join((header, head, rows))
        else:
            self._frame = frame
            self._pieces = deque(memoryview(piece) for piece in (head, rows) if len(piece))

    def take_part(self, most: int, into: list[Any]) -> int:
        """Append the next part, header first, to `into`; returns its bytes of body."""
        length = left = min(self.size, most)
        self.size -= length
        into.append(pack_header(self._frame, length, self.size > 0))
        while left:
            piece = self._pieces.popleft()
            into.append(piece[:left])
            if len(piece) > left:
                self._pieces.appendleft(piece[left:])
            left -= min(left, len(piece))
        return length


class Traffic:
    """Frames and bytes so far, of all connections of a process: headers too, without TLS and handshakes."""

    __slots__ = ("bytes_in", "bytes_out", "frames_in", "frames_out")

    def __init__(self) -> None:
        self.bytes_in = self.bytes_out = self.frames_in = self.frames_out = 0


class Connection:
    """Both directions of one connection, after its handshake."""

    def __init__(self, limits: Limits | None = None, traffic: Traffic | None = None):
        self._limits, self._traffic = limits or Limits(), traffic or Traffic()
        self._lanes: dict[bytes, deque[_Outgoing]] = {}  # by session; none of them is ever empty
        self._urgent: deque[bytes] = deque()  # sessions whose next frame is small
        self._waiting: deque[bytes] = deque()  # sessions whose next frame is bulk, not begun
        self._begun: deque[bytes] = deque()  # sessions in the middle of a bulk frame
        self._begun_bytes = 0  # whole size of the bodies begun: what the other side holds for us at most
        self._sizes: dict[bytes, int] = {}  # of the body begun, by session
        self._queued = 0
        self._tail = bytearray()  # received, too short for a whole part
        self._unfinished: dict[bytes, tuple[Header, bytearray]] = {}  # by session
        self._unfinished_bytes = 0
        self._failure: ProtocolError | None = None

    @property
    def queued_bytes(self) -> int:
        """Bytes of frames that `data_to_send` has not handed out yet."""
        return self._queued

    def queued_frames(self, session: bytes) -> int:
        return len(self._lanes.get(session, ()))

    def send(self, frame: Frame) -> None:
        """Queue a frame. Large rows are not copied: leave them as they are until they are sent.

        Raises BadInput if the frame breaks the wire's layout or a limit; nothing is queued then.
        """
        out = _Outgoing(frame, self._limits)
        self._queued += len(out.whole) or out.size
        self._traffic.frames_out += 1
        lane = self._lanes.get(frame.session)
        if lane is not None:
            lane.append(out)
        else:
            self._lanes[frame.session] = deque((out,))
            (self._urgent if out.whole else self._waiting).append(frame.session)

    def data_to_send(self, max_bytes: int) -> list[Any]:
        """What to write next, as bytes-like pieces: about `max_bytes`, at least one part if there is any."""
        pieces: list[Any] = []
        while max_bytes > 0:
            if self._urgent:
                session = self._urgent.popleft()
                out = self._lanes[session].popleft()
                pieces.append(out.whole)
                taken = len(out.whole)
                self._requeue(session)
            elif self._waiting or self._begun:
                taken = self._take_bulk(pieces)
            else:
                break
            self._queued -= taken
            self._traffic.bytes_out += taken
            max_bytes -= taken
        return pieces

    def _take_bulk(self, pieces: list[Any]) -> int:
        if self._waiting and self._may_begin(self._lanes[self._waiting[0]][0].size):
            session = self._waiting.popleft()
            self._sizes[session] = self._lanes[session][0].size
            self._begun_bytes += self._sizes[session]
        else:
            session = self._begun.popleft()
        lane = self._lanes[session]
        taken = lane[0].take_part(self._limits.fragment_bytes, pieces)
        self._traffic.bytes_out += HEADER_BYTES
        if lane[0].size:
            self._begun.append(session)
        else:
            self._begun_bytes -= self._sizes.pop(session)
            lane.popleft()
            self._requeue(session)
        return taken

    def _may_begin(self, size: int) -> bool:
        # The receiver bounds what it holds unfinished, so a sender does not begin more at once.
        if not self._begun:
            return True
        few = len(self._begun) < self._limits.unfinished_frames
        return few and self._begun_bytes + size <= self._limits.unfinished_bytes

    def _requeue(self, session: bytes) -> None:
        lane = self._lanes[session]
        if not lane:
            del self._lanes[session]
        else:
            (self._urgent if lane[0].whole else self._waiting).append(session)

    def receive_data(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that `data` completes.

        Raises ProtocolError, and from then on at every call: the connection must be closed.
        """
        if self._failure is not None:
            raise self._failure
        frames: list[Frame] = []
        if self._tail:
            self._tail += data
            view = memoryview(self._tail)
        else:
            view = memoryview(data)
        try:
            used = self._parse(view, frames)
            rest = None if used == 0 and view.obj is self._tail else bytearray(view[used:])
        except ProtocolError as error:
            self._failure = error
            self._tail, self._unfinished = bytearray(), {}
            raise
        finally:
            view.release()
        if rest is not None:
            self._tail = rest
        self._traffic.bytes_in += len(data)
        self._traffic.frames_in += len(frames)
        return frames

    def _parse(self, view: memoryview, frames: list[Frame]) -> int:
        """Append whole frames to `frames`; returns the bytes used up."""
        at, size = 0, len(view)
        while size - at >= HEADER_BYTES:
            header, length, more = parse_header(view, at, self._limits)
            begin = at + HEADER_BYTES
            if size - begin < length:
                break
            at = begin + length
            if more or header.session in self._unfinished:
                frame = self._join(header, view[begin:at], more)
                if frame is not None:
                    frames.append(frame)
            else:
                frames.append(decode_body(header, view[begin:at], self._limits))
        return at

    def _join(self, header: Header, part: memoryview, more: bool) -> Frame | None:
        session, limits = header.session, self._limits
        if session not in self._unfinished:
            if len(self._unfinished) >= limits.unfinished_frames:
                raise ProtocolError(f"more than {limits.unfinished_frames} frames are under way in parts at once")
            self._unfinished[session] = (header, bytearray())
        first, body = self._unfinished[session]
        if header != first:
            raise ProtocolError(f"a {header.type.name} frame came amid the parts of a {first.type.name} frame")
        body += part
        self._unfinished_bytes += len(part)
        limit = limits.body_bytes(header.type)
        if len(body) > limit:
            raise ProtocolError(f"a {header.type.name} frame has more than {limit} bytes")
        if self._unfinished_bytes > limits.unfinished_bytes:
            raise ProtocolError(f"unfinished frames hold more than {limits.unfinished_bytes} bytes")
        if more:
            return None
        del self._unfinished[session]
        self._unfinished_bytes -= len(body)
        return decode_body(header, memoryview(body), limits)
