"""One device of a peer at work for a service: its blocks, its account, what waits for it, and its half of a pass.

Which pass comes next, and where it goes on, is `pipeline.py`'s. What runs on the compute thread is `advance`, and what
it calls.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import torch

from peer import devices
from peer.batch import Batch, cache_of
from peer.blocks import Blocks
from peer.executor import Executor, PassItem
from peer.scheduler import Scheduler
from peer.seats import Work
from routing.errors import BadInput, DeviceLost, Overloaded, ProtocolError
from routing.types import PeerId
from swarm.codec import decode_rows
from swarm.compute import ComputeThread
from swarm.frames import Codec, Frame, Problem

log = logging.getLogger(__name__)


class Kind(StrEnum):
    """Of a batch: who waits for it. In the order of their turns."""

    DECODE = "decode"
    PREFILL = "prefill"
    STANDBY = "standby"  # nobody, soon


class Stage:
    def __init__(self, blocks: Blocks, thread: ComputeThread, decode_pass_s: float, name: str):
        """`name`: of the device, as its owner is told."""
        self.blocks = blocks
        self.lane, self.executor = thread.lane(), Executor(blocks)
        self.scheduler = Scheduler()  # works whose first block is here
        self.here: dict[Kind, deque[Batch]] = {kind: deque() for kind in Kind}  # that wait or are under way, in order
        self.later: Sequence[Stage] = ()  # with the blocks after these
        self.ready = asyncio.Event()
        self.decode_pass_s = decode_pass_s  # running mean
        self.lost: DeviceLost | None = None
        self._name = name

    @property
    def device(self) -> torch.device:
        return self.blocks.shape.device

    @property
    def busy(self) -> bool:
        """With more than decode steps that are under way."""
        return bool(self.here[Kind.PREFILL] or self.here[Kind.STANDBY]) or len(self.scheduler) > 0

    def grow(self, blocks: Blocks) -> None:
        """More blocks, behind those that are here."""
        assert blocks.span.start == self.blocks.span.start and blocks.span.end >= self.blocks.span.end
        self.blocks, self.executor = blocks, Executor(blocks)

    def may_begin(self, kind: Kind) -> bool:
        """Whether later devices keep up: a batch that waits there could have taken along what comes meanwhile."""
        return not self.later or all(len(stage.here[kind]) < 2 for stage in self.later)

    def hurry(self) -> None:
        """A standby that is called into the route must not wait behind others."""
        self.scheduler.hurry()
        for batch in [batch for batch in self.here[Kind.STANDBY] if not batch.waits]:
            self.here[Kind.STANDBY].remove(batch)
            self.here[Kind.PREFILL].append(batch)

    def lose(self, error: Exception) -> bool:
        """Whether it is for want of the device that something failed: then nothing will succeed any more."""
        problem = devices.failure(error, self.device, self._name)
        if isinstance(problem, DeviceLost):
            self.lost = problem
        return self.lost is not None

    # -- on the compute thread -------------------------------------------------------------------------------

    def advance(self, batch: Batch, least_s: float) -> bool:
        """Left after any block when another service is due, or decode steps wait here and it had at least so many
        seconds; never if these are infinite. Whether the end of these blocks was reached."""

        def enough(seconds: float) -> bool:
            mine = seconds >= least_s and self._others_wait(batch)
            return mine or (math.isfinite(least_s) and self.lane.gives_way)

        try:
            if batch.packed is None:
                batch.begin(time.monotonic())
                if batch.at == 0:
                    batch.items = self._good_input(batch)
                if not batch.items:
                    return True
                batch.packed = self.executor.begin(batch.items)
            if not batch.packed.advance(enough):
                return False
        except (BadInput, Overloaded, RuntimeError, MemoryError) as error:  # RuntimeError: whatever torch cannot do
            log.exception("a pass failed")
            self.lose(error)
            for entry in batch.done:
                entry.problem = entry.problem or Problem("failed", f"the pass failed: {error}")
            return True
        result = batch.packed.result
        assert result is not None
        batch.seconds += result.seconds
        for entry, item, finite in zip(batch.running, batch.items, result.finite, strict=True):
            if not finite:
                entry.problem = _not_finite(entry.work, item.hidden)
        return True

    def _others_wait(self, batch: Batch) -> bool:
        if batch.waits and (self.here[Kind.PREFILL] or (self.scheduler.prefill_waits and self.may_begin(Kind.PREFILL))):
            return True
        return bool(self.here[Kind.DECODE]) or (self.scheduler.decode_waits and self.may_begin(Kind.DECODE))

    def _good_input(self, batch: Batch) -> list[PassItem]:
        """A work whose rows cannot be read is left out; all others run."""
        items = []
        for entry in batch.done:
            try:
                rows = self._rows(entry.work)
            except ProtocolError as error:
                entry.problem = Problem("bad-rows", str(error), _edge(entry.work))
            else:
                long = self.blocks.rotary.is_long(entry.work.seat.session.context)
                items.append(PassItem(cache_of(entry.work).parts[0], rows, long))
                batch.running.append(entry)
        return items

    def _rows(self, work: Work) -> torch.Tensor:
        first, *more = [self._rows_of(frame) for frame in (work.frame, *work.more)]
        rows = torch.cat([first[work.skip :], *more]) if more else first[work.skip :]
        return rows.to(self.blocks.shape.dtype)

    def _rows_of(self, frame: Frame) -> torch.Tensor:
        rows = frame.rows
        if not isinstance(rows, torch.Tensor):
            rows = decode_rows(rows, Codec(frame.codec), self.blocks.shape.hidden)
        if rows.shape[0] != frame.end - frame.start:
            raise ProtocolError(f"{rows.shape[0]} rows for {frame.end - frame.start} positions")
        return rows


def _not_finite(work: Work, hidden: torch.Tensor) -> Problem:
    """Whose fault. What comes in so goes out so: asked before each pass, it would cost all that are well."""
    if torch.isfinite(hidden).all():
        return Problem("nonfinite-output", "the output has values that are not finite")
    return Problem("nonfinite-input", "the input has values that are not finite", _edge(work))


def _edge(work: Work) -> tuple[PeerId, PeerId]:
    """Who sent the input of a work, and who computes it."""
    session = work.seat.session
    return session.upstream(work.frame.hop), session.table.me
