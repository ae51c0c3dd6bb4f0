"""The client's head as a service to its sessions: those that are ready at the same time share one pass.

The head reads all of its weights for one row or for thirty-two, so sharing is nearly free.
"""

from __future__ import annotations

import asyncio

import torch

from swarm.compute import ComputeThread
from swarm.head import Head
from swarm.tasks import Tasks


class BatchingScorer:
    def __init__(self, head: Head, thread: ComputeThread, tasks: Tasks):
        self._head, self._thread, self._tasks = head, thread, tasks
        self._waiting: list[tuple[torch.Tensor, asyncio.Future[torch.Tensor]]] = []
        self._serving = False

    async def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [1, hidden] to logits fp32 [vocab]."""
        future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((hidden, future))
        if not self._serving:
            self._serving = True
            self._tasks.spawn(self._serve())
        return await future

    async def _serve(self) -> None:
        """A task of its own, so that a caller who is cancelled leaves nobody waiting."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            rows = batch[0][0] if len(batch) == 1 else torch.cat([hidden for hidden, _ in batch])
            logits = await self._thread.run(self._head.logits, rows)
            for (_, future), row in zip(batch, logits, strict=True):
                if not future.done():
                    future.set_result(row)
        self._serving = False
