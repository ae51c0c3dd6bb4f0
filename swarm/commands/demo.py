"""`swarm demo`: how the demonstration is shown, to people and as JSON."""

from __future__ import annotations

import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING

from routing.types import Hop
from swarm.demo import Local, Told, first_difference, spans, tell, tell_locally
from swarm.local import LocalSwarm
from swarm.progress import Progress
from swarm.render import demo_table, short_id
from swarm.terminal import Console, run

if TYPE_CHECKING:
    from swarm.generation import Token

QUESTION = "Why is the sky blue?"
KNOWN_BLOCKS = {"smollm2": 30}  # known beforehand: its peers start while this process still imports torch
DIFFERENT = 1


def demo(console: Console, model: str, tokens: int, question: str) -> int:
    """The exit code: 0 only if the swarm said what one process says. Raises SwarmError and its kin."""
    begun = time.monotonic()
    messages = [{"role": "user", "content": question}]
    swarm = LocalSwarm(model, spans(KNOWN_BLOCKS.get(model) or _count_blocks(model)), progress=console.note)
    try:
        with console.progress("starting peers"):
            importing = threading.Thread(target=import_module, args=("swarm.model",), daemon=True)
            importing.start()
            swarm.start()
            importing.join()
        told = run(_ask_the_swarm(console, swarm, model, messages, tokens))
        with console.progress("the same question to one process") as progress:
            local = _ask_here(model, messages, tokens, progress)
        same = told.ids == local.ids
        console.say("")
        console.show(demo_table(told.summary(local)))
        if not same:
            console.note(_difference(told, local), style="bold red")
        console.note(f"{len(told.tokens)} tokens; one process alone: {local.tokens_per_s:.1f} tokens/s")
        console.note(f"all in {time.monotonic() - begun:.0f} s")
        console.event({"model": model, "question": question, **told.facts(local)})
    finally:
        with console.progress("ending the peers"):
            swarm.close()
    return 0 if same else DIFFERENT


async def _ask_the_swarm(
    console: Console, swarm: LocalSwarm, name: str, messages: list[dict[str, str]], tokens: int
) -> Told:
    from swarm.model import SwarmModel

    def said(token: Token) -> None:
        console.stream(token.text)

    def killed(hop: Hop) -> None:
        if console.out.is_terminal and console.err.is_terminal:
            console.plain("")  # the text goes on in a line of its own; in a pipe it stays in one piece
        what = f"peer {short_id(hop.peer_id)}, in use for blocks {hop.entry}:{hop.exit}, is gone"
        console.note(f"--- SIGKILL: {what} ---", style="bold red")

    model = SwarmModel.connect(name, join=swarm.join_code, threads=1)
    with console.progress("joining as a client"):
        await model.__aenter__()
    try:
        console.note(f"asking: {messages[-1]['content']}", style="bold")
        told = await tell(swarm, model, messages, tokens, on_token=said, on_kill=killed)
    finally:
        await model.__aexit__()
    console.plain("")
    return told


def _ask_here(name: str, messages: list[dict[str, str]], tokens: int, progress: Progress) -> Local:
    from swarm.checkpoint import open_checkpoint

    return tell_locally(open_checkpoint(name), messages, tokens, progress)


def _count_blocks(name: str) -> int:
    from swarm.checkpoint import open_checkpoint
    from swarm.families import family_of

    config = open_checkpoint(name).config
    return family_of(config).n_blocks(config)


def _difference(told: Told, local: Local) -> str:
    at = first_difference(told.ids, local.ids)
    return f"the texts differ from token {at} on: {told.ids[at : at + 3]} here, {local.ids[at : at + 3]} in one process"
