"""A few steps on one peer that mean nothing, for the time that they take: what the peer truly needs for its blocks.

A session of its own with one hop, under random names, so that nothing of it is ever shared; its rows are those of one
and the same token. Whom to try is decided in `routing/trials.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from statistics import median
from typing import Any

from routing.types import Hop
from swarm.driver import NO_LIMIT
from swarm.frames import NAME_BYTES, Codec, Frame, FrameType, HopTiming, Open, OpenHop, StepNote
from swarm.link import Link

STEPS = 3
PATIENCE_S = 3.0
REFUSALS = (FrameType.BUSY, FrameType.ERROR, FrameType.UNKNOWN, FrameType.STALE, FrameType.LEAVING)


class Trial:
    """On one hop. `row`: one row [1, hidden], as it goes on the wire in `codec`."""

    def __init__(self, session_id: bytes, link: Link, hop: Hop, row: Any, codec: Codec):
        self.id, self.hop, self._link, self._row, self._codec = session_id, hop, link, row, codec
        self._names = secrets.token_bytes(NAME_BYTES * (STEPS + 1))
        self._timings: list[HopTiming] = []
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> HopTiming | None:
        """The middle of what the steps took (queue and computing); None: the peer would not, or not in time."""
        place = OpenHop(self.hop.peer_id, (), self.hop.entry, self.hop.exit, NO_LIMIT, codec=self._codec)
        body = Open(
            nonce=secrets.token_bytes(8), route=(place,), names=self._names[:NAME_BYTES], need_end=0,
            codec=self._codec, numeric_class=int(self._codec), adopts=False,
        )  # fmt: skip
        self._send(Frame(type=FrameType.OPEN, body=body))
        self._step()
        try:
            await asyncio.wait_for(self._ended, PATIENCE_S)
        except TimeoutError:
            return None
        finally:
            self._send(Frame(type=FrameType.CLOSE))
        return HopTiming(
            queue_us=int(median(timing.queue_us for timing in self._timings)),
            compute_us=int(median(timing.compute_us for timing in self._timings)),
        ) if len(self._timings) == STEPS else None  # fmt: skip

    def receive(self, frame: Frame) -> None:
        if self._ended.done():
            return
        if frame.type in REFUSALS:
            self._ended.set_result(None)  # it has no room, or leaves: no word on how fast it is
        if frame.type is not FrameType.RESULT or not frame.note.timings:
            return
        self._timings.append(frame.note.timings[0])
        if len(self._timings) == STEPS:
            self._ended.set_result(None)
        else:
            self._step()

    def _step(self) -> None:
        at = len(self._timings)
        names = self._names[at * NAME_BYTES : (at + 2) * NAME_BYTES]
        self._send(
            Frame(
                type=FrameType.STEP, start=at, end=at + 1, codec=self._codec, names=names, note=StepNote(want=at),
                rows=self._row,
            )
        )  # fmt: skip

    def _send(self, frame: Frame) -> None:
        frame.session = self.id
        self._link.send(frame)
