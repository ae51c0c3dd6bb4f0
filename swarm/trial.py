"""A few steps on one peer that mean nothing, for the time that they take: what the peer truly needs for its blocks.

A session of its own with one hop, under random names, so that nothing of it is ever shared; its rows are those of one
and the same token. Owns the trials of a client that are under way; whom to try is decided in `routing/trials.py`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from routing.trials import Trials
from routing.types import Hop, Route
from swarm.codec import lossless_codec
from swarm.driver import NO_LIMIT
from swarm.frames import NAME_BYTES, Codec, Frame, FrameType, HopTiming, Open, OpenHop, StepNote, new_session
from swarm.link import Link

if TYPE_CHECKING:
    from swarm.client import SwarmClient

DIAL_S = 3.0
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


class Trying:
    """Of one client."""

    def __init__(self, client: SwarmClient):
        self._client, self._trials = client, Trials()
        self._on_trial: dict[bytes, Trial] = {}
        self._running: set[asyncio.Task[None]] = set()

    def try_out(self, route: Route, other: Route) -> None:
        """Find out, beside the text, how fast somebody in a route truly is that seems cheaper than the one in use."""
        hop = self._trials.choose(route, other, time.monotonic())
        if hop is not None:
            self._running.add(task := self._client.spawn(self._try(hop)))
            task.add_done_callback(self._running.discard)

    async def _try(self, hop: Hop) -> None:
        client = self._client
        await client.reaching.connect([hop.peer_id], DIAL_S)
        link = client.link(hop.peer_id)
        if link is None:
            return
        codec = lossless_codec(client.config.dtype)
        trial = Trial(new_session(client.join.fingerprint), link, hop, client.embed([0], 0, codec), codec)
        self._on_trial[trial.id] = trial
        try:
            timing = await trial.run()
        finally:
            del self._on_trial[trial.id]
        if timing is not None:
            client.learn_trial(hop, timing)

    def frame_received(self, link: Link, frame: Frame) -> None:
        trial = self._on_trial.get(frame.session)
        if trial is not None and trial.hop.peer_id == link.remote:
            trial.receive(frame)

    async def close(self) -> None:
        """While there are links over which their peers can be told."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
