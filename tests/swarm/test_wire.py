from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from routing.errors import BadInput, ProtocolError
from swarm.connection import Connection
from swarm.frames import (
    BODIES,
    TENSOR_FRAMES,
    Codec,
    Frame,
    FrameType,
    HopTiming,
    Lost,
    Open,
    Opened,
    OpenHop,
    Ping,
    Pong,
    Problem,
    StepNote,
)
from swarm.wire import HEADER_BYTES, MAX_FRAGMENT, Limits

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "wire-vectors.json").read_text())
SESSION = bytes(range(16))


def plain(value: Any) -> Any:
    """A frame, or what it holds, as the vectors show it: structs as lists, byte strings in hex."""
    if isinstance(value, Frame):
        shown = {"type": value.type.name}
        for name in ("session", "epoch", "hop", "start", "end"):
            shown[name] = plain(getattr(value, name))
        if value.type in TENSOR_FRAMES:
            shown |= {"codec": value.codec.name, "names": plain(value.names), "note": plain(value.note)}
            shown["rows"] = plain(value.rows)
        else:
            shown["body"] = plain(value.body)
        return shown
    if isinstance(value, msgspec.Struct):
        return [plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value


def written(frame: Frame, limits: Limits | None = None) -> bytes:
    connection = Connection(limits)
    connection.send(frame)
    pieces = []
    while more := connection.data_to_send(1 << 20):
        pieces += more
    return b"".join(pieces)


def read(data: bytes, limits: Limits | None = None) -> Frame:
    (frame,) = Connection(limits).receive_data(data)
    return frame


def names(count: int) -> bytes:
    return bytes(i % 251 for i in range(8 * count))


def step(positions: int = 1, width: int = 2, **changes: Any) -> Frame:
    values = dict(
        type=FrameType.STEP, session=SESSION, epoch=1, start=5, end=5 + positions, codec=Codec.FP32,
        names=names(positions + 1), rows=bytes(positions * width * 4),
    )  # fmt: skip
    return Frame(**(values | changes))


def named(vectors: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


@named(VECTORS["frames"])
def test_a_vector_reads_as_its_frame_and_writes_as_its_bytes(vector):
    frame = read(bytes.fromhex(vector["hex"]))
    assert plain(frame) == vector["frame"]
    assert written(frame).hex() == vector["hex"]


@named(VECTORS["parts"])
def test_a_vector_in_parts(vector):
    limits = Limits(fragment_bytes=vector["fragment_bytes"])
    frame = read(bytes.fromhex(vector["hex"]))
    assert plain(frame) == vector["frame"]
    assert written(frame, limits).hex() == vector["hex"]


@named(VECTORS["refused"])
def test_a_vector_that_is_refused(vector):
    with pytest.raises(ProtocolError, match=vector["error"]):
        Connection().receive_data(bytes.fromhex(vector["hex"]))


def test_there_is_a_vector_for_each_frame_type():
    shown = {vector["frame"]["type"] for vector in VECTORS["frames"]}
    assert shown == {kind.name for kind in FrameType}


def test_every_cut_of_a_vector_is_refused_or_waits():
    for vector in VECTORS["frames"]:
        data = bytes.fromhex(vector["hex"])
        for size in range(HEADER_BYTES, len(data)):
            assert Connection().receive_data(data[:size]) == []  # the header promises more
            shorter = data[:32] + (size - HEADER_BYTES).to_bytes(4, "little") + data[HEADER_BYTES:size]
            try:
                frame = read(shorter)
            except ProtocolError:
                continue
            # Only rows may be missing, as a whole or by whole elements of the one row.
            assert frame.type in TENSOR_FRAMES and len(frame.rows) < len(bytes.fromhex(vector["frame"]["rows"]))


def test_rows_start_at_a_multiple_of_eight_bytes_of_the_body():
    for timings in range(9):
        frame = step(note=StepNote(5, (HopTiming(1, 2**timings, 3),) * timings), rows=b"\xff" * 8)
        body = written(frame)[HEADER_BYTES:]
        assert body.index(b"\xff" * 8) % 8 == 0
        assert read(written(frame)) == frame


def test_rows_may_be_any_contiguous_buffer():
    numpy = pytest.importorskip("numpy")
    rows = numpy.arange(6, dtype="<f4").reshape(3, 2)
    frame = read(written(step(positions=3, rows=rows)))
    assert (numpy.frombuffer(frame.rows, "<f4").reshape(3, 2) == rows).all()
    with pytest.raises(BadInput, match="contiguous"):
        written(step(positions=3, rows=numpy.zeros((3, 4), "<f4")[:, ::2]))


def test_small_rows_do_not_hold_on_to_the_buffer_they_came_in():
    assert type(read(written(step())).rows) is bytes


def test_a_body_of_exactly_64_kib_is_one_part_and_one_more_byte_makes_two():
    overhead = len(written(step(rows=b""))) - HEADER_BYTES
    overhead += -overhead % 8
    whole = step(rows=bytes(MAX_FRAGMENT - overhead))
    assert len(written(whole)) == HEADER_BYTES + MAX_FRAGMENT
    more = step(rows=bytes(MAX_FRAGMENT - overhead + 4))
    assert len(written(more)) == 2 * HEADER_BYTES + MAX_FRAGMENT + 4
    assert read(written(more)) == more


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"end": 5}, "0 positions"),
        ({"end": 4}, "-1 positions"),
        ({"end": 5 + 4097, "names": names(4098), "rows": b""}, "4097 positions"),
        ({"names": names(1)}, "needs 2 names"),
        ({"rows": bytes(7)}, "7 bytes"),
        ({"codec": Codec.BF16, "rows": bytes(7)}, "7 bytes"),
        ({"codec": Codec.NONE}, "without a codec"),
        ({"session": b"short"}, "16 bytes"),
        ({"epoch": 2**32}, "header"),
        ({"epoch": -1}, "header"),
        ({"hop": 256}, "header"),
        ({"rows": bytes(64 * 2**20)}, "at most 67108864"),
        ({"type": FrameType.RESULT, "note": StepNote(6)}, "none are wanted"),
        ({"type": FrameType.PAGES}, "body of type NoneType"),
        ({"type": FrameType.GAP}, "no names, rows or codec"),
    ],
)
def test_a_wrong_frame_is_not_sent(changes, error):
    connection = Connection()
    with pytest.raises(BadInput, match=error):
        connection.send(step(**changes))
    assert connection.queued_bytes == 0 and connection.data_to_send(1000) == []


def test_an_ack_carries_its_credits_in_start():
    ack = Frame(type=FrameType.ACK, session=SESSION, epoch=1, hop=1, start=1024)
    assert read(written(ack)) == ack


def test_a_gap_names_a_range():
    with pytest.raises(BadInput, match="5 to 4"):
        written(Frame(type=FrameType.GAP, session=SESSION, start=5, end=4))
    backwards = bytearray(written(Frame(type=FrameType.GAP, session=SESSION, start=4, end=5)))
    backwards[24], backwards[28] = 5, 4
    with pytest.raises(ProtocolError, match="5 to 4"):
        read(bytes(backwards))


def test_rows_that_were_dropped_are_no_rows():
    assert read(written(step(rows=None))) == step(rows=b"")


def test_a_result_holds_rows_from_want_on_only():
    result = step(positions=3, type=FrameType.RESULT, note=StepNote(7), rows=bytes(8))
    assert read(written(result)) == result
    for want, rows in ((0, bytes(24)), (8, b""), (5, b"")):
        frame = step(positions=3, type=FrameType.RESULT, note=StepNote(want), rows=rows)
        assert read(written(frame)) == frame
    empty = step(positions=0, type=FrameType.RESULT, rows=b"")
    assert read(written(empty)) == empty


def control(body: Any, kind: FrameType) -> bytes:
    """A control frame with any body at all."""
    data = msgspec.msgpack.encode(body)
    head = bytes([kind, 0, 0, 0]) + SESSION + bytes(12) + len(data).to_bytes(4, "little")
    return head + data


HOP = OpenHop("p", (), 0, 1, 0)


@pytest.mark.parametrize(
    "body",
    [
        Open(b"n", (), names(1), 0),
        Open(b"n", (HOP,) * 2, names(1), 0),
        Open(b"n", tuple(OpenHop("p", (), i, i + 1, 0) for i in range(257)), names(1), 0),
        Open(b"n", (HOP, OpenHop("q", (), 2, 3, 0)), names(1), 0),
        Open(b"n", (HOP,), names(1), 0, standby=tuple(OpenHop(f"p{i}", (), 0, 1, 0) for i in range(256))),
        Open(b"n", (HOP,), names(1), 0, standby=(OpenHop("q", (), 1, 1, 0),)),
        Open(b"n", (HOP,), names(1), 0, standby=(OpenHop("q", ("a" * 257,), 0, 1, 0),)),
        Open(b"n", (OpenHop("p", (), 0, 0, 0),), names(1), 0),
        Open(b"n", (OpenHop("p", (), 0, 1, -1),), names(1), 0),
        Open(b"n", (OpenHop("p" * 65, (), 0, 1, 0),), names(1), 0),
        Open(b"n", (OpenHop("p", ("a",) * 17, 0, 1, 0),), names(1), 0),
        Open(b"n", (OpenHop("p", ("a" * 257,), 0, 1, 0),), names(1), 0),
        Open(b"n", (HOP,), b"", 0),
        Open(b"n", (HOP,), b"1234567", 0),
        Open(b"", (HOP,), names(1), 0),
        Open(b"n" * 33, (HOP,), names(1), 0),
        Open(b"n", (HOP,), names(1), -1),
        Open(b"n", (HOP,), names(1), 0, codec=0),
        Open(b"n", (HOP,), names(1), 0, codec=77),
        Open(b"n", (HOP,), names(1), 0, numeric_class=256),
        Open(b"n", (HOP,), names(1), 0, context=2**32),
        Opened(((256, 0),)),
        Opened(((0, -1),)),
        Opened(((0, 0),) * 257),
        Problem("k" * 65, ""),
        Problem("k", "m" * 4097),
        Problem("k", "", ("one",)),
        Lost("a" * 65, "b"),
        Ping(-1),
        Pong(1, -1),
    ],
)
def test_a_body_out_of_range_is_neither_sent_nor_taken(body):
    kind = next(kind for kind, wanted in BODIES.items() if wanted is type(body))
    with pytest.raises(BadInput):
        written(Frame(type=kind, session=SESSION, body=body))
    with pytest.raises(ProtocolError):
        read(control(body, kind))


@pytest.mark.parametrize("body", [None, Ping(1)])
def test_a_body_of_another_type_is_not_sent(body):
    with pytest.raises(BadInput, match="cannot carry"):
        written(Frame(type=FrameType.OPENED, session=SESSION, body=body))


def test_fields_that_a_later_version_adds_at_the_end_are_skipped():
    assert read(control([7, "new"], FrameType.PING)).body == Ping(7)


def test_endless_nesting_in_skipped_fields_is_refused_by_name():
    data = b"\x92\x01" + b"\x91" * 60_000 + b"\x01"
    head = bytes([FrameType.PING, 0, 0, 0]) + SESSION + bytes(12) + len(data).to_bytes(4, "little")
    with pytest.raises(ProtocolError):
        read(head + data)


def test_text_that_is_not_utf8_is_refused_by_name():
    data = b"\x92\xa1\xff\xa1x"
    head = bytes([FrameType.ERROR, 0, 0, 0]) + SESSION + bytes(12) + len(data).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="damaged"):
        read(head + data)


def test_the_largest_names_fit_an_open_and_more_are_refused_here():
    route = (HOP,)
    fits = Frame(type=FrameType.OPEN, session=SESSION, body=Open(b"n", route, names(131_000), 0))
    assert read(written(fits)) == fits
    too_long = Frame(type=FrameType.OPEN, session=SESSION, body=Open(b"n", route, names(131_100), 0))
    with pytest.raises(BadInput, match="at most 1048576"):
        written(too_long)


@pytest.mark.parametrize(
    "limits",
    [
        {"fragment_bytes": 0},
        {"fragment_bytes": 65537},
        {"hops": 0},
        {"hops": 257},
        {"unfinished_frames": 0},
        {"unfinished_bytes": 64 * 2**20 - 1},
    ],
)
def test_limits_are_checked_where_they_are_made(limits):
    with pytest.raises(BadInput):
        Limits(**limits)
