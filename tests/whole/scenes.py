"""What the tests of faults have in common: a running swarm, a text in a session, and who is in its route."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from swarm.model import TextSession
from tests.whole.inprocess import InProcessModel, InProcessPeer, InProcessSwarm
from tests.whole.reference import Reference

PROMPT = "The peers that stay "
SPARED = ["0:3", "3:6", "0:3", "3:6"]


@asynccontextmanager
async def running(
    folder: Path, spans: list[str], **options: Any
) -> AsyncIterator[tuple[InProcessSwarm, InProcessModel]]:
    """A swarm and a model on it; afterwards no living peer may hold anything."""
    own = {key: options.pop(key) for key in ("heartbeat", "direct") if key in options}
    async with InProcessSwarm(folder, spans, **own) as swarm, swarm.model(**options) as model:
        yield swarm, model
        await swarm.all_closed()


class Text:
    """The text of one prompt in a session, led on as far as a test wants."""

    def __init__(self, session: TextSession, local: Reference, prompt: str = PROMPT):
        self.session, self.local, self.ids = session, local, local.ids(prompt)
        self.tokens: list[int] = []

    async def more(self, count: int) -> None:
        """That many more tokens, with a generation of their own; equal to the local ones."""
        sending = self.tokens[-1:] or self.ids
        if len(self.session.token_ids) > len(self.ids) + len(self.tokens):
            raise AssertionError("the session holds more than was said")
        async for token in self.session.generate(sending, max_new_tokens=count, ignore_eos=True):
            self.tokens.append(token.id)
        self.local.check(self.ids, self.tokens, len(self.tokens))


def used(swarm: InProcessSwarm, session: TextSession, hop: int) -> InProcessPeer:
    assert session.route is not None
    return swarm.by_id(session.route[hop].peer_id)


def spare(swarm: InProcessSwarm, peer: InProcessPeer) -> InProcessPeer:
    return next(other for other in swarm.living if other.span == peer.span and other is not peer)


def drag(peer: InProcessPeer, delay_s: Callable[[int], float]) -> None:
    """Each pass takes so much longer, and says so. `delay_s` is told how many works are in it."""
    real = peer.service.stages[0].executor.begin

    def begin(items: Any) -> Any:
        packed = real(items)
        steps = packed._steps

        def slow() -> Iterator[None]:
            time.sleep(delay_s(len(items)))
            yield from steps

        packed._steps = slow()
        return packed

    peer.service.stages[0].executor.begin = begin  # type: ignore[method-assign]
