from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from routing.errors import ProtocolError
from swarm.connection import Connection, Traffic
from swarm.frames import Codec, Frame, FrameType, Lost, Ping, StepNote
from swarm.wire import HEADER_BYTES, Limits
from tests.session.virtual import simulate

SMALL = Limits(fragment_bytes=64, unfinished_frames=3, unfinished_bytes=64 * 2**20)


def session(number: int) -> bytes:
    return number.to_bytes(16, "big")


def bulk(number: int, size: int, tag: int = 0) -> Frame:
    return Frame(
        type=FrameType.STEP, session=session(number), epoch=tag, start=0, end=1, codec=Codec.FP32,
        names=bytes(16), rows=bytes([tag % 256]) * (4 * size),
    )  # fmt: skip


def control(number: int, tag: int = 0) -> Frame:
    return Frame(type=FrameType.ACK, session=session(number), epoch=tag, end=tag)


def drain(connection: Connection, most: int = 1 << 30) -> bytes:
    pieces: list[Any] = []
    while more := connection.data_to_send(most):
        pieces += more
    return b"".join(pieces)


def plain(frame: Frame) -> Frame:
    """Large rows come as a view."""
    frame.rows = bytes(frame.rows)
    return frame


frames = st.one_of(
    st.builds(control, st.integers(0, 3), st.integers(0, 999)),
    st.builds(bulk, st.integers(0, 3), st.integers(0, 200), st.integers(0, 999)),
    st.builds(lambda number: Frame(type=FrameType.PING, body=Ping(number)), st.integers(0, 2**64 - 1)),
    st.builds(
        lambda number, text: Frame(type=FrameType.LOST, session=session(number), body=Lost("a", "b", text)),
        st.integers(0, 3),
        st.text(max_size=300),
    ),
)


@given(st.lists(frames, max_size=12), st.lists(st.integers(1, 150), max_size=200), st.integers(1, 300))
def test_any_split_of_the_stream_gives_the_same_frames_in_order_of_their_session(sent, cuts, most):
    sender, whole, split = Connection(SMALL), Connection(SMALL), Connection(SMALL)
    for frame in sent:
        sender.send(frame)
    data = drain(sender, most)
    assert sender.queued_bytes == 0
    expected = [plain(frame) for frame in whole.receive_data(data)]
    got: list[Frame] = []
    at = 0
    for size in [*cuts, len(data)]:
        got += map(plain, split.receive_data(data[at : at + size]))
        at += size
    assert got == expected
    for number in {frame.session for frame in sent}:
        mine = [frame for frame in sent if frame.session == number]
        assert [frame for frame in got if frame.session == number] == mine
    assert len(got) == len(sent)


@given(st.lists(st.lists(frames, max_size=4), max_size=4))
def test_all_connections_of_a_process_are_counted_together(sent):
    """Each list goes over a connection of its own; large frames in parts, each with a header."""
    here, there, nbytes = Traffic(), Traffic(), 0
    for some in sent:
        sender, receiver = Connection(SMALL, here), Connection(SMALL, there)
        for frame in some:
            sender.send(frame)
        data = drain(sender)
        receiver.receive_data(data)
        nbytes += len(data)
    count = sum(map(len, sent))
    assert (here.frames_out, here.bytes_out, here.frames_in, here.bytes_in) == (count, nbytes, 0, 0)
    assert (there.frames_in, there.bytes_in, there.frames_out, there.bytes_out) == (count, nbytes, 0, 0)


@given(st.data())
def test_frames_sent_while_others_are_under_way_keep_their_order(data):
    sender, receiver = Connection(SMALL), Connection(SMALL)
    sent: list[Frame] = []
    got: list[Frame] = []
    for _ in range(data.draw(st.integers(1, 15))):
        for frame in data.draw(st.lists(frames, max_size=3)):
            sender.send(frame)
            sent.append(frame)
        got += map(plain, receiver.receive_data(b"".join(sender.data_to_send(data.draw(st.integers(1, 400))))))
    got += map(plain, receiver.receive_data(drain(sender)))
    for number in {frame.session for frame in sent}:
        assert [f for f in got if f.session == number] == [f for f in sent if f.session == number]
    assert len(got) == len(sent) and sender.queued_bytes == 0


@given(st.binary(max_size=300))
@example(bytes(36))
def test_random_bytes_raise_nothing_but_a_protocol_error(data):
    connection = Connection()
    try:
        connection.receive_data(data)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            connection.receive_data(b"")


@settings(max_examples=300)
@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_damaged_frames_raise_nothing_but_a_protocol_error(sent, data):
    sender = Connection(SMALL)
    for frame in sent:
        sender.send(frame)
    damaged = bytearray(drain(sender))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        Connection(SMALL).receive_data(damaged)


def test_a_small_frame_overtakes_bulk_of_another_session_and_not_of_its_own():
    sender, receiver = Connection(SMALL), Connection(SMALL)
    sender.send(bulk(1, 100))
    sender.send(control(1, 7))
    begun = b"".join(sender.data_to_send(1))
    sender.send(control(2, 8))
    got = receiver.receive_data(begun + drain(sender))
    assert [(f.session, f.type) for f in got] == [
        (session(2), FrameType.ACK),
        (session(1), FrameType.STEP),
        (session(1), FrameType.ACK),
    ]


def test_bulk_sessions_take_turns_part_by_part():
    sender = Connection(SMALL)
    for number in (1, 2, 3):
        sender.send(bulk(number, 100))
    order = []
    while pieces := sender.data_to_send(1):
        order.append(pieces[0][19])  # the last byte of the session, in the header of this part
    parts = len(order) // 3
    assert parts > 5 and order == [1, 2, 3] * parts


def test_a_sender_begins_no_more_bulk_than_a_receiver_holds():
    """Without the sender's own limit the receiver would refuse the fourth unfinished frame."""
    sender, receiver = Connection(SMALL), Connection(SMALL)
    for number in range(10):
        sender.send(bulk(number, 100))
    assert len(receiver.receive_data(drain(sender, 1))) == 10

    tight = Limits(tensor_bytes=1000, control_bytes=1000, unfinished_bytes=1000, fragment_bytes=64)
    sender, receiver = Connection(tight), Connection(tight)
    for number in range(10):
        sender.send(bulk(number, 100))
    assert len(receiver.receive_data(drain(sender, 1))) == 10


def parts_of(number: int, size: int) -> list[bytes]:
    sender = Connection(SMALL)
    sender.send(bulk(number, size))
    parts = []
    while pieces := sender.data_to_send(1):
        parts.append(b"".join(pieces))
    return parts


def test_too_many_unfinished_frames_are_refused():
    receiver = Connection(SMALL)
    for number in range(3):
        receiver.receive_data(parts_of(number, 100)[0])
    with pytest.raises(ProtocolError, match="more than 3 frames"):
        receiver.receive_data(parts_of(9, 100)[0])


def test_too_many_unfinished_bytes_are_refused():
    tight = Limits(tensor_bytes=200, control_bytes=200, unfinished_bytes=200)
    receiver = Connection(tight)
    for number in range(3):
        receiver.receive_data(parts_of(number, 40)[0])
    with pytest.raises(ProtocolError, match="more than 200 bytes"):
        receiver.receive_data(parts_of(4, 40)[0])


def test_a_body_that_grows_beyond_its_limit_is_refused_before_its_end():
    receiver = Connection(Limits(tensor_bytes=200))
    parts = parts_of(1, 200)
    assert receiver.receive_data(b"".join(parts[:3])) == []
    with pytest.raises(ProtocolError, match="more than 200 bytes"):
        receiver.receive_data(parts[3])
    assert len(parts) > 10


def test_another_frame_amid_the_parts_of_one_is_refused():
    receiver = Connection(SMALL)
    receiver.receive_data(parts_of(1, 100)[0])
    other = Connection(SMALL)
    other.send(control(1))
    with pytest.raises(ProtocolError, match="amid the parts"):
        receiver.receive_data(drain(other))


def test_a_refused_connection_stays_refused():
    connection = Connection()
    with pytest.raises(ProtocolError) as first:
        connection.receive_data(b"\xff" * 36)
    good = Connection()
    good.send(control(1))
    with pytest.raises(ProtocolError) as second:
        connection.receive_data(drain(good))
    assert first.value is second.value


def test_queued_bytes_count_what_is_left():
    sender = Connection()
    sender.send(control(1))
    assert sender.queued_bytes == HEADER_BYTES
    sender.send(bulk(2, 100_000))
    before = sender.queued_bytes
    assert before > 400_000
    sender.data_to_send(100_000)
    assert 200_000 < sender.queued_bytes < before - 90_000
    drain(sender)
    assert sender.queued_bytes == 0


def test_the_receiver_need_not_know_the_senders_part_size():
    sender, receiver = Connection(Limits(fragment_bytes=1000)), Connection(Limits(fragment_bytes=64))
    frame = bulk(1, 5000)
    sender.send(frame)
    (got,) = receiver.receive_data(drain(sender))
    assert plain(got) == frame


def test_bytes_that_trickle_in_cost_no_more_than_their_number():
    sender, receiver = Connection(), Connection()
    sender.send(bulk(1, 16_000))
    data = drain(sender)
    got: list[Frame] = []
    tracemalloc.start()
    for at in range(len(data)):
        got += receiver.receive_data(data[at : at + 1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(got) == 1 and peak < 4 * len(data)


def test_large_rows_are_not_copied_until_they_are_written():
    sender = Connection()
    rows = bytearray(4_000_000)
    frame = Frame(
        type=FrameType.FILL, session=session(1), start=0, end=4, codec=Codec.FP32, names=bytes(40),
        note=StepNote(), rows=rows,
    )  # fmt: skip
    tracemalloc.start()
    sender.send(frame)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


def test_sessions_heal_over_real_bytes():
    """Every frame of the session rule's own schedules, faults and all, goes through the wire and comes out usable."""
    sender, receiver, kinds = Connection(), Connection(), set()

    def carry(frame: Frame) -> Frame:
        sender.send(frame)
        (got,) = receiver.receive_data(drain(sender))
        kinds.add(got.type)
        return got

    for seed in range(12):
        truth = list(simulate(seed).tokens)
        healed = simulate(seed, disturb=True, truth=truth, speculate=seed % 2 == 0, carry=carry)
        assert healed.finished and healed.tokens == truth
    ever = {FrameType.OPEN, FrameType.OPENED, FrameType.STEP, FrameType.GAP, FrameType.FILL, FrameType.RESULT}
    assert kinds >= ever | {FrameType.LOST}
