"""`swarm top`: the swarm look after look, live in a terminal, as tables into a pipe, as JSON lines.

Owns when to look and what is told when the directory cannot be read. How the swarm is looked at is in `status.py`, how
a look is drawn in `top_table.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Protocol

from rich.text import Text

from routing.errors import DaemonFailed, JoinError, TimedOut
from routing.types import PeerId
from swarm.commands.status import INCOMPLETE, snapshot_facts
from swarm.joincode import JoinCode
from swarm.status import ANSWER_S, Lookout, Snapshot
from swarm.terminal import Console, harmless
from swarm.top_table import Change, changes, top_view

LEAST_ANSWER_S = 2.0  # a dial through the swarm's own network needs that


class Looks(Protocol):
    async def look(self, answer_s: float) -> Snapshot: ...


async def top(console: Console, join: str, *, every_s: float, looks: int | None) -> int:
    """The exit code, as of `swarm status`. Raises JoinError and its kin, DaemonFailed, TimedOut, ProtocolError."""
    with console.progress("joining the swarm"):
        lookout = Lookout(JoinCode.parse(join))
        await lookout.__aenter__()
    try:
        with console.live() as show:
            return await watch(console, show, lookout, every_s=every_s, looks=looks)
    finally:
        await lookout.__aexit__(None, None, None)


async def watch(
    console: Console, show: Callable[[Any], None], lookout: Looks, *, every_s: float, looks: int | None
) -> int:
    """Look, tell, wait, for ever or `looks` times. A look that fails is told and made again; only if none succeeds
    its error is raised."""
    before: Snapshot | None = None
    for number in count(1):
        due = time.monotonic() + every_s
        try:
            # Who is silent must not hold up each look for as long as the first one.
            snapshot = await lookout.look(ANSWER_S if before is None else min(ANSWER_S, max(LEAST_ANSWER_S, every_s)))
        except (JoinError, TimedOut, DaemonFailed) as error:
            if number == looks and before is None:
                raise
            _tell_failure(console, show, before, error)
        else:
            changed = changes(before, snapshot)
            show(top_view(snapshot, changed, time.strftime("%H:%M:%S")))
            console.event({"event": "look", "at": round(time.time(), 3), **look_facts(snapshot, changed)})
            before = snapshot
        if number == looks:
            break
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    return INCOMPLETE if before is not None and before.uncovered else 0


def _tell_failure(
    console: Console, show: Callable[[Any], None], before: Snapshot | None, error: Exception
) -> None:
    line = f"the directory cannot be read now, trying again: {harmless(str(error))}"
    console.event({"event": "look_failed", "error": type(error).__name__, "message": str(error)})
    # In a terminal the last picture stays under that line's eyes; into a pipe it would only come twice.
    show(Text(line) if before is None or not console.out.is_terminal else top_view(before, {}, line))


def look_facts(snapshot: Snapshot, changed: Mapping[PeerId, Change]) -> dict[str, Any]:
    """For JSON. Times in milliseconds."""
    facts = []
    for peer_id, change in changed.items():
        was = change.before
        before = None if was is None else {"condition": was.judgement.condition.value, "blocks": str(was.record.span)}
        facts.append({"peer": peer_id, "what": change.what.value, "before": before})
    return {**snapshot_facts(snapshot), "changed": facts}
